"""The Flow of a run whose threads all tell it, and what its schedule then decides.

Whoever tells something has the schedule asked at once, in the order of `schedules.base`. Decisions
for the engines wait as orders for the thread that drives them; a batch waits for the trainer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlhf_megatron.controller.recovery.save_policy import StageContext
from rlhf_megatron.controller.scheduler.schedules.group_flow import (
    DropReason,
    FlowEvent,
    GroupFlow,
    GroupStage,
)
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import Schedule, StalePolicy
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest

GroupSamples = Sequence[Sequence[GeneratedSample]]  # a list for each request of a group

_MAX_ROUNDS = 100  # of questions after one event


@dataclass(frozen=True)
class PromptProgress:
    """Which prompts of the stream are done with: those at the first `num_drawn` positions, but
    for `untrained_positions`.
    """

    num_drawn: int
    untrained_positions: tuple[int, ...] = ()  # ascending


class BatchSupply(Protocol):
    """A context manager around the whole loop: what works in the background begins
    and ends with it.
    """

    def __enter__(self) -> BatchSupply:
        """Start the work in the background, where there is any, and return the supply."""
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def take_batch(self, step: int, enter_stage: StageContext) -> ScoredBatch:
        """Return the samples that the step trains on; with log-probs and values where these were
        computed early.

        `enter_stage(name)` is a context manager, entered around each part of the work.

        Raise RunStopped, and any error of the background work.
        """

    def sync_window(self) -> AbstractContextManager[None]:
        """Return a context manager for the weight sync that ends a step; enter it also where the
        sync leaves the policy as it is. Without work in the background it does nothing.
        """
        return nullcontext()

    def get_progress(self) -> PromptProgress:
        """Return the prompts that are done with, for a checkpoint. Call it between two steps."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the batch that was taken last, and forget them."""
        return {}


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose samples have come."""

    number: int
    prompts: PromptBatch  # of its one prompt
    samples: GroupSamples

    @property
    def route_files(self) -> list[str]:
        """Return the files with the experts that the samples' tokens met."""
        return [sample.routes for samples in self.samples for sample in samples if sample.routes]

    @property
    def versions(self) -> set[int]:
        """Return the policy versions of all tokens that may train: the tokens of the first
        request.
        """
        versions = {sample.policy_version for sample in self.samples[0]}
        return versions | {
            span.version for sample in self.samples[0] for span in sample.version_spans
        }


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its rewards."""

    number: int
    batch: ScoredBatch
    greedy_rollout: RolloutBatch | None = None  # its greedy sample, which trains nothing
    has_signal: bool = True  # False: `algorithm.filter_groups` leaves it out


# positions of the prompt stream -> the prompts there
DrawPrompts = Callable[[Sequence[int]], PromptBatch]
# prompts, version -> requests of each
MakeRequests = Callable[[PromptBatch, int], list[list[GenerateRequest]]]
# called by one thread, with all groups that have come
ScoreFinishedGroups = Callable[[Sequence[FinishedGroup]], list[ScoredGroup]]


@dataclass(frozen=True)
class EngineOrder:
    """An order for the thread that drives the engines."""

    kind: Literal["submit", "abort"]
    number: int
    attempt: int  # how often that group has been started before
    served_version: int  # that engines served when it was made


@dataclass(frozen=True)
class TakenBatch:
    """The groups of a step, ascending by number, and how they came about since the batch before."""

    step: int
    groups: tuple[ScoredGroup, ...]
    policy_version: int  # of the policy that trains on them
    num_running: int  # groups that are generated meanwhile
    num_scored: int
    num_with_signal: int
    # groups dropped, by reason, and "again"
    drop_counts: Counter[str] = field(default_factory=Counter)
    unused_route_files: tuple[str, ...] = ()  # files of routes of samples that train nothing

    @property
    def has_signal(self) -> bool:
        """Return whether any group of the batch has signal."""
        return any(group.has_signal for group in self.groups)


class GroupLedger:
    """The flow of groups of a run in the background, shared by its threads. `max_scored`: groups
    that a step may have scored before it trains on fewer than it wants; None: any number.

    `on_events` gets what the flow has logged, which the flow forgets then. Any thread may call the
    methods.
    """

    def __init__(
        self,
        flow: GroupFlow,
        schedule: Schedule,
        max_scored: int | None = None,
        on_events: Callable[[Sequence[FlowEvent]], None] = lambda events: None,
    ) -> None:
        """Begin without groups; the schedule is asked first by `restore_groups`. `max_scored`:
        groups that a step may score before it trains on fewer than a whole batch; None: any number.
        `on_events` gets the new events of the flow, which the flow then forgets.
        """
        # held by whoever reads or tells; told of every change
        self.state_changed = threading.Condition()
        self.flow = flow
        self.schedule = schedule
        self.pending_batch: TakenBatch | None = None  # that the trainer has not fetched
        self.groups_to_score: list[FinishedGroup] = []
        self.thread_error: BaseException | None = None  # of a thread
        self.is_closed = False
        self._max_scored = max_scored
        self._on_events = on_events
        self._pending_orders: list[EngineOrder] = []
        self._attempts_by_group: dict[int, int] = {}  # of groups in flight
        self._groups_awaiting_rewards: dict[int, FinishedGroup] = {}  # that wait for their rewards
        self._trainable_groups: dict[int, ScoredGroup] = {}  # that can train
        self._numbers_in_training: tuple[int, ...] = ()
        self._num_drawn = 0
        # the first without signal since the last batch
        self._groups_without_signal: list[ScoredGroup] = []
        self._drop_counts: Counter[str] = Counter()  # since the last batch
        self._unused_route_files: list[str] = []  # likewise
        self._num_scored = self._num_with_signal = 0

    def __str__(self) -> str:
        """Return how many groups can train, are generated and wait for rewards. The caller holds
        the lock.
        """
        flow = self.flow
        waiting = len(flow.groups_in_flight) - flow.num_running - len(flow.scored_order)
        return (
            f"{len(flow.scored_order)} of {flow.batch_size} can train, {flow.num_running} are"
            f" generated, {waiting} wait for their rewards"
        )

    # What happens

    def restore_groups(
        self,
        num_drawn: int,
        generated_groups: Sequence[FinishedGroup] = (),
        lost_numbers: Sequence[int] = (),
    ) -> None:
        """Put the groups of a former process into the ledger. `generated_groups` are groups in
        flight that it has generated, and wait for their rewards; `lost_numbers` are groups that it
        was generating, and are started again.
        """
        with self.state_changed:
            self._num_drawn = num_drawn
            found = {finished.number: finished for finished in generated_groups}
            for number in sorted({*found, *lost_numbers}):
                finished = found.get(number)
                self.flow.add_generated_group(
                    number, min(finished.versions) if finished else self.flow.served_version
                )
                self._attempts_by_group[number] = 0
                if finished is None:
                    self._restart_group(number)
                else:
                    self._groups_awaiting_rewards[number] = finished
                    self.groups_to_score.append(finished)
            self._run_schedule()

    def record_generated(self, finished_group: FinishedGroup, attempt: int) -> None:
        """Take in a finished group, which then waits for its rewards. Ignore it where this attempt
        at the group was given up; its route files then count as unused.
        """
        with self.state_changed:
            if self._attempts_by_group.get(finished_group.number) != attempt:
                self._unused_route_files += finished_group.route_files
                return
            self.flow.record_generated(finished_group.number, min(finished_group.versions))
            self._groups_awaiting_rewards[finished_group.number] = finished_group
            self.groups_to_score.append(finished_group)
            self._run_schedule()

    def record_scored(
        self, finished_groups: Sequence[FinishedGroup], scored_groups: Sequence[ScoredGroup]
    ) -> None:
        """Take in the rewards of these groups. Groups that were given up or started again meanwhile
        are left out.
        """
        with self.state_changed:
            for group, found in zip(finished_groups, scored_groups, strict=True):
                if self._groups_awaiting_rewards.get(group.number) is group:
                    self._record_scored_group(found)

    def record_annotated(self, group_numbers: Sequence[int]) -> None:
        """Record that these groups have log-probs, as far as they are still in flight."""
        with self.state_changed:
            self.flow.record_annotated(
                [number for number in group_numbers if number in self.flow.groups_in_flight]
            )
            self._run_schedule()

    def record_update(self) -> None:
        """Record that the update of the step in training is done."""
        with self.state_changed:
            self._numbers_in_training = ()
            self.flow.record_update()
            self._run_schedule()

    def record_sync(self, new_version: int) -> None:
        """Record that the engines serve `new_version`, which ends the step."""
        with self.state_changed:
            self.flow.record_sync(new_version)
            self._run_schedule()

    def record_failure(self, error: BaseException) -> None:
        """Keep the error that ended a thread, if it is the first, for the main thread to raise."""
        with self.state_changed:
            self.thread_error = self.thread_error or error
            self.state_changed.notify_all()

    def close(self) -> None:
        """Close the ledger, so that its threads end; pass the last events on."""
        with self.state_changed:
            self.is_closed = True
            self._on_events(self.flow.events)
            self.state_changed.notify_all()

    # What is asked

    def take_pending_batch(self) -> TakenBatch | None:
        """Return the batch that waits for the trainer, once, or None."""
        with self.state_changed:
            batch = self.pending_batch
            self.pending_batch = None
            return batch

    def take_orders(self) -> list[EngineOrder]:
        """Return the pending orders for the engines, in the order of the decisions, and forget
        them.
        """
        with self.state_changed:
            orders = self._pending_orders
            self._pending_orders = []
            return orders

    def await_orders(self, timeout_s: float) -> None:
        """Wait until there are orders, the ledger is closed, or `timeout_s` seconds have passed."""
        with self.state_changed:
            self.state_changed.wait_for(lambda: self._pending_orders or self.is_closed, timeout_s)

    def list_groups_to_annotate(self) -> list[ScoredGroup]:
        """Return the groups whose log-probs may be computed now, as the schedule decides."""
        with self.state_changed:
            return [
                self._trainable_groups[number]
                for number in self.schedule.select_groups_to_annotate(self.flow)
            ]

    def get_progress(self) -> PromptProgress:
        """Return the prompts that are done with. Groups in flight and groups of the batch in
        training count as untrained.
        """
        with self.state_changed:
            return PromptProgress(
                self._num_drawn,
                tuple(sorted({*self.flow.groups_in_flight, *self._numbers_in_training})),
            )

    # What is decided; the lock is held

    def _record_scored_group(self, scored_group: ScoredGroup) -> None:
        """Record the rewards of a group, and ask the schedule. A group without signal is dropped;
        the first batch_size of these are kept for a step in which no group has signal.
        """
        del self._groups_awaiting_rewards[scored_group.number]
        self.flow.record_scored(scored_group.number)
        self._trainable_groups[scored_group.number] = scored_group
        self._num_scored += 1
        self._num_with_signal += scored_group.has_signal
        if not scored_group.has_signal:
            self._groups_without_signal.append(scored_group)
            for late in self._groups_without_signal[self.flow.batch_size :]:
                self._mark_routes_unused(late)
            del self._groups_without_signal[self.flow.batch_size :]
            self._drop_group(scored_group.number, "no signal")
        self._run_schedule()

    def _run_schedule(self) -> None:
        """Ask the schedule until it decides nothing more, then pass on the events and wake all
        waiting threads. Raise ValueError where nobody works on the next batch.
        """
        restarted: set[int] = set()
        for _ in range(_MAX_ROUNDS):
            if not self._run_decision_round(restarted):
                break
        else:
            raise AssertionError(f"the schedule decides again and again: {self.schedule}")
        self._require_work_in_progress()
        self._on_events(self.flow.events)
        self.flow.events.clear()
        self.state_changed.notify_all()

    def _run_decision_round(self, restarted_numbers: set[int]) -> bool:
        """Ask the schedule once for stale groups, a batch and groups to start, and carry the
        decisions out. Return whether anything was decided. `restarted_numbers` are the groups that
        were started again since the event, which this does not do twice.
        """
        flow = self.flow
        has_decided = False
        for number in list(self.schedule.find_stale_groups(flow)):
            if self.schedule.stale_policy is StalePolicy.DROP:
                self._drop_group(number, "lag")
                has_decided = True
            elif number not in restarted_numbers:
                restarted_numbers.add(number)
                self._drop_counts["again"] += 1
                self._restart_group(number)
                has_decided = True
        if not flow.is_training and flow.num_steps_left:
            numbers = self.schedule.select_batch(flow)
            if numbers is not None and not len(numbers):
                raise ValueError(
                    f"{self.schedule} makes a batch of no group for step"
                    f" {flow.last_taken_step + 1}; let its batch return None until there are"
                    " groups that can train."
                )
            if numbers is None and self._must_take_short_batch:
                numbers = sorted(flow.scored_order)  # with what there is
            if numbers is not None:
                self._take_batch(numbers)
                has_decided = True
        for number in flow.start_groups(self.schedule.count_groups_to_start(flow)):
            self._attempts_by_group[number] = 0
            self._num_drawn = number + 1
            self._pending_orders.append(EngineOrder("submit", number, 0, flow.served_version))
            has_decided = True
        return has_decided

    @property
    def _must_take_short_batch(self) -> bool:
        """Return whether the step has scored as many groups as it may, and too few of them can
        train for a whole batch. Where a schedule has enough groups and waits for older ones, return
        False: those are generated already.
        """
        is_used_up = self._max_scored is not None and self._num_scored >= self._max_scored
        return is_used_up and len(self.flow.scored_order) < self.flow.batch_size

    def _take_batch(self, group_numbers: Sequence[int]) -> None:
        """Make these groups the pending batch of the next step; groups without signal where there
        are none. Drop the groups that the schedule gives up, and all groups in flight after the
        last step.
        """
        flow = self.flow
        groups = [
            self._trainable_groups.pop(number) for number in group_numbers
        ] or self._groups_without_signal
        for spare in self._groups_without_signal if group_numbers else ():
            self._mark_routes_unused(spare)
        for number in group_numbers:
            del self._attempts_by_group[number]
        version = flow.served_version
        step = flow.record_batch_taken(group_numbers)
        self._numbers_in_training = tuple(group_numbers)
        for number in list(self.schedule.select_groups_to_give_up(flow)):
            self._drop_group(number, "tail")
        if not flow.num_steps_left:
            for number in list(flow.groups_in_flight):
                self._drop_group(number, "end")
        self.pending_batch = TakenBatch(
            step,
            tuple(groups),
            version,
            flow.num_running,
            self._num_scored,
            self._num_with_signal,
            self._drop_counts,
            tuple(self._unused_route_files),
        )
        self._groups_without_signal = []
        self._drop_counts = Counter()
        self._unused_route_files = []
        self._num_scored = self._num_with_signal = 0

    def _drop_group(self, group_number: int, reason: DropReason) -> None:
        """Abort a group in flight where it runs, and drop it for this reason."""
        self._abort_group(group_number)
        self.flow.record_dropped(group_number, reason)
        self._drop_counts[reason] += 1
        self._forget_group(group_number, keeps_routes=reason == "no signal")
        del self._attempts_by_group[group_number]

    def _restart_group(self, group_number: int) -> None:
        """Abort a group where it runs, and order it to be generated anew."""
        self._abort_group(group_number)
        self.flow.restart_group(group_number)
        self._forget_group(group_number)
        self._attempts_by_group[group_number] += 1
        self._pending_orders.append(
            EngineOrder(
                "submit",
                group_number,
                self._attempts_by_group[group_number],
                self.flow.served_version,
            )
        )

    def _forget_group(self, group_number: int, keeps_routes: bool = False) -> None:
        """Forget the samples of a group, and count its route files as unused. With `keeps_routes`
        those of a scored group are kept: the group may train all the same, where no other group
        does.
        """
        finished = self._groups_awaiting_rewards.pop(group_number, None)
        scored = self._trainable_groups.pop(group_number, None)
        if finished is not None:
            self._unused_route_files += finished.route_files
        if scored is not None and not keeps_routes:
            self._mark_routes_unused(scored)

    def _mark_routes_unused(self, scored_group: ScoredGroup) -> None:
        """Add the route files of a scored group to the files that train nothing."""
        self._unused_route_files += [name for name in scored_group.batch.routes or () if name]

    def _abort_group(self, group_number: int) -> None:
        """Order the abort of a group where it runs, and take it from the groups to score."""
        if self.flow.groups_in_flight[group_number].stage is GroupStage.RUNNING:
            self._pending_orders.append(
                EngineOrder(
                    "abort",
                    group_number,
                    self._attempts_by_group[group_number],
                    self.flow.served_version,
                )
            )
        self.groups_to_score = [
            group for group in self.groups_to_score if group.number != group_number
        ]

    def _require_work_in_progress(self) -> None:
        """Raise ValueError where nothing in flight can lead to the next batch: the run would wait
        for ever.
        """
        flow = self.flow
        if (
            flow.is_training
            or not flow.num_steps_left
            or self._groups_awaiting_rewards
            or flow.num_running
        ):
            return
        raise ValueError(
            f"{self.schedule} starts no group and makes no batch of the {len(flow.scored_groups)}"
            f" groups that can train, of which a step has {flow.batch_size}; correct its"
            " count_groups_to_start or select_batch."
        )
