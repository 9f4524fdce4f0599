"""Generate, then train, then generate again: every token of a step comes from the policy that the step trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.scheduler.schedules.base import SCHEDULES, OnStale, OnSync
from rlhf_megatron.scheduler.schedules.common import first_scored
from rlhf_megatron.scheduler.schedules.flow import Flow


@SCHEDULES.register("synchronous")
@dataclass(frozen=True)
class Synchronous:
    """Lag 0. Trainer and engines wait for each other, and may share devices."""

    max_lag: int = 0
    on_sync: OnSync = OnSync.WAIT
    on_stale: OnStale = OnStale.DROP
    annotates_early: bool = False

    def num_to_start(self, flow: Flow) -> int:
        return 0 if flow.is_training else min(flow.batch_size - len(flow.in_flight), flow.num_wanted)

    def batch(self, flow: Flow) -> Sequence[int] | None:
        return first_scored(flow)

    def leftover(self, flow: Flow) -> Sequence[int]:
        return ()

    def stale(self, flow: Flow) -> Sequence[int]:
        return ()
