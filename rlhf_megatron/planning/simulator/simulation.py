"""A run as discrete events over virtual time: trainer, scorer and engines take their durations;
figures follow.

supplies.py decides what happens next, as scheduler/supply/ does in a run. docs/simulate.md says
what is left out.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.controller.scheduler.schedules import Schedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import DropReason, FlowEvent, GroupFlow
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import SyncPolicy
from rlhf_megatron.planning.simulator.durations import SimulatedWorkload
from rlhf_megatron.planning.simulator.simulated_fleet import (
    RunningGroup,
    SimulatedFleet,
    SimulatedPiece,
)
from rlhf_megatron.planning.simulator.simulation_plan import GpuSplit, SimulationPlan

TRAINER_TRACK = "trainer"
SCORER_TRACK = "scorer"
ENGINES_TRACK = "engines"

NO_SIGNAL_REASON: DropReason = "no signal"


@dataclass(frozen=True)
class StageSpan:
    """The trainer, the scorer or the engines spend time on a stage."""

    track: str  # TRAINER, SCORER or ENGINES
    stage: str  # as the run names its stages
    start_s: float
    end_s: float
    step: int  # of the trainer: that it trains


@dataclass
class StepRecord:
    """One step, from the sync before it to its own."""

    step: int
    begin_s: float
    batch_taken_s: float
    num_tokens: int  # of prompts and responses
    num_response_tokens: int
    lag_counts: Counter[int]  # of samples: the policy's version less that of their first token
    end_s: float = math.nan  # its weights are served

    @property
    def seconds(self) -> float:
        """Return the length of the step; nan while it goes on."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class BusySeconds:
    """Seconds until some moment, beside which the rest is idle."""

    time_s: float
    trainer_s: float
    scorer_s: float
    engines_s: float  # of all of them together
    paused_s: float  # of one engine: it waited for a weight sync to end
    drop_counts: Counter[str]  # groups, by reason; "again": begun anew
    num_started_groups: int  # groups, each time that one was begun


@dataclass
class SimulationHistory:
    """The result of a simulation. `busy[k]`: after k steps."""

    num_engines: int
    steps: list[StepRecord] = field(default_factory=list)
    spans: list[StageSpan] = field(default_factory=list)
    busy_by_step: list[BusySeconds] = field(default_factory=list)
    flow_events: list[FlowEvent] = field(default_factory=list)  # of the flow, where they are kept
    # of each engine, where they are kept
    engine_loads: list[list[tuple[float, int]]] = field(default_factory=list)
    num_slots: int = 0  # of an engine


class ScheduleStuckError(ValueError):
    """The schedule waits for something that will not come."""


