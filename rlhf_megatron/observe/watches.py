"""Watches ask the ranks after each update: the most memory that any needed, and which backend computes log-probs.

A choice of backend is noted once, a fall-back to a simpler one when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlhf_megatron.observe.metrics.rates import peak_tflops
from rlhf_megatron.runtime.proxies import ActorProxy, ReferenceProxy, Workers
from rlhf_megatron.workers.findings import HeadReport, MemoryReport

GIB = float(1 << 30)


class MemoryWatch:
    """Asks one role a pool: what it tells is of a whole process."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def metrics(self) -> dict[str, float]:
        """To be called after a step's update."""
        calls = [worker.memory_report() for worker in self._workers.of_pools().values()]
        return memory_metrics([report for call in calls for report in call.result()])


def memory_metrics(reports: Iterable[MemoryReport]) -> dict[str, float]:
    """The largest of each over `reports`, one or more; the smallest peak, where every device is one that is known."""
    found = list(reports)
    metrics = {"perf/cpu_memory_used_gb": max(r.resident_bytes for r in found) / GIB}
    names = {report.device_name for report in found}
    if names == {""}:
        return metrics
    metrics["perf/max_memory_allocated_gb"] = max(r.peak_allocated_bytes for r in found) / GIB
    metrics["perf/max_memory_reserved_gb"] = max(r.peak_reserved_bytes for r in found) / GIB
    peaks = [peak for name in names if (peak := peak_tflops(name)) is not None]
    return metrics | ({"perf/peak_tflops": min(peaks)} if len(peaks) == len(names) else {})


class HeadWatch:
    """Asks the ranks of `policies` after each step, until their self-checks are over."""

    def __init__(self, policies: Sequence[ActorProxy | ReferenceProxy], note: Callable[[str], None]) -> None:
        self._policies = policies
        self._note = note
        self._told: set[str] = set()
        self._num_fallbacks = 0
        self._is_over = False

    def metrics(self) -> dict[str, float]:
        """To be called after a step's update."""
        if not self._is_over:
            calls = {policy.role: policy.head_report() for policy in self._policies}
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
