"""Generate, then train, then generate again: every token of a step comes from the policy that the step trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlhf_megatron.scheduler.schedules.base import SCHEDULES, Schedule
from rlhf_megatron.scheduler.schedules.common import first_started
from rlhf_megatron.scheduler.schedules.flow import Flow


@SCHEDULES.register("synchronous")
class Synchronous(Schedule):
    """Lag 0. Trainer and engines wait for each other, and may share devices."""

    takes_turns: ClassVar[bool] = True
    max_lag: ClassVar[int] = 0

    def num_to_start(self, flow: Flow) -> int:
        return 0 if flow.is_training else max(0, min(flow.batch_size - len(flow.in_flight), flow.num_wanted))

    def batch(self, flow: Flow) -> Sequence[int] | None:
        return first_started(flow)

    def leftover(self, flow: Flow) -> Sequence[int]:
        """Groups started beyond the batch in the place of others without signal."""
        return list(flow.in_flight)