class RunSimulation:
    """The first `plan.num_steps` steps of a run. `keeps_details`: also keep events and the engines'
    loads.

    A subclass says what happens when a piece of work is complete (`_on_piece_done`), and what
    follows from any event (`_advance_flow`).
    """

    max_pieces: int | None = None  # that an engine has at once; None: see `fleet`

    def __init__(
        self,
        plan: SimulationPlan,
        schedule: Schedule,
        workload: SimulatedWorkload,
        keeps_details: bool = False,
    ) -> None:
        """Make the simulation of a plan under a schedule; `run` runs it. `keeps_details`: also keep
        events and the engines' loads.
        """
        self.plan = plan
        self.schedule = schedule
        self.workload = workload
        self.flow = GroupFlow(plan.batch_size, plan.last_step, served_version=0)
        self.history = SimulationHistory(plan.num_engines)
        self.now = 0.0
        self.running_groups: dict[int, RunningGroup] = {}  # in flight, by number
        self.trainer_free_s = 0.0  # nothing that was begun early goes on then
        self.fleet = SimulatedFleet(
            plan, self.schedule_event, self._on_piece_done, self.max_pieces, keeps_details
        )
        self.drop_counts: Counter[str] = Counter()
        self._keeps_details = keeps_details
        self._event_queue: list[tuple[float, int, Callable[[], bool]]] = []
        self._num_queued_events = 0
        self._is_syncing = False
        self._trainer_s = self._scorer_s = self._paused_s = 0.0
        self._num_started_groups = 0

    def run(self) -> SimulationHistory:
        """Simulate until `plan.num_steps` steps are done, and return the history. Raise
        ScheduleStuckError where the schedule waits for ever. Call it once.
        """
        self._record_busy_seconds()
        self._advance_flow()
        while len(self.history.busy_by_step) <= self.plan.num_steps:
            if not self._event_queue:
                raise ScheduleStuckError(self._describe_stuck_schedule())
            self.now, _, happens = heapq.heappop(self._event_queue)
            if happens():
                self._advance_flow()
        del self.history.steps[self.plan.num_steps :]  # one may have been begun at the last sync
        if self._keeps_details:
            self.history.flow_events = self.flow.events
            self.history.engine_loads = [engine.load_history or [] for engine in self.fleet.engines]
        self.history.num_slots = self.fleet.engines[0].num_slots
        return self.history

    def schedule_event(self, time_s: float, handle_event: Callable[[], bool]) -> None:
        """Call `handle_event` at `time_s`; it returns whether the flow has changed, so that the
        schedule must be asked. Events at the same time happen in the order in which they were
        scheduled.
        """
        self._num_queued_events += 1
        heapq.heappush(self._event_queue, (time_s, self._num_queued_events, handle_event))

    def _on_piece_done(self, piece: SimulatedPiece) -> bool:
        """Handle a complete piece, and return whether the flow has changed; implemented by
        subclasses.
        """
        raise NotImplementedError

    def _advance_flow(self) -> None:
        """Do what follows from the state of the flow after any event; implemented by subclasses."""
        raise NotImplementedError

    # Groups

    def start_group(self, group_number: int, attempt: int = 0) -> RunningGroup:
        """Make a group that begins now, and return it. The caller submits it to the fleet."""
        lengths = self.workload.draw_response_lengths(group_number, attempt)
        self.running_groups[group_number] = RunningGroup(
            group_number, attempt, self.workload.draw_prompt_length(group_number), lengths
        )
        self._num_started_groups += 1
        return self.running_groups[group_number]

    def drop_group(self, group_number: int, reason: DropReason) -> None:
        """Abandon a group in flight, and record why."""
        self.fleet.abandon_group(self.now, self.running_groups.pop(group_number))
        self.drop_counts[reason] += 1
        self.flow.record_dropped(group_number, reason)

    def start_scoring(self, groups: Sequence[RunningGroup], on_done: Callable[[], bool]) -> None:
        """Begin a call of the scorer; `on_done` is the event handler for its end."""
        seconds = self.plan.compute_score_seconds(
            sum(len(group.response_lengths) for group in groups)
        )
        self._scorer_s += seconds
        self._record_span(SCORER_TRACK, "score", seconds, self.now)
        self.schedule_event(self.now + seconds, on_done)

    # Training

    def start_early_annotation(
        self, group_numbers: Sequence[int], on_done: Callable[[], bool]
    ) -> None:
        """Begin the log-probs of these groups while a batch is awaited; `on_done` is the event
        handler for their end.
        """
        seconds = self.plan.compute_annotate_seconds(
            sum(count_trained_tokens(self.running_groups[number]) for number in group_numbers)
        )
        self.trainer_free_s = self.now + seconds
        self._occupy_trainer("annotate", seconds, on_done, self.flow.last_taken_step + 1)

    def start_step(
        self, group_numbers: Sequence[int], has_log_probs: Callable[[int], bool]
    ) -> None:
        """Take these groups as the next batch, and schedule the end of its update. The step waits
        for early annotation that is still running. Groups for which `has_log_probs` is true are not
        annotated again.
        """
        flow = self.flow
        plan = self.plan
        late = sum(
            count_trained_tokens(self.running_groups[number])
            for number in group_numbers
            if not has_log_probs(number)
        )
        groups = [self.running_groups.pop(number) for number in group_numbers]
        tokens = sum(count_trained_tokens(group) for group in groups)
        lags = Counter(
            flow.training_version - first for group in groups for first in group.first_versions
        )
        step = flow.record_batch_taken(group_numbers)
        before_s = self.history.steps[-1].end_s if self.history.steps else 0.0
        responses = sum(sum(group.response_lengths) for group in groups)
        self.history.steps.append(StepRecord(step, before_s, self.now, tokens, responses, lags))
        annotate_s = plan.compute_annotate_seconds(late) if late else 0.0
        update_s = plan.compute_update_seconds(tokens) if tokens else 0.0
        begin_s = max(self.now, self.trainer_free_s)
        update_begin_s = begin_s + annotate_s + plan.advantages_s
        self._trainer_s += annotate_s + update_s
        self._record_span(TRAINER_TRACK, "annotate", annotate_s, begin_s, step)
        self._record_span(TRAINER_TRACK, "update", update_s, update_begin_s, step)
        self.schedule_event(update_begin_s + update_s, self._finish_update)

    def start_sync_if_due(self) -> None:
        """Begin the weight sync if the update is done and no group that must not see the sync is
        being generated.
        """
        may_sync = self.schedule.sync_policy is SyncPolicy.CONTINUE or not self.flow.num_running
        if self.flow.is_update_done and may_sync and not self._is_syncing:
            self._is_syncing = True
            self.fleet.pause_engines(self.now)
            self._paused_s += self.plan.sync_s
            self._record_span(
                ENGINES_TRACK, "sync", self.plan.sync_s, self.now, self.flow.last_taken_step
            )
            self._occupy_trainer(
                "sync", self.plan.sync_s, self._finish_sync, self.flow.last_taken_step
            )

    def _finish_update(self) -> bool:
        """Record the end of the update. Return True: the flow has changed."""
        self.flow.record_update()
        return True

    def _finish_sync(self) -> bool:
        """Record the end of the sync and of the step, and let the engines go on with the new
        weights. Return True: the flow has changed.
        """
        self._is_syncing = False
        self.flow.record_sync(self.flow.served_version + 1)
        self.fleet.resume_engines(self.now, self.flow.served_version, self.plan.recomputes_cache)
        self.history.steps[-1].end_s = self.now
        self._record_busy_seconds()
        if not self._keeps_details:
            self.flow.events.clear()
        return True

    # Bookkeeping

    def _occupy_trainer(
        self, stage: str, seconds: float, on_done: Callable[[], bool], step: int
    ) -> None:
        """Let the trainer work on a stage for so many seconds; `on_done` is the event handler for
        its end.
        """
        self._trainer_s += seconds
        self._record_span(TRAINER_TRACK, stage, seconds, self.now, step)
        self.schedule_event(self.now + seconds, on_done)

    def _record_span(
        self, track: str, stage: str, seconds: float, start_s: float, step: int = 0
    ) -> None:
        """Record the time of a stage, unless it takes none."""
        if seconds:
            self.history.spans.append(StageSpan(track, stage, start_s, start_s + seconds, step))

    def _record_busy_seconds(self) -> None:
        """Append the busy seconds and counts until now to the history."""
        busy = BusySeconds(
            self.now,
            self._trainer_s,
            self._scorer_s,
            self.fleet.sum_busy_seconds(self.now),
            self._paused_s,
            Counter(self.drop_counts),
            self._num_started_groups,
        )
        self.history.busy_by_step.append(busy)

    def _describe_stuck_schedule(self) -> str:
        """Return the message for a schedule that waits for ever."""
        flow = self.flow
        return (
            f"schedule {type(self.schedule).__name__} takes no batch for step"
            f" {flow.last_taken_step + 1} and starts nothing, with {len(flow.groups_in_flight)}"
            f" groups in flight, {len(flow.scored_order)} of which can train (a step needs"
            f" {flow.batch_size}); nothing else will happen: change schedule.params."
        )


