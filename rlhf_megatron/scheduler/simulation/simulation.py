"""A run as discrete events over virtual time: the schedule of the run is asked what the run would ask it, in its order.

Engines, scorer and trainer stand here as the times that they take. What is left out: failures, evaluations,
checkpoints, the imbalance of replicas, and time of the controller's own.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlhf_megatron.scheduler.schedules import Schedule
from rlhf_megatron.scheduler.schedules.base import OnStale, OnSync
from rlhf_megatron.scheduler.schedules.flow import DropReason, Event, Flow, GroupStage
from rlhf_megatron.scheduler.simulation.engine import Engine, RunningGroup
from rlhf_megatron.scheduler.simulation.lengths import Workload
from rlhf_megatron.scheduler.simulation.plan import Plan

TRAINER, SCORER, ENGINES = "trainer", "scorer", "engines"


@dataclass(frozen=True)
class Span:
    """Somebody was at something."""

    row: str  # TRAINER, SCORER or ENGINES
    stage: str  # as the run names its stages
    start_s: float
    end_s: float
    step: int  # of the trainer: that it trains


@dataclass
class StepRecord:
    """One step, from the sync before it to its own."""

    step: int
    begin_s: float
    taken_s: float
    num_tokens: int  # of prompts and responses
    num_response_tokens: int
    lags: Counter[int]  # of samples: the policy's version less that of their first token
    end_s: float = math.nan  # its weights are served

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Busy:
    """Seconds until some moment, beside which the rest is idle."""

    when: float
    trainer: float
    scorer: float
    engines: float  # of all of them together
    paused: float  # of one engine: it waited for a weight sync to end
    drops: Counter[str]  # groups, by reason; "again": begun anew
    num_started: int  # groups, each time that one was begun


@dataclass
class History:
    """What a simulation leaves. `busy[k]`: after k steps."""

    num_engines: int
    steps: list[StepRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # of the flow, where they are kept
    loads: list[list[tuple[float, int]]] = field(default_factory=list)  # of each engine, where they are kept
    slots: int = 0  # of an engine


class Stuck(ValueError):
    """The schedule awaits what will not come."""


class Simulation:
    """One run of `plan.num_steps` steps. `keeps_all`: events and the engines' loads, too."""

    def __init__(self, plan: Plan, schedule: Schedule, workload: Workload, keeps_all: bool = False) -> None:
        self.plan = plan
        self.schedule = schedule
        self.workload = workload
        self.flow = Flow(plan.batch_size, plan.num_steps, version=0)
        self.history = History(plan.num_engines)
        self.now = 0.0
        self._keeps_all = keeps_all
        self._queue: list[tuple[float, int, Callable[[], bool]]] = []
        self._num_queued = 0
        self._engines = [
            Engine(number, plan.seconds_a_token, plan.prefill_tokens_per_s, keeps_all)
            for number in range(plan.num_engines)
        ]
        self._groups: dict[int, RunningGroup] = {}  # in flight, by number
        self._to_score: list[RunningGroup] = []
        self._is_scoring = self._is_annotating = self._is_syncing = False
        self._trainer_s = self._scorer_s = self._paused_s = 0.0
        self._drops: Counter[str] = Counter()
        self._num_started = 0

    def run(self) -> History:
        """Raises Stuck."""
        flow = self.flow
        self._note_busy()
        self._ask()
        while flow.num_steps_left or flow.is_training:
            if not self._queue:
                raise Stuck(self._complaint())
            self.now, _, happens = heapq.heappop(self._queue)
            if happens():
                self._ask()
        if self._keeps_all:
            self.history.events = flow.events
            self.history.loads = [engine.history or [] for engine in self._engines]
        self.history.slots = self._engines[0].slots
        return self.history

    def _later(self, when: float, happens: Callable[[], bool]) -> None:
        """`happens` tells whether the flow has changed."""
        self._num_queued += 1
        heapq.heappush(self._queue, (when, self._num_queued, happens))

    # What the schedule decides

    def _ask(self) -> None:
        """After an event, in the order that the protocol states."""
        flow, schedule = self.flow, self.schedule
        for number in schedule.stale(flow):
            self._stale(number)
        if not flow.is_training and not self._is_annotating:
            numbers = schedule.batch(flow)
            if numbers is not None:
                self._take(numbers)
        if count := schedule.num_to_start(flow):
            for number in flow.started(count):
                self._start(number, 0)
        if not flow.is_training and not self._is_annotating:
            numbers = schedule.to_annotate(flow)
            if numbers:
                self._annotate_early(numbers)
        may_sync = schedule.on_sync is OnSync.CONTINUE or not flow.num_running
        if flow.is_updated and may_sync and not self._is_syncing:
            self._begin_sync()

    def _stale(self, number: int) -> None:
        group = self._groups[number]
        group.engine.give_up(self.now, group)
        self._watch(group.engine)
        if self.schedule.on_stale is OnStale.DROP:
            self._drop(number, "lag")
        else:
            self.flow.started_again(number)
            self._drops["again"] += 1
            self._start(number, group.attempt + 1)

    def _drop(self, number: int, reason: DropReason) -> None:
        group = self._groups.pop(number)
        if self.flow.in_flight[number].stage is GroupStage.RUNNING:
            group.engine.give_up(self.now, group)
            self._watch(group.engine)
        group.is_given_up = True
        self._drops[reason] += 1
        self.flow.dropped(number, reason)

    # Generation

    def _start(self, number: int, attempt: int) -> None:
        """On the engine with the fewest responses to do, the first of several."""
        engine = min(self._engines, key=lambda engine: engine.num_outstanding)
        lengths = self.workload.response_lengths(number, attempt)
        group = RunningGroup(number, attempt, self.workload.prompt_length(number), lengths, engine)
        self._groups[number] = group
        self._num_started += 1
        engine.submit(self.now, group)
        self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        when = engine.next_end()
        if when < math.inf:
            self._later(max(when, self.now), partial(self._ends, engine, engine.stamp))

    def _ends(self, engine: Engine, stamp: int) -> bool:
        if stamp != engine.stamp:
            return False  # something else has happened to that engine since
        done = engine.take_ended(self.now)
        self._watch(engine)
        for group in done:
            self._later(self.now, partial(self._generated, group))
        return False

    def _generated(self, group: RunningGroup) -> bool:
        if group.is_given_up:
            return False
        self.flow.generated(group.number, min(group.first_versions))
        self._to_score.append(group)
        self._score()
        return True

    # Rewards

    def _score(self) -> None:
        """All that wait, in one call; one call at a time."""
        self._to_score = [group for group in self._to_score if not group.is_given_up]
        if self._is_scoring or not self._to_score:
            return
        groups, self._to_score = self._to_score, []
        seconds = self.plan.score_s(sum(len(group.lengths) for group in groups))
        self._is_scoring = True
        self._scorer_s += seconds
        self._span(SCORER, "score", seconds)
        self._later(self.now + seconds, partial(self._scored, groups))

    def _scored(self, groups: Sequence[RunningGroup]) -> bool:
        self._is_scoring = False
        for group in groups:
            self._later(self.now, partial(self._judged, group))
        self._score()
        return False

    def _judged(self, group: RunningGroup) -> bool:
        if group.is_given_up:
            return False
        self.flow.scored(group.number)
        if self.plan.filters_groups and not self.workload.has_signal(group.number, group.attempt):
            self._drop(group.number, "no signal")
        return True

    # Training

    def _annotate_early(self, numbers: Sequence[int]) -> None:
        seconds = self.plan.annotate_s(sum(self._tokens(number) for number in numbers))
        self._is_annotating = True
        self._train_for("annotate", seconds, partial(self._annotated, numbers), self.flow.step + 1)

    def _annotated(self, numbers: Sequence[int]) -> bool:
        self._is_annotating = False
        self.flow.annotated([number for number in numbers if number in self.flow.in_flight])
        return True

    def _take(self, numbers: Sequence[int]) -> None:
        flow, plan = self.flow, self.plan
        groups = [self._groups.pop(number) for number in numbers]
        late = sum(self._tokens_of(g) for g in groups if not flow.in_flight[g.number].is_annotated)
        tokens = sum(self._tokens_of(group) for group in groups)
        version = flow.training_version
        lags = Counter(version - first for group in groups for first in group.first_versions)
        step = flow.taken(numbers)
        begin = self.history.steps[-1].end_s if self.history.steps else 0.0
        responses = sum(sum(group.lengths) for group in groups)
        self.history.steps.append(StepRecord(step, begin, self.now, tokens, responses, lags))
        for number in self.schedule.leftover(flow):
            self._drop(number, "tail")
        if not flow.num_steps_left:
            for number in flow.ended():
                group = self._groups.pop(number)
                group.engine.give_up(self.now, group)
        annotate_s = plan.annotate_s(late) if late else 0.0
        begin_update = self.now + annotate_s + plan.advantages_s
        update_s = plan.update_s(tokens)
        self._trainer_s += annotate_s + update_s
        self._span(TRAINER, "annotate", annotate_s, step)
        self._span(TRAINER, "update", update_s, step, begin_update)
        self._later(begin_update + update_s, self._updated)

    def _updated(self) -> bool:
        self.flow.updated()
        return True

    def _begin_sync(self) -> None:
        self._is_syncing = True
        for engine in self._engines:
            engine.pause(self.now)
        self._paused_s += self.plan.sync_s
        self._span(ENGINES, "sync", self.plan.sync_s, self.flow.step)
        self._train_for("sync", self.plan.sync_s, self._synced, self.flow.step)

    def _synced(self) -> bool:
        self._is_syncing = False
        self.flow.synced(self.flow.version + 1)
        for engine in self._engines:
            engine.resume(self.now, self.flow.version, self.plan.recomputes)
            self._watch(engine)
        self.history.steps[-1].end_s = self.now
        self._note_busy()
        if not self._keeps_all:
            self.flow.events.clear()
        return True

    # Bookkeeping

    def _tokens(self, number: int) -> int:
        return self._tokens_of(self._groups[number])

    def _tokens_of(self, group: RunningGroup) -> int:
        return sum(group.lengths) + len(group.lengths) * group.prompt_tokens

    def _train_for(self, stage: str, seconds: float, happens: Callable[[], bool], step: int) -> None:
        self._trainer_s += seconds
        self._span(TRAINER, stage, seconds, step)
        self._later(self.now + seconds, happens)

    def _span(self, row: str, stage: str, seconds: float, step: int = 0, start_s: float | None = None) -> None:
        start = self.now if start_s is None else start_s
        if seconds:
            self.history.spans.append(Span(row, stage, start, start + seconds, step))

    def _note_busy(self) -> None:
        engines = sum(engine.busy_s(self.now) for engine in self._engines)
        self.history.busy.append(
            Busy(
                self.now,
                self._trainer_s,
                self._scorer_s,
                engines,
                self._paused_s,
                Counter(self._drops),
                self._num_started,
            )
        )

    def _complaint(self) -> str:
        flow = self.flow
        return (
            f"schedule {type(self.schedule).__name__} takes no batch for step {flow.step + 1} and starts nothing, with"
            f" {len(flow.in_flight)} groups in flight, {len(flow.scored_order)} of which can train (a step needs"
            f" {flow.batch_size}); nothing else will happen: change schedule.params."
        )
