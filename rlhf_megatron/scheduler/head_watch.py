"""How the ranks compute log-probs, told once, and every fall-back to a simpler backend of the head, when it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.workers.findings import HeadReport


class HeadWatch:
    """Asks the ranks of `roles` after each step, until their self-checks are over."""

    def __init__(self, group: WorkerGroup, roles: Sequence[str], note: Callable[[str], None]) -> None:
        self._group = group
        self._roles = list(roles)
        self._note = note
        self._told: set[str] = set()
        self._num_fallbacks = 0
        self._is_over = False

    def metrics(self) -> dict[str, float]:
        """To be called after a step's update."""
        if not self._is_over:
            calls = {role: self._group.broadcast(f"{role}.head_report") for role in self._roles}
            reports = {role: [found for found in call.result() if found is not None] for role, call in calls.items()}
            self._num_fallbacks = sum(len(report.notices) for of_role in reports.values() for report in of_role)
            self._is_over = not any(report.num_checks_left for of_role in reports.values() for report in of_role)
            for role, of_role in reports.items():
                for text in _lines(role, of_role):
                    self._tell(text)
        return {"perf/num_head_fallbacks": float(self._num_fallbacks)}

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)


def _lines(role: str, reports: Sequence[HeadReport]) -> list[str]:
    """Ranks that chose alike are one line."""
    choices = dict.fromkeys(f"head of the {role}: {report.choice}" for report in reports)
    return [*choices, *(f"[{report.where}] {notice}" for report in reports for notice in report.notices)]