def count_trained_tokens(group: RunningGroup) -> int:
    """Return the tokens of prompts and responses that the trainer goes through."""
    return sum(group.response_lengths) + len(group.response_lengths) * group.num_prompt_tokens


@dataclass(frozen=True)
class SimulationFigures:
    """Figures of the steps after `num_warmup`. Shares are of the time from the sync before them
    to the last one.
    """

    num_steps: int
    step_s: float  # mean
    step_s_min: float
    step_s_max: float
    tokens_per_s: float  # of prompts and responses that were trained
    tokens_per_s_per_gpu: float
    response_tokens: float  # mean length of the responses that were trained
    # share of the time in which the trainer's pool neither annotates, updates nor sends weights
    trainer_idle: float
    # share of the engines' time in which they decode nothing and take part in no sync
    engines_idle: float
    engines_syncing: float  # share of their time that weight syncs take
    scorer_idle: float
    lag_mean: float  # over samples
    lag_max: int
    lags: dict[int, float]  # lag -> share of the trained samples
    dropped: dict[str, float]  # reason -> groups, as a share of those that were begun
    regenerated: float  # the same, of those begun anew

    @property
    def lost_share(self) -> float:
        """Return the groups that the schedule drops or begins anew, as a share of the groups begun.
        Groups without signal do not count: they would not train under any schedule.
        """
        return (
            sum(share for reason, share in self.dropped.items() if reason != NO_SIGNAL_REASON)
            + self.regenerated
        )


