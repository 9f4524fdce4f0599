"""Whether the ranks that hold the same tensors still hold the same bits: asked of the hosts every so many steps.

Asked before every checkpoint too, so that none is written of weights that differ or are not finite.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlhf_megatron.runtime.proxies import TrainedProxy
from rlhf_megatron.workers.findings import ReplicaReport

NUM_SHOWN = 20  # findings in a message


class ReplicasDiffer(ValueError):
    """Ranks disagree on what they hold alike, or parameters are not finite. The run must not go on with them."""


def check_replicas(workers: Sequence[TrainedProxy]) -> dict[str, float]:
    """Metrics of a check of `workers`, at the same time where they have pools of their own.

    Raises ReplicasDiffer naming each tensor and the ranks that differ from the majority.
    """
    start = time.monotonic()
    calls = {worker.role: worker.check_replicas() for worker in workers}
    reports: dict[str, list[ReplicaReport]] = {role: call.result() for role, call in calls.items()}
    differences = [
        f"[{role}] {difference}"
        for role, of_ranks in reports.items()
        for report in of_ranks
        for difference in report.differences
    ]
    not_finite = [
        f"[{role} {report.where}] {bad}"
        for role, of_ranks in reports.items()
        for report in of_ranks
        for bad in report.not_finite
    ]
    if differences:
        raise ReplicasDiffer(
            f"tensors that ranks hold alike are not the same ({len(differences)}):\n  {_shown(differences)}\n"
            "One of the ranks computed, received or stored something else: its hardware, or a race. Start again from"
            " the newest checkpoint, which was checked; where the same rank differs again, replace its machine."
        )
    if not_finite:
        raise ReplicasDiffer(
            f"parameters are not finite ({len(not_finite)}):\n  {_shown(not_finite)}\nThe last optimizer step was"
            " finite and overflowed them: lower the learning rate or clip_grad, and start again from the newest"
            " checkpoint."
        )
    return {"timing_s/desync": time.monotonic() - start}


def _shown(lines: list[str]) -> str:
    more = [f"... and {len(lines) - NUM_SHOWN} more"] if len(lines) > NUM_SHOWN else []
    return "\n  ".join([*lines[:NUM_SHOWN], *more])
