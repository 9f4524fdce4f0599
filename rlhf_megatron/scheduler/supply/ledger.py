"""The Flow of a run whose threads all tell it, and what its schedule then decides.

Whoever tells something has the schedule asked at once, in the order of `schedules.base`. Decisions for the engines wait
as orders for the thread that drives them; a batch waits for the trainer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.recovery.keeper import Stage
from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest
from rlhf_megatron.scheduler.schedules.base import OnStale, Schedule
from rlhf_megatron.scheduler.schedules.flow import DropReason, Event, Flow, GroupStage

Samples = Sequence[Sequence[GeneratedSample]]  # a list for each request of a group


@dataclass(frozen=True)
class Progress:
    """Which prompts of the stream are done with: those at the first `num_drawn` positions, but for `untrained`."""

    num_drawn: int
    untrained: tuple[int, ...] = ()  # ascending


class Supply(Protocol):
    """A context manager around the whole loop: what works in the background begins and ends with it."""

    def __enter__(self) -> Supply:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def take(self, step: int, stage: Stage) -> ScoredBatch:
        """The samples that the step trains on; with log-probs and values where these were made early.

        `stage`: around each part of the work, by its name.

        Raises RunStopped, and whatever went wrong in the background.
        """

    def syncing(self) -> AbstractContextManager[None]:
        """Around the weight sync that ends a step, also where that leaves the policy as it is."""
        return nullcontext()

    def progress(self) -> Progress:
        """Return what a checkpoint keeps, as it stands between two steps."""

    def take_metrics(self) -> dict[str, float]:
        """Take the metrics of the batch that was taken last."""
        return {}


@dataclass(frozen=True)
class Finished:
    """A group whose samples have come."""

    number: int
    prompts: PromptBatch  # of its one prompt
    samples: Samples

    @property
    def routes(self) -> list[str]:
        """Files with the experts that its tokens met."""
        return [sample.routes for samples in self.samples for sample in samples if sample.routes]

    @property
    def versions(self) -> set[int]:
        """The versions of all tokens that may train: those of the first request."""
        versions = {sample.policy_version for sample in self.samples[0]}
        return versions | {span.version for sample in self.samples[0] for span in sample.version_spans}


@dataclass(frozen=True)
class Scored:
    """A group with its rewards."""

    number: int
    batch: ScoredBatch
    greedy: RolloutBatch | None = None  # its greedy sample, which trains nothing
    has_signal: bool = True  # False: `algorithm.filter_groups` leaves it out


Draw = Callable[[Sequence[int]], PromptBatch]  # positions of the prompt stream -> the prompts there
MakeRequests = Callable[[PromptBatch, int], list[list[GenerateRequest]]]  # prompts, version -> requests of each
Score = Callable[[Sequence[Finished]], list[Scored]]  # called by one thread, with all groups that have come


_PASSES = 100  # of questions after one event


@dataclass(frozen=True)
class Order:
    """An order for the thread that drives the engines."""

    kind: Literal["submit", "abort"]
    number: int
    attempt: int  # how often that group has been started before
    version: int  # that engines served when it was made


@dataclass(frozen=True)
class Taken:
    """The groups of a step, ascending by number, and how they came about since the batch before."""

    step: int
    groups: tuple[Scored, ...]
    version: int  # of the policy that trains on them
    num_running: int  # groups that are generated meanwhile
    num_scored: int
    num_with_signal: int
    counts: Counter[str] = field(default_factory=Counter)  # groups dropped, by reason, and "again"
    left_out: tuple[str, ...] = ()  # files of routes of samples that train nothing

    @property
    def has_signal(self) -> bool:
        return any(group.has_signal for group in self.groups)


class Ledger:
    """`most_scored`: groups that a step may have scored before it trains on fewer than it wants; None: any number.

    `on_events` gets what the Flow has logged, which it forgets then. Methods may be called by any thread.
    """

    def __init__(
        self,
        flow: Flow,
        schedule: Schedule,
        most_scored: int | None = None,
        on_events: Callable[[Sequence[Event]], None] = lambda events: None,
    ) -> None:
        self.changed = threading.Condition()  # held by whoever reads or tells; told of every change
        self.flow = flow
        self.schedule = schedule
        self.batch: Taken | None = None  # that the trainer has not fetched
        self.to_score: list[Finished] = []
        self.error: BaseException | None = None  # of a thread
        self.is_closed = False
        self._most_scored = most_scored
        self._on_events = on_events
        self._orders: list[Order] = []
        self._attempts: dict[int, int] = {}  # of groups in flight
        self._finished: dict[int, Finished] = {}  # that wait for their rewards
        self._scored: dict[int, Scored] = {}  # that can train
        self._in_training: tuple[int, ...] = ()
        self._num_drawn = 0
        self._spare: list[Scored] = []  # the first without signal since the last batch
        self._counts: Counter[str] = Counter()  # since the last batch
        self._left_out: list[str] = []  # likewise
        self._num_scored = self._num_with_signal = 0

    def __str__(self) -> str:
        """Describe the state to whoever waits; the lock is held."""
        flow = self.flow
        waiting = len(flow.in_flight) - flow.num_running - len(flow.scored_order)
        return (
            f"{len(flow.scored_order)} of {flow.batch_size} can train, {flow.num_running} are generated, {waiting} wait"
            " for their rewards"
        )

    # What happens

    def begin(self, num_drawn: int, known: Sequence[Finished] = (), lost: Sequence[int] = ()) -> None:
        """`known`: groups in flight that a former process has generated; `lost`: those that it was generating."""
        with self.changed:
            self._num_drawn = num_drawn
            found = {finished.number: finished for finished in known}
            for number in sorted({*found, *lost}):
                finished = found.get(number)
                self.flow.known(number, min(finished.versions) if finished else self.flow.version)
                self._attempts[number] = 0
                if finished is None:
                    self._start_again(number)
                else:
                    self._finished[number] = finished
                    self.to_score.append(finished)
            self._settle()

    def generated(self, finished: Finished, attempt: int) -> None:
        """Take in a finished group. It is ignored where that attempt is not awaited any more."""
        with self.changed:
            if self._attempts.get(finished.number) != attempt:
                self._left_out += finished.routes
                return
            self.flow.generated(finished.number, min(finished.versions))
            self._finished[finished.number] = finished
            self.to_score.append(finished)
            self._settle()

    def scored(self, finished: Sequence[Finished], scored: Sequence[Scored]) -> None:
        """Rewards of these groups; those that were given up or started again meanwhile are left out."""
        with self.changed:
            for group, found in zip(finished, scored, strict=True):
                if self._finished.get(group.number) is group:
                    self._scored_one(found)

    def annotated(self, numbers: Sequence[int]) -> None:
        with self.changed:
            self.flow.annotated([number for number in numbers if number in self.flow.in_flight])
            self._settle()

    def updated(self) -> None:
        with self.changed:
            self._in_training = ()
            self.flow.updated()
            self._settle()

    def synced(self, version: int) -> None:
        with self.changed:
            self.flow.synced(version)
            self._settle()

    def failed(self, error: BaseException) -> None:
        """A thread ends by this; the first is kept."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self._on_events(self.flow.events)
            self.changed.notify_all()

    # What is asked

    def fetch(self) -> Taken | None:
        """The next batch, once."""
        with self.changed:
            batch, self.batch = self.batch, None
            return batch

    def orders(self) -> list[Order]:
        """Take the orders, in the order of the decisions."""
        with self.changed:
            orders, self._orders = self._orders, []
            return orders

    def await_orders(self, timeout_s: float) -> None:
        """Returns when there are some, when the ledger is closed, or after this time."""
        with self.changed:
            self.changed.wait_for(lambda: self._orders or self.is_closed, timeout_s)

    def to_annotate(self) -> list[Scored]:
        """Groups whose log-probs may be computed now."""
        with self.changed:
            return [self._scored[number] for number in self.schedule.to_annotate(self.flow)]

    def progress(self) -> Progress:
        with self.changed:
            return Progress(self._num_drawn, tuple(sorted({*self.flow.in_flight, *self._in_training})))

    # What is decided; the lock is held

    def _scored_one(self, scored: Scored) -> None:
        del self._finished[scored.number]
        self.flow.scored(scored.number)
        self._scored[scored.number] = scored
        self._num_scored += 1
        self._num_with_signal += scored.has_signal
        if not scored.has_signal:
            self._spare.append(scored)
            for late in self._spare[self.flow.batch_size :]:
                self._leave_out(late)
            del self._spare[self.flow.batch_size :]
            self._drop(scored.number, "no signal")
        self._settle()

    def _settle(self) -> None:
        restarted: set[int] = set()
        for _ in range(_PASSES):
            if not self._decide(restarted):
                break
        else:
            raise AssertionError(f"the schedule decides again and again: {self.schedule}")
        self._require_work()
        self._on_events(self.flow.events)
        self.flow.events.clear()
        self.changed.notify_all()

    def _decide(self, restarted: set[int]) -> bool:
        """One round of questions. False: nothing was decided."""
        flow, has_decided = self.flow, False
        for number in list(self.schedule.stale(flow)):
            if self.schedule.on_stale is OnStale.DROP:
                self._drop(number, "lag")
                has_decided = True
            elif number not in restarted:
                restarted.add(number)
                self._counts["again"] += 1
                self._start_again(number)
                has_decided = True
        if not flow.is_training and flow.num_steps_left:
            numbers = self.schedule.batch(flow)
            if numbers is not None and not len(numbers):
                raise ValueError(
                    f"{self.schedule} makes a batch of no group for step {flow.step + 1}; let its batch return None"
                    " until there are groups that can train."
                )
            if numbers is None and self._are_too_few:
                numbers = sorted(flow.scored_order)  # with what there is
            if numbers is not None:
                self._take(numbers)
                has_decided = True
        for number in flow.started(self.schedule.num_to_start(flow)):
            self._attempts[number] = 0
            self._num_drawn = number + 1
            self._orders.append(Order("submit", number, 0, flow.version))
            has_decided = True
        return has_decided

    @property
    def _are_too_few(self) -> bool:
        """A step's groups are used up and do not make a batch. A schedule that has enough and waits for older ones is
        left to wait: those are generated already."""
        is_used_up = self._most_scored is not None and self._num_scored >= self._most_scored
        return is_used_up and len(self.flow.scored_order) < self.flow.batch_size

    def _take(self, numbers: Sequence[int]) -> None:
        flow = self.flow
        groups = [self._scored.pop(number) for number in numbers] or self._spare
        for spare in self._spare if numbers else ():
            self._leave_out(spare)
        for number in numbers:
            del self._attempts[number]
        version = flow.version
        step = flow.taken(numbers)
        self._in_training = tuple(numbers)
        for number in list(self.schedule.leftover(flow)):
            self._drop(number, "tail")
        if not flow.num_steps_left:
            for number in list(flow.in_flight):
                self._drop(number, "end")
        scored = (self._num_scored, self._num_with_signal)
        left_out = tuple(self._left_out)
        self.batch = Taken(step, tuple(groups), version, flow.num_running, *scored, self._counts, left_out)
        self._spare, self._counts, self._left_out = [], Counter(), []
        self._num_scored = self._num_with_signal = 0

    def _drop(self, number: int, reason: DropReason) -> None:
        self._abort(number)
        self.flow.dropped(number, reason)
        self._counts[reason] += 1
        self._forget(number, keeps_routes=reason == "no signal")
        del self._attempts[number]

    def _start_again(self, number: int) -> None:
        self._abort(number)
        self.flow.started_again(number)
        self._forget(number)
        self._attempts[number] += 1
        self._orders.append(Order("submit", number, self._attempts[number], self.flow.version))

    def _forget(self, number: int, keeps_routes: bool = False) -> None:
        """`keeps_routes`: the group may train all the same, where no other does."""
        finished, scored = self._finished.pop(number, None), self._scored.pop(number, None)
        if finished is not None:
            self._left_out += finished.routes
        if scored is not None and not keeps_routes:
            self._leave_out(scored)

    def _leave_out(self, scored: Scored) -> None:
        self._left_out += [name for name in scored.batch.routes or () if name]

    def _abort(self, number: int) -> None:
        if self.flow.in_flight[number].stage is GroupStage.RUNNING:
            self._orders.append(Order("abort", number, self._attempts[number], self.flow.version))
        self.to_score = [group for group in self.to_score if group.number != number]

    def _require_work(self) -> None:
        """Somebody must be at work on the next batch, or the run would wait for ever."""
        flow = self.flow
        if flow.is_training or not flow.num_steps_left or self._finished or flow.num_running:
            return
        raise ValueError(
            f"{self.schedule} starts no group and makes no batch of the {len(flow.ready)} groups that can train, of"
            f" which a step has {flow.batch_size}; correct its num_to_start or batch."
        )
