"""How far a job of many prompts is, how fast, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class ProgressReporter:
    """Reports every ten seconds, and at the end, how far a job of many prompts is, how fast, and
    how long it will take.
    """

    REPORT_INTERVAL_S = 10.0

    def __init__(self, num_prompts: int, report: Callable[[str], None]) -> None:
        """Start the clock. `num_prompts` is the number of prompts to be answered now."""
        self._report = report
        self._num_prompts = num_prompts
        self._start_time = self._last_report_time = time.monotonic()
        self._num_answered = self._num_samples = self._num_tokens = 0

    def count_prompt(self, sample_lengths: Sequence[int]) -> None:
        """Count an answered prompt with the lengths of its samples in tokens, and report if it is
        time.
        """
        self._num_answered += 1
        self._num_samples += len(sample_lengths)
        self._num_tokens += sum(sample_lengths)
        now = time.monotonic()
        if (
            now - self._last_report_time >= self.REPORT_INTERVAL_S
            or self._num_answered == self._num_prompts
        ):
            self._last_report_time = now
            seconds = max(now - self._start_time, 1e-9)
            left = seconds / self._num_answered * (self._num_prompts - self._num_answered)
            self._report(
                f"{self._num_answered} of {self._num_prompts} prompts,"
                f" {self._num_tokens / seconds:.0f} tokens/s, {_format_clock(seconds)} gone,"
                f" {_format_clock(left)} left"
            )

    def collect_figures(self) -> dict[str, float]:
        """Return the numbers of prompts, samples and tokens so far, and the seconds since the
        start.
        """
        counts = {
            "prompts": self._num_answered,
            "samples": self._num_samples,
            "tokens": self._num_tokens,
        }
        return {name: float(count) for name, count in counts.items()} | {
            "seconds": time.monotonic() - self._start_time
        }


def _format_clock(seconds: float) -> str:
    """Return seconds as "hours:minutes:seconds"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
