"""The two kinds of simulated runs; `simulate` picks the one for a schedule.

`Background` generates groups while the trainer works, in the order of scheduler/supply/ledger.py: it asks the schedule
after every event, and again until it decides nothing more. `Foreground` generates and scores in the step itself, in the
order of scheduler/supply/foreground.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhf_megatron.rollout.sizes import CHUNKS_IN_FLIGHT
from rlhf_megatron.scheduler.schedules import Schedule
from rlhf_megatron.scheduler.schedules.base import OnStale
from rlhf_megatron.scheduler.schedules.synchronous import Synchronous
from rlhf_megatron.simulator.durations import Workload
from rlhf_megatron.simulator.fleet import Piece, RunningGroup, cut
from rlhf_megatron.simulator.plan import Plan
from rlhf_megatron.simulator.simulation import History, Simulation


class Background(Simulation):
    """Generates while the trainer works, under any schedule."""

    def __init__(self, plan: Plan, schedule: Schedule, workload: Workload, keeps_all: bool = False) -> None:
        super().__init__(plan, schedule, workload, keeps_all)
        self._to_score: list[RunningGroup] = []
        self._is_scoring = False
        self._annotating: frozenset[int] = frozenset()  # numbers, early, at the moment
        self._num_scored = 0  # groups, since the last batch

    def _settle(self) -> None:
        again = set[int]()
        while self._decide(again):
            pass
        if not self.flow.is_training and not self._annotating:
            self._look_for_early_work()
        self.sync_if_due()

    def _decide(self, again: set[int]) -> bool:
        """One round of questions. `again`: groups that were begun anew after this event."""
        flow, schedule, has_decided = self.flow, self.schedule, False
        for number in list(schedule.stale(flow)):
            if number not in again:
                self._stale(number, again)
                has_decided = True
        if not flow.is_training and flow.num_steps_left:
            numbers = schedule.batch(flow)
            is_short = len(flow.scored_order) < flow.batch_size
            if numbers is None and is_short and self._num_scored >= self.plan.most_scored:
                numbers = sorted(flow.scored_order)  # with what there is
            if numbers is not None:
                self._take(numbers)
                has_decided = True
        for number in flow.started(schedule.num_to_start(flow)):
            self.fleet.submit(self.now, [self.made(number)])
            has_decided = True
        return has_decided

    def _stale(self, number: int, again: set[int]) -> None:
        if self.schedule.on_stale is OnStale.DROP:
            self.drop(number, "lag")
            return
        group = self.groups[number]
        self.fleet.give_up(self.now, group)
        again.add(number)
        self.drops["again"] += 1
        self.flow.started_again(number)
        self.fleet.submit(self.now, [self.made(number, group.attempt + 1)])

    def _take(self, numbers: Sequence[int]) -> None:
        has_log_probs = {n for n in numbers if self.flow.in_flight[n].is_annotated} | self._annotating
        self.take(numbers, has_log_probs.__contains__)
        self._num_scored = 0
        for number in list(self.schedule.leftover(self.flow)):
            self.drop(number, "tail")
        if not self.flow.num_steps_left:
            for number in list(self.flow.in_flight):
                self.drop(number, "end")

    # Rewards

    def _came(self, piece: Piece) -> bool:
        for group in piece.groups:
            self.flow.generated(group.number, min(group.first_versions))
            self._to_score.append(group)
        self._score()
        return True

    def _score(self) -> None:
        """All that wait, in one call; one call at a time."""
        self._to_score = [group for group in self._to_score if not group.is_given_up]
        if self._is_scoring or not self._to_score:
            return
        groups, self._to_score = self._to_score, []
        self._is_scoring = True
        self.score_for(groups, partial(self._scored, groups))

    def _scored(self, groups: Sequence[RunningGroup]) -> bool:
        self._is_scoring = False
        for group in groups:
            self.later(self.now, partial(self._judged, group))
        self._score()
        return False

    def _judged(self, group: RunningGroup) -> bool:
        if group.is_given_up:
            return False
        self.flow.scored(group.number)
        self._num_scored += 1
        if not self.workload.has_signal(group.number, group.attempt):
            self.drop(group.number, "no signal")
        return True

    # Early log-probs

    def _look_for_early_work(self) -> None:
        """A piece of at least a mini-batch, as scheduler/supply/background.py."""
        numbers = self.schedule.to_annotate(self.flow)
        if numbers and len(numbers) * self.plan.group_size >= self.plan.least_annotated:
            self._annotating = frozenset(numbers)
            self.annotate_early(numbers, partial(self._annotated, numbers))

    def _annotated(self, numbers: Sequence[int]) -> bool:
        self._annotating = frozenset()
        self.flow.annotated([number for number in numbers if number in self.flow.in_flight])
        return True


class Foreground(Simulation):
    """Groups come back in pieces; all of a generate call are scored together. Where groups without signal are left out
    (`algorithm.filter_groups`), further batches are generated until there are enough."""

    most_pieces = CHUNKS_IN_FLIGHT
    _num_batches = 0  # that this step has generated
    _num_awaited = 0  # groups of the last of them

    def _settle(self) -> None:
        if not self.flow.is_training and self.flow.num_steps_left and not self.groups:
            self._num_batches = 0
            self._generate()
        self.sync_if_due()

    def _generate(self) -> None:
        groups = [self.made(number) for number in self.flow.started(self.flow.batch_size)]
        self._num_awaited = len(groups)
        self._num_batches += 1
        for piece in cut(groups, self.plan.num_engines):
            self.fleet.submit(self.now, piece)

    def _came(self, piece: Piece) -> bool:
        for group in piece.groups:
            self.flow.generated(group.number, min(group.first_versions))
        self._num_awaited -= len(piece.groups)
        if not self._num_awaited:
            last = list(self.groups.values())[-self.flow.batch_size :]
            self.score_for(last, partial(self._scored, list(self.groups.values())))
        return True

    def _scored(self, groups: Sequence[RunningGroup]) -> bool:
        flow = self.flow
        kept = [group.number for group in groups if self.workload.has_signal(group.number)]
        if len(kept) < flow.batch_size and self._num_batches * flow.batch_size < self.plan.most_scored:
            self._generate()
            return True
        numbers = (kept or [group.number for group in groups])[: flow.batch_size]
        for group in groups:
            flow.scored(group.number)
        for group in groups:
            if group.number not in numbers:
                self.drop(group.number, "no signal" if group.number < numbers[-1] else "tail")
        self.take(numbers, lambda number: False)
        if not flow.num_steps_left:
            flow.ended()
        return True


def simulate(plan: Plan, schedule: Schedule, workload: Workload, keeps_all: bool = False) -> History:
    """The first `plan.num_steps` steps, as a run would make them. `keeps_all`: also the events of the flow and how many
    responses each engine had when. Raises Stuck where the schedule awaits what will not come."""
    kind = Foreground if isinstance(schedule, Synchronous) else Background
    return kind(plan, schedule, workload, keeps_all).run()
