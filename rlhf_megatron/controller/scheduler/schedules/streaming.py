"""Each group goes on as soon as it is done: scored, and its log-probs computed, while others are
still generated.

New groups are started between steps only, so all that is trained is of the policy that trains, but
for the groups that `carry_over` leaves to later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlhf_megatron.controller.scheduler.schedules import group_selection
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import (
    SCHEDULES,
    Schedule,
    SyncPolicy,
)


@dataclass(frozen=True)
class StreamingSchedule(Schedule):
    """`tail` wait: a step has the groups that were started first. drop: those that were done first;
    others are lost. carry_over: those with the oldest tokens; others go on over the sync with the
    new weights and train later, and a step that could leave one of them behind for
    good waits for it.
    """

    oversampling: float = 1.0  # groups in flight for each that a step trains
    # what becomes of the slowest groups of a step
    tail: Literal["wait", "drop", "carry_over"] = "wait"
    max_lag: int = 0  # syncs that a carried group may see before it is trained

    annotates_early: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError for parameters that are out of range or contradict `tail`."""
        group_selection.check_oversampling(self.oversampling)
        if self.tail != "wait" and self.oversampling == 1:
            raise ValueError(
                f"oversampling ({self.oversampling}) must be above 1 with tail: {self.tail}, which"
                " is about groups that a step does not need; use 1.25, or tail: wait."
            )
        if self.tail != "carry_over" and self.max_lag != 0:
            raise ValueError(
                f"max_lag ({self.max_lag}) must be 0 with tail: {self.tail}, where all groups are"
                " of the policy that trains; remove it, or use tail: carry_over."
            )
        if self.tail == "carry_over" and self.max_lag < 1:
            raise ValueError(
                f"max_lag ({self.max_lag}) must be at least 1 with tail: carry_over, which lets"
                " groups see a sync; use 1, or tail: wait."
            )
        if self.tail == "carry_over" and self.oversampling > self.max_lag + 1:
            raise ValueError(
                f"oversampling ({self.oversampling}) must be at most max_lag + 1"
                f" ({self.max_lag + 1}) with tail: carry_over: more groups cannot be trained in"
                " time; lower it, or raise max_lag."
            )

    @property
    def sync_policy(self) -> SyncPolicy:
        """Return CONTINUE with `tail: carry_over`, else WAIT."""
        return SyncPolicy.CONTINUE if self.tail == "carry_over" else SyncPolicy.WAIT

    @property
    def needs_filter(self) -> bool:
        """Return whether the groups started beyond a batch train only where the filter leaves other
        groups out: with `tail: wait` and oversampling, groups train in the order of their start.
        """
        return self.tail == "wait" and self.oversampling > 1

    def count_groups_to_start(self, flow: GroupFlow) -> int:
        """Return how many groups to start so that oversampling x batch_size are in flight; 0 while
        a step is trained.
        """
        if flow.is_training or flow.num_steps_left == 0:
            return 0
        count = group_selection.scale_by_oversampling(flow.batch_size, self.oversampling)
        if self.tail == "carry_over":  # none is lost, so none is started in vain
            count = min(count, flow.num_steps_left * flow.batch_size)
        return max(0, count - len(flow.groups_in_flight))

    def select_groups_to_annotate(self, flow: GroupFlow) -> Sequence[int]:
        """Return the groups to annotate now. With `tail: wait` and more groups in flight than a
        batch, only groups among the first started.
        """
        if self.tail != "wait" or flow.is_training or len(flow.groups_in_flight) <= flow.batch_size:
            return group_selection.find_groups_to_annotate(flow)
        first = set(sorted(flow.groups_in_flight)[: flow.batch_size])
        return [number for number in flow.unannotated_numbers if number in first]

    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        """Return the batch that `tail` asks for: first started (wait), first scored (drop), or
        oldest within `max_lag` (carry_over); None while it is not complete.
        """
        if self.tail == "carry_over":
            return group_selection.select_oldest_within_lag(flow, self.max_lag)
        return (
            group_selection.select_first_started(flow)
            if self.tail == "wait"
            else group_selection.select_first_scored(flow)
        )

    def select_groups_to_give_up(self, flow: GroupFlow) -> Sequence[int]:
        """Return all groups in flight; none with `tail: carry_over`."""
        return () if self.tail == "carry_over" else list(flow.groups_in_flight)


SCHEDULES.register("streaming", StreamingSchedule)(StreamingSchedule)
