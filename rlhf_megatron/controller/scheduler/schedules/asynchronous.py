"""Trainer and engines never wait for each other, as far as the bound on the lag allows.

"AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning" (arXiv
2505.24298, equation 3):
with N groups started so far, B groups a step and the policy's version i, a group may
be started while

    floor((N - 1) / B) <= i + max_lag

Here: groups that were started and are in flight train in their order. One that is started now,
behind n of them, is trained floor(n / B) steps after the next batch, which a policy of version i
trains, or i + 1 while a step is trained:

    lag = floor(n / B) + (1 while a step is trained) <= max_lag

What was dropped counts no more, so that losses are made up for. Groups are not done in the order of
their start, so one may be left behind by others: batches prefer the oldest tokens, and `late` says
what becomes of a group that would still be late. The paper's bound is one of admission only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.controller.scheduler.schedules import group_selection
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import (
    SCHEDULES,
    Schedule,
    StalePolicy,
    SyncPolicy,
)


@dataclass(frozen=True)
class AsynchronousSchedule(Schedule):
    """`late` wait: a step that would leave a group behind waits for it; none is lost. drop, again:
    no step waits, and a late group is dropped with its prompt, or generated anew.
    """

    max_lag: int = 2  # syncs between the first token of a group and its training, at most
    # generation goes on over a sync; false: the sync waits until no group is generated
    partial_rollouts: bool = True
    # what becomes of a group that others left behind
    late: Literal["wait", "drop", "again"] = "wait"
    oversampling: float = 1.0  # groups in flight for each that can be trained in time
    annotates_early: bool = True  # finished groups get their log-probs while a batch is awaited
    # groups that are generated at a time; null: as many as max_lag allows
    max_running_groups: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for parameters out of range, or for oversampling beside `late: wait`."""
        group_selection.check_oversampling(self.oversampling)
        if self.max_lag < 1:
            raise ValueError(
                f"max_lag ({self.max_lag}) must be at least 1; use schedule.name:"
                " streaming for lag 0."
            )
        if self.late == "wait" and self.oversampling != 1:
            raise ValueError(
                f"oversampling ({self.oversampling}) must be 1 with late: wait, which loses no"
                " group for others to make up for; remove it, or use late: drop."
            )
        if self.max_running_groups is not None and self.max_running_groups < 1:
            raise ValueError(
                f"max_running_groups ({self.max_running_groups}) must be at least 1; use null for"
                " no bound but max_lag."
            )

    @property
    def sync_policy(self) -> SyncPolicy:
        """Return CONTINUE with `partial_rollouts`, else WAIT."""
        return SyncPolicy.CONTINUE if self.partial_rollouts else SyncPolicy.WAIT

    @property
    def stale_policy(self) -> StalePolicy:
        """Return REGENERATE with `late: again`, else DROP."""
        return StalePolicy.REGENERATE if self.late == "again" else StalePolicy.DROP

    def count_groups_to_start(self, flow: GroupFlow) -> int:
        """Return the number of groups to start now: as many as can be in flight and still train
        within `max_lag` and in the steps left. Return 0 before a sync that must wait.
        """
        if flow.is_update_done and not self.partial_rollouts:
            return 0
        num_steps = min(self.max_lag + 1 - int(flow.is_training), flow.num_steps_left)
        count = group_selection.scale_by_oversampling(
            num_steps * flow.batch_size, self.oversampling
        ) - len(flow.groups_in_flight)
        if self.max_running_groups is not None:
            count = min(count, self.max_running_groups - flow.num_running)
        return max(0, count)

    def select_groups_to_annotate(self, flow: GroupFlow) -> Sequence[int]:
        """Return the groups to annotate now; none without `annotates_early`."""
        return group_selection.find_groups_to_annotate(flow) if self.annotates_early else ()

    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        """Return the scored groups with the oldest tokens, or None. With `late: wait`, also return
        None while the batch would leave another group behind for good.
        """
        return (
            group_selection.select_oldest_within_lag(flow, self.max_lag)
            if self.late == "wait"
            else group_selection.select_oldest(flow)
        )


SCHEDULES.register("asynchronous", AsynchronousSchedule)(AsynchronousSchedule)
