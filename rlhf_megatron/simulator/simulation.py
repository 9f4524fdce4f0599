"""A run as discrete events over virtual time: trainer, scorer and engines take their durations; figures follow.

supplies.py decides what happens next, as scheduler/supply/ does in a run. docs/simulate.md says what is left out."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.scheduler.schedules import Schedule
from rlhf_megatron.scheduler.schedules.base import OnSync
from rlhf_megatron.scheduler.schedules.flow import DropReason, Event, Flow
from rlhf_megatron.simulator.durations import Workload
from rlhf_megatron.simulator.fleet import Fleet, Piece, RunningGroup
from rlhf_megatron.simulator.plan import Plan, Split

TRAINER, SCORER, ENGINES = "trainer", "scorer", "engines"


@dataclass(frozen=True)
class Span:
    """The trainer, the scorer or the engines spend time on a stage."""

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
    """The result of a simulation. `busy[k]`: after k steps."""

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
    """Count the tokens of prompts and responses that the trainer goes through."""
    return sum(group.lengths) + len(group.lengths) * group.prompt_tokens


NO_SIGNAL: DropReason = "no signal"


@dataclass(frozen=True)
class Figures:
    """Figures of the steps after `num_warmup`. Shares are of the time from the sync before them to the last one."""

    num_steps: int
    step_s: float  # mean
    step_s_min: float
    step_s_max: float
    tokens_per_s: float  # of prompts and responses that were trained
    tokens_per_s_per_gpu: float
    response_tokens: float  # mean length of the responses that were trained
    trainer_idle: float  # share of the time in which the trainer's pool neither annotates, updates nor sends weights
    engines_idle: float  # share of the engines' time in which they decode nothing and take part in no sync
    engines_syncing: float  # share of their time that weight syncs take
    scorer_idle: float
    lag_mean: float  # over samples
    lag_max: int
    lags: dict[int, float]  # lag -> share of the trained samples
    dropped: dict[str, float]  # reason -> groups, as a share of those that were begun
    regenerated: float  # the same, of those begun anew

    @property
    def lost(self) -> float:
        """Groups that the schedule drops or begins anew, as a share of those that were begun. Those without signal
        would not train under any."""
        return sum(share for reason, share in self.dropped.items() if reason != NO_SIGNAL) + self.regenerated


def figures(history: History, split: Split, num_warmup: int) -> Figures:
    """Raises ValueError where no step is left."""
    steps = history.steps[num_warmup:]
    if not steps:
        raise ValueError(
            f"--warmup ({num_warmup}) must be less than the simulated steps ({len(history.steps)}); lower it, or raise"
            " --steps."
        )
    begin, end = history.busy[num_warmup], history.busy[-1]
    total = end.when - begin.when
    num_tokens = sum(step.num_tokens for step in steps)
    lags = sum((step.lags for step in steps), Counter[int]())
    num_samples = lags.total()
    num_started = end.num_started - begin.num_started
    drops = {reason: (count - begin.drops[reason]) / max(1, num_started) for reason, count in end.drops.items()}
    seconds = [step.seconds for step in steps]
    paused = (end.paused - begin.paused) / total
    return Figures(
        num_steps=len(steps),
        step_s=total / len(steps),
        step_s_min=min(seconds),
        step_s_max=max(seconds),
        tokens_per_s=num_tokens / total,
        tokens_per_s_per_gpu=num_tokens / total / split.gpus,
        response_tokens=sum(step.num_response_tokens for step in steps) / max(1, num_samples),
        trainer_idle=_share(1 - (end.trainer - begin.trainer) / total),
        engines_idle=_share(1 - (end.engines - begin.engines) / total / history.num_engines - paused),
        engines_syncing=paused,
        scorer_idle=_share(1 - (end.scorer - begin.scorer) / total),
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, num_samples),
        lag_max=max(lags, default=0),
        lags={lag: lags[lag] / num_samples for lag in sorted(lags)},
        dropped={reason: share for reason, share in sorted(drops.items()) if share and reason not in ("again", "end")},
        regenerated=drops.get("again", 0.0),
    )


def _share(value: float) -> float:
    """Clamp a share to [0, 1]: rounding can go below 0, and a call can reach past the last sync."""
    return min(1.0, max(0.0, value))
