"""Generate, then train, then generate again: every token of a step comes from the policy that
the step trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.group_selection import select_first_started
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import SCHEDULES, Schedule


@SCHEDULES.register("synchronous")
class SynchronousSchedule(Schedule):
    """Lag 0. Trainer and engines wait for each other, and may share devices."""

    takes_turns: ClassVar[bool] = True
    max_lag: ClassVar[int] = 0

    def count_groups_to_start(self, flow: GroupFlow) -> int:
        """Return how many groups the batch still lacks; 0 while a step is trained."""
        return (
            0
            if flow.is_training
            else max(0, min(flow.batch_size - len(flow.groups_in_flight), flow.num_groups_needed))
        )

    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        """Return the groups that were started first, or None until all of them are scored."""
        return select_first_started(flow)

    def select_groups_to_give_up(self, flow: GroupFlow) -> Sequence[int]:
        """Return all groups in flight: they were started beyond the batch, in place of groups
        without signal.
        """
        return list(flow.groups_in_flight)
