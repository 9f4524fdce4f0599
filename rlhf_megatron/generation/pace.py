"""How far a job of many prompts is, how fast, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Pace:
    """Tells every ten seconds how far the job is, how fast, and when it will be done."""

    EVERY_S = 10.0

    def __init__(self, num_prompts: int, report: Callable[[str], None]) -> None:
        self._report, self._num_prompts = report, num_prompts
        self._start = self._told = time.monotonic()
        self._done = self._samples = self._tokens = 0

    def add(self, num_tokens: Sequence[int]) -> None:
        """Count one answered prompt."""
        self._done += 1
        self._samples += len(num_tokens)
        self._tokens += sum(num_tokens)
        now = time.monotonic()
        if now - self._told >= self.EVERY_S or self._done == self._num_prompts:
            self._told = now
            seconds = max(now - self._start, 1e-9)
            left = seconds / self._done * (self._num_prompts - self._done)
            self._report(
                f"{self._done} of {self._num_prompts} prompts, {self._tokens / seconds:.0f} tokens/s,"
                f" {_clock(seconds)} gone, {_clock(left)} left"
            )

    def figures(self) -> dict[str, float]:
        """Prompts, samples and tokens so far, and seconds."""
        counts = {"prompts": self._done, "samples": self._samples, "tokens": self._tokens}
        return {name: float(count) for name, count in counts.items()} | {"seconds": time.monotonic() - self._start}


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
