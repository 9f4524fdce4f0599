"""While a step is trained the batch of the next one is generated, from the weights before that
step's update.

As in "one step off policy" of the field: at every sync all that was started is done, so a batch
has one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.group_selection import select_first_scored
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import SCHEDULES, Schedule


@SCHEDULES.register("one_step_off")
class OneStepOffSchedule(Schedule):
    """Lag 1, 0 at the first step."""

    max_lag: ClassVar[int] = 1

    def count_groups_to_start(self, flow: GroupFlow) -> int:
        """Return how many groups the next batch still lacks; 0 between update and sync, which waits
        for running groups.
        """
        if flow.is_update_done:  # the sync waits for those that are generated
            return 0
        return max(0, min(flow.batch_size - len(flow.groups_in_flight), flow.num_groups_needed))

    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        """Return the groups that were scored first, or None where too few are scored."""
        return select_first_scored(flow)