def compute_simulation_figures(
    history: SimulationHistory, split: GpuSplit, num_warmup: int
) -> SimulationFigures:
    """Return the figures of the steps after `num_warmup`. Raise ValueError where no step is
    left.
    """
    steps = history.steps[num_warmup:]
    if not steps:
        raise ValueError(
            f"--warmup ({num_warmup}) must be less than the simulated steps"
            f" ({len(history.steps)}); lower it, or raise --steps."
        )
    begin = history.busy_by_step[num_warmup]
    end = history.busy_by_step[-1]
    total = end.time_s - begin.time_s
    num_tokens = sum(step.num_tokens for step in steps)
    lags = sum((step.lag_counts for step in steps), Counter[int]())
    num_samples = lags.total()
    num_started = end.num_started_groups - begin.num_started_groups
    drops = {
        reason: (count - begin.drop_counts[reason]) / max(1, num_started)
        for reason, count in end.drop_counts.items()
    }
    seconds = [step.seconds for step in steps]
    paused = (end.paused_s - begin.paused_s) / total
    return SimulationFigures(
        num_steps=len(steps),
        step_s=total / len(steps),
        step_s_min=min(seconds),
        step_s_max=max(seconds),
        tokens_per_s=num_tokens / total,
        tokens_per_s_per_gpu=num_tokens / total / split.num_gpus,
        response_tokens=sum(step.num_response_tokens for step in steps) / max(1, num_samples),
        trainer_idle=_clamp_share(1 - (end.trainer_s - begin.trainer_s) / total),
        engines_idle=_clamp_share(
            1 - (end.engines_s - begin.engines_s) / total / history.num_engines - paused
        ),
        engines_syncing=paused,
        scorer_idle=_clamp_share(1 - (end.scorer_s - begin.scorer_s) / total),
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, num_samples),
        lag_max=max(lags, default=0),
        lags={lag: lags[lag] / num_samples for lag in sorted(lags)},
        dropped={
            reason: share
            for reason, share in sorted(drops.items())
            if share and reason not in ("again", "end")
        },
        regenerated=drops.get("again", 0.0),
    )


def _clamp_share(value: float) -> float:
    """Clamp a share to [0, 1]: rounding can go below 0, and a call can reach past the last sync."""
    return min(1.0, max(0.0, value))
