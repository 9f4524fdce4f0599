"""The most memory that any rank has needed, and what device it is, asked of the ranks after each update."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.flops import peak_tflops
from rlhf_megatron.workers.memory import MemoryReport

GIB = float(1 << 30)


class MemoryWatch:
    """Asks one role a pool: what it tells is of a whole process."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def metrics(self) -> dict[str, float]:
        """To be called after a step's update."""
        calls = [self._group.broadcast(f"{pool}.memory_report") for pool in self._group.layouts]
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
