"""The health verdicts of a run, step after step: what is told when one changes, and what stands of them at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.scheduler.health import KEYS, NUM_BEFORE, WINDOW, Verdict, verdicts


@dataclass
class Trouble:
    """A verdict that was bad at some step."""

    first_step: int
    last_step: int
    num_steps: int  # at which it was bad
    is_now: bool
    text: str  # of the last of them


class HealthWatch:
    """Keeps of the former steps only those that the rules read."""

    def __init__(self) -> None:
        self.troubles: dict[str, Trouble] = {}
        self._num_seen = 0
        self._first: list[dict[str, float]] = []
        self._last: deque[dict[str, float]] = deque(maxlen=max(NUM_BEFORE + 1, WINDOW))

    def seen(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """(metrics health/*, lines for the person who watches: one for each verdict that has changed)."""
        row = {key: float(metrics[key]) for key in KEYS if metrics.get(key) is not None}
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._last.append(row)
        self._num_seen += 1
        found = verdicts(self._steps())
        lines = [line for verdict in found if (line := self._take(step, verdict))]
        return {f"health/{verdict.name}": float(verdict.is_bad) for verdict in found}, lines

    def summary(self) -> dict[str, dict[str, Any]]:
        """By verdict, those that were bad at some step."""
        return {name: asdict(trouble) for name, trouble in self.troubles.items()}

    def _steps(self) -> list[dict[str, float]]:
        """All steps of a short run; of a longer one the first and the last, which is all that any rule reads."""
        num_between = self._num_seen - len(self._last)
        return [*self._first[: max(0, num_between)], *self._last]

    def _take(self, step: int, verdict: Verdict) -> str:
        known = self.troubles.get(verdict.name)
        was_bad = known is not None and known.is_now
        if verdict.is_bad:
            if known is None:
                known = self.troubles[verdict.name] = Trouble(step, step, 0, True, "")
            known.last_step, known.is_now, known.text = step, True, str(verdict)
            known.num_steps += 1
            return "" if was_bad else f"step {step}: {verdict}"
        if known is not None and was_bad:
            known.is_now = False
            return f"step {step}: health/{verdict.name} is over"
        return ""
