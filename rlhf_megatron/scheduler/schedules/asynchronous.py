"""Trainer and engines never wait for each other, as far as the bound on the lag allows.

"AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning" (arXiv 2505.24298, equation 3):
with N groups started so far, B groups a step and the policy's version i, a group may be started while

    floor((N - 1) / B) <= i + max_lag

Here: groups that were started and are in flight train in their order. One that is started now, behind n of them, is
trained floor(n / B) steps after the next batch, which a policy of version i trains, or i + 1 while a step is trained:

    lag = floor(n / B) + (1 while a step is trained) <= max_lag

What was dropped counts no more, so that losses are made up for. Groups are not done in the order of their start, so one
may be left behind by others: batches prefer the oldest tokens, and `late` says what becomes of a group that would
still be late. The paper's bound is one of admission only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.scheduler.schedules import common
from rlhf_megatron.scheduler.schedules.base import SCHEDULES, OnStale, OnSync, Schedule
from rlhf_megatron.scheduler.schedules.flow import Flow


@dataclass(frozen=True)
class Asynchronous(Schedule):
    """`late` wait: a step that would leave a group behind waits for it; none is lost. drop, again: no step waits, and a
    late group is dropped with its prompt, or generated anew.
    """

    max_lag: int = 2  # syncs between the first token of a group and its training, at most
    partial_rollouts: bool = True  # generation goes on over a sync; false: the sync waits until no group is generated
    late: Literal["wait", "drop", "again"] = "wait"  # what becomes of a group that others left behind
    oversampling: float = 1.0  # groups in flight for each that can be trained in time
    annotates_early: bool = True  # finished groups get their log-probs while a batch is awaited
    max_running_groups: int | None = None  # groups that are generated at a time; null: as many as max_lag allows

    def __post_init__(self) -> None:
        common.check_oversampling(self.oversampling)
        if self.max_lag < 1:
            raise ValueError(f"max_lag ({self.max_lag}) must be at least 1; use schedule.name: streaming for lag 0.")
        if self.late == "wait" and self.oversampling != 1:
            raise ValueError(
                f"oversampling ({self.oversampling}) must be 1 with late: wait, which loses no group for others to make"
                " up for; remove it, or use late: drop."
            )
        if self.max_running_groups is not None and self.max_running_groups < 1:
            raise ValueError(
                f"max_running_groups ({self.max_running_groups}) must be at least 1; use null for no bound but max_lag."
            )

    @property
    def on_sync(self) -> OnSync:
        return OnSync.CONTINUE if self.partial_rollouts else OnSync.WAIT

    @property
    def on_stale(self) -> OnStale:
        return OnStale.AGAIN if self.late == "again" else OnStale.DROP

    def num_to_start(self, flow: Flow) -> int:
        if flow.is_updated and not self.partial_rollouts:
            return 0
        num_steps = min(self.max_lag + 1 - int(flow.is_training), flow.num_steps_left)
        count = common.with_oversampling(num_steps * flow.batch_size, self.oversampling) - len(flow.in_flight)
        if self.max_running_groups is not None:
            count = min(count, self.max_running_groups - flow.num_running)
        return max(0, count)

    def to_annotate(self, flow: Flow) -> Sequence[int]:
        return common.not_annotated(flow) if self.annotates_early else ()

    def batch(self, flow: Flow) -> Sequence[int] | None:
        return common.oldest_in_time(flow, self.max_lag) if self.late == "wait" else common.oldest(flow)


SCHEDULES.register("asynchronous", Asynchronous)(Asynchronous)
