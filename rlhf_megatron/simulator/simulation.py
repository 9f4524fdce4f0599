"""A run as discrete events over virtual time: what trainer, scorer and engines take, and what follows from it.

Whoever decides is in background.py and foreground.py, as in scheduler/supply/. What is left out: failures, evaluations,
checkpoints, the imbalance of replicas, and time of the controller's own.

Also: What a simulation leaves behind. Passive: made by simulation.py, read by figures, picture and trace.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.scheduler.schedules import Schedule
from rlhf_megatron.scheduler.schedules.base import OnSync
from rlhf_megatron.scheduler.schedules.flow import DropReason, Event, Flow
from rlhf_megatron.simulator.engine import RunningGroup
from rlhf_megatron.simulator.fleet import Fleet, Piece
from rlhf_megatron.simulator.lengths import Workload
from rlhf_megatron.simulator.plan import Plan

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
    """The first `plan.num_steps` steps of a run. `keeps_all`: events and the engines' loads, too.

    A subclass says what happens when a piece of work `_came`, and what follows from any event (`_settle`).
    """

    most_pieces: int | None = None  # that an engine has at once; None: see `fleet`

    def __init__(self, plan: Plan, schedule: Schedule, workload: Workload, keeps_all: bool = False) -> None:
        self.plan = plan
        self.schedule = schedule
        self.workload = workload
        self.flow = Flow(plan.batch_size, plan.last_step, version=0)
        self.history = History(plan.num_engines)
        self.now = 0.0
        self.groups: dict[int, RunningGroup] = {}  # in flight, by number
        self.trainer_free_s = 0.0  # nothing that was begun early goes on then
        self.fleet = Fleet(plan, self.later, self._came, self.most_pieces, keeps_all)
        self.drops: Counter[str] = Counter()
        self._keeps_all = keeps_all
        self._queue: list[tuple[float, int, Callable[[], bool]]] = []
        self._num_queued = 0
        self._is_syncing = False
        self._trainer_s = self._scorer_s = self._paused_s = 0.0
        self._num_started = 0

    def run(self) -> History:
        """Raises Stuck."""
        self._note_busy()
        self._settle()
        while len(self.history.busy) <= self.plan.num_steps:
            if not self._queue:
                raise Stuck(self._complaint())
            self.now, _, happens = heapq.heappop(self._queue)
            if happens():
                self._settle()
        del self.history.steps[self.plan.num_steps :]  # one may have been begun at the last sync
        if self._keeps_all:
            self.history.events = self.flow.events
            self.history.loads = [engine.history or [] for engine in self.fleet.engines]
        self.history.slots = self.fleet.engines[0].slots
        return self.history

    def later(self, when: float, happens: Callable[[], bool]) -> None:
        """`happens` tells whether the flow has changed. What is told first happens first at the same time."""
        self._num_queued += 1
        heapq.heappush(self._queue, (when, self._num_queued, happens))

    def _came(self, piece: Piece) -> bool:
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError

    # Groups

    def made(self, number: int, attempt: int = 0) -> RunningGroup:
        """A group that is begun now."""
        lengths = self.workload.response_lengths(number, attempt)
        self.groups[number] = RunningGroup(number, attempt, self.workload.prompt_length(number), lengths)
        self._num_started += 1
        return self.groups[number]

    def drop(self, number: int, reason: DropReason) -> None:
        self.fleet.give_up(self.now, self.groups.pop(number))
        self.drops[reason] += 1
        self.flow.dropped(number, reason)

    def score_for(self, groups: Sequence[RunningGroup], happens: Callable[[], bool]) -> None:
        """A call of the scorer."""
        seconds = self.plan.score_s(sum(len(group.lengths) for group in groups))
        self._scorer_s += seconds
        self._span(SCORER, "score", seconds, self.now)
        self.later(self.now + seconds, happens)

    # Training

    def annotate_early(self, numbers: Sequence[int], happens: Callable[[], bool]) -> None:
        """While a batch is awaited."""
        seconds = self.plan.annotate_s(sum(num_tokens(self.groups[number]) for number in numbers))
        self.trainer_free_s = self.now + seconds
        self._train_for("annotate", seconds, happens, self.flow.step + 1)

    def take(self, numbers: Sequence[int], has_log_probs: Callable[[int], bool]) -> None:
        """These groups are the next batch. The step begins behind what the trainer was begun with early."""
        flow, plan = self.flow, self.plan
        late = sum(num_tokens(self.groups[number]) for number in numbers if not has_log_probs(number))
        groups = [self.groups.pop(number) for number in numbers]
        tokens = sum(num_tokens(group) for group in groups)
        lags = Counter(flow.training_version - first for group in groups for first in group.first_versions)
        step = flow.taken(numbers)
        before_s = self.history.steps[-1].end_s if self.history.steps else 0.0
        responses = sum(sum(group.lengths) for group in groups)
        self.history.steps.append(StepRecord(step, before_s, self.now, tokens, responses, lags))
        annotate_s = plan.annotate_s(late) if late else 0.0
        update_s = plan.update_s(tokens) if tokens else 0.0
        begin_s = max(self.now, self.trainer_free_s)
        update_begin_s = begin_s + annotate_s + plan.advantages_s
        self._trainer_s += annotate_s + update_s
        self._span(TRAINER, "annotate", annotate_s, begin_s, step)
        self._span(TRAINER, "update", update_s, update_begin_s, step)
        self.later(update_begin_s + update_s, self._updated)

    def sync_if_due(self) -> None:
        """A sync begins as soon as the update is done and nobody is generated who may not see it."""
        may_sync = self.schedule.on_sync is OnSync.CONTINUE or not self.flow.num_running
        if self.flow.is_updated and may_sync and not self._is_syncing:
            self._is_syncing = True
            self.fleet.pause(self.now)
            self._paused_s += self.plan.sync_s
            self._span(ENGINES, "sync", self.plan.sync_s, self.now, self.flow.step)
            self._train_for("sync", self.plan.sync_s, self._synced, self.flow.step)

    def _updated(self) -> bool:
        self.flow.updated()
        return True

    def _synced(self) -> bool:
        self._is_syncing = False
        self.flow.synced(self.flow.version + 1)
        self.fleet.resume(self.now, self.flow.version, self.plan.recomputes)
        self.history.steps[-1].end_s = self.now
        self._note_busy()
        if not self._keeps_all:
            self.flow.events.clear()
        return True

    # Bookkeeping

    def _train_for(self, stage: str, seconds: float, happens: Callable[[], bool], step: int) -> None:
        self._trainer_s += seconds
        self._span(TRAINER, stage, seconds, self.now, step)
        self.later(self.now + seconds, happens)

    def _span(self, row: str, stage: str, seconds: float, start_s: float, step: int = 0) -> None:
        if seconds:
            self.history.spans.append(Span(row, stage, start_s, start_s + seconds, step))

    def _note_busy(self) -> None:
        busy = (self._trainer_s, self._scorer_s, self.fleet.busy_s(self.now), self._paused_s)
        self.history.busy.append(Busy(self.now, *busy, Counter(self.drops), self._num_started))

    def _complaint(self) -> str:
        flow = self.flow
        return (
            f"schedule {type(self.schedule).__name__} takes no batch for step {flow.step + 1} and starts nothing, with"
            f" {len(flow.in_flight)} groups in flight, {len(flow.scored_order)} of which can train (a step needs"
            f" {flow.batch_size}); nothing else will happen: change schedule.params."
        )


def num_tokens(group: RunningGroup) -> int:
    """Of prompts and responses, as the trainer goes through them."""
    return sum(group.lengths) + len(group.lengths) * group.prompt_tokens
