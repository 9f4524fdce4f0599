"""While a step is trained the batch of the next one is generated, from the weights before that step's update.

As in "one step off policy" of the field: at every sync all that was started is done, so a batch has one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlhf_megatron.scheduler.schedules.base import SCHEDULES, Schedule
from rlhf_megatron.scheduler.schedules.common import first_scored
from rlhf_megatron.scheduler.schedules.flow import Flow


@SCHEDULES.register("one_step_off")
class OneStepOff(Schedule):
    """Lag 1, 0 at the first step."""

    max_lag: ClassVar[int] = 1

    def num_to_start(self, flow: Flow) -> int:
        if flow.is_updated:  # the sync waits for those that are generated
            return 0
        return max(0, min(flow.batch_size - len(flow.in_flight), flow.num_wanted))

    def batch(self, flow: Flow) -> Sequence[int] | None:
        return first_scored(flow)
