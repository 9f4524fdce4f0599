"""How far a job of many prompts is, how fast, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class ProgressReporter:
    """Tells every ten seconds how far the job is, how fast, and when it will be done."""

    REPORT_INTERVAL_S = 10.0

    def __init__(self, num_prompts: int, report: Callable[[str], None]) -> None:
        self._report = report
        self._num_prompts = num_prompts
        self._start_time = self._last_report_time = time.monotonic()
        self._num_answered = self._num_samples = self._num_tokens = 0

    def count_prompt(self, sample_lengths: Sequence[int]) -> None:
        """Count one answered prompt."""
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
        """Prompts, samples and tokens so far, and seconds."""
        counts = {
            "prompts": self._num_answered,
            "samples": self._num_samples,
            "tokens": self._num_tokens,
        }
        return {name: float(count) for name, count in counts.items()} | {
            "seconds": time.monotonic() - self._start_time
        }


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
