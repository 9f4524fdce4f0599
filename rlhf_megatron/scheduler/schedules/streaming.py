"""Each group goes on as soon as it is done: scored, and its log-probs computed, while others are still generated.

New groups are started between steps only, so all that is trained is of the policy that trains, but for the groups that
`carry_over` leaves to later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlhf_megatron.scheduler.schedules import common
from rlhf_megatron.scheduler.schedules.base import SCHEDULES, OnSync, Schedule
from rlhf_megatron.scheduler.schedules.flow import Flow


@dataclass(frozen=True)
class Streaming(Schedule):
    """`tail` wait: a step has the groups that were started first. drop: those that were done first; others are lost.
    carry_over: those with the oldest tokens; others go on over the sync with the new weights and train later, and a
    step that could leave one of them behind for good waits for it.
    """

    oversampling: float = 1.0  # groups in flight for each that a step trains
    tail: Literal["wait", "drop", "carry_over"] = "wait"  # what becomes of the slowest groups of a step
    max_lag: int = 0  # syncs that a carried group may see before it is trained

    annotates_early: ClassVar[bool] = True

    def __post_init__(self) -> None:
        common.check_oversampling(self.oversampling)
        if self.tail != "wait" and self.oversampling == 1:
            raise ValueError(
                f"oversampling ({self.oversampling}) must be above 1 with tail: {self.tail}, which is about groups"
                " that a step does not need; use 1.25, or tail: wait."
            )
        if self.tail != "carry_over" and self.max_lag != 0:
            raise ValueError(
                f"max_lag ({self.max_lag}) must be 0 with tail: {self.tail}, where all groups are of the policy that"
                " trains; remove it, or use tail: carry_over."
            )
        if self.tail == "carry_over" and self.max_lag < 1:
            raise ValueError(
                f"max_lag ({self.max_lag}) must be at least 1 with tail: carry_over, which lets groups see a sync; use"
                " 1, or tail: wait."
            )
        if self.tail == "carry_over" and self.oversampling > self.max_lag + 1:
            raise ValueError(
                f"oversampling ({self.oversampling}) must be at most max_lag + 1 ({self.max_lag + 1}) with tail:"
                " carry_over: more groups cannot be trained in time; lower it, or raise max_lag."
            )

    @property
    def on_sync(self) -> OnSync:
        return OnSync.CONTINUE if self.tail == "carry_over" else OnSync.WAIT

    @property
    def needs_filter(self) -> bool:
        """All groups that were started train, in their order, but those that the filter takes."""
        return self.tail == "wait" and self.oversampling > 1

    def num_to_start(self, flow: Flow) -> int:
        if flow.is_training or flow.num_steps_left == 0:
            return 0
        count = common.with_oversampling(flow.batch_size, self.oversampling)
        if self.tail == "carry_over":  # none is lost, so none is started in vain
            count = min(count, flow.num_steps_left * flow.batch_size)
        return max(0, count - len(flow.in_flight))

    def to_annotate(self, flow: Flow) -> Sequence[int]:
        if self.tail != "wait" or flow.is_training or len(flow.in_flight) <= flow.batch_size:
            return common.not_annotated(flow)
        first = set(sorted(flow.in_flight)[: flow.batch_size])
        return [number for number in flow.not_annotated if number in first]

    def batch(self, flow: Flow) -> Sequence[int] | None:
        if self.tail == "carry_over":
            return common.oldest_in_time(flow, self.max_lag)
        return common.first_started(flow) if self.tail == "wait" else common.first_scored(flow)

    def leftover(self, flow: Flow) -> Sequence[int]:
        return () if self.tail == "carry_over" else list(flow.in_flight)


SCHEDULES.register("streaming", Streaming)(Streaming)
