"""Groups are generated and scored while the trainer works, as the run's schedule says. The main thread's side of it.

Three threads share a `Ledger`: one drives the engines, one has finished groups scored (`drive.py`), and this one takes
batches, computes log-probs early where the schedule says so, and syncs.

Also: Log-probs and values of groups while others of their batch are still awaited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from rlhf_megatron import faults
from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, concat, select
from rlhf_megatron.observe.metrics.batch import lags
from rlhf_megatron.recovery.journal import GroupJournal
from rlhf_megatron.recovery.keeper import Stage
from rlhf_megatron.rollout.fleet.session import Session
from rlhf_megatron.scheduler.samples import FewGroups, alike, give_back_memory, greedy_length_metrics
from rlhf_megatron.scheduler.schedules.base import OnSync, Schedule
from rlhf_megatron.scheduler.schedules.flow import Event, Flow
from rlhf_megatron.scheduler.supply.drive import WAIT_S, Driver, Scoring, start
from rlhf_megatron.scheduler.supply.ledger import Draw, Finished, Ledger, MakeRequests, Progress, Score, Scored, Taken
from rlhf_megatron.stop import RunStopped

Annotate = Callable[[int, ScoredBatch], AnnotatedBatch]  # step that trains on the samples, samples


class EarlyAnnotations:
    """The annotations of the groups of one step, which hold until one of them is trained. Used by the main thread.

    `min_samples`: fewer are not sent to the hosts while more may come.
    """

    def __init__(self, annotate: Annotate, min_samples: int) -> None:
        self._annotate = annotate
        self._min_samples = min_samples
        self._by_group: dict[int, AnnotatedBatch] = {}

    def piece(self, groups: Sequence[Scored]) -> list[Scored]:
        """Return the groups to annotate now; none while they are too few."""
        new = self.missing(groups)
        return new if sum(len(group.batch) for group in new) >= self._min_samples else []

    def add(self, step: int, groups: Sequence[Scored]) -> None:
        annotated = self._annotate(step, concat(alike([group.batch for group in groups])))
        begin = 0
        for group in groups:
            self._by_group[group.number] = select(annotated, range(begin, begin + len(group.batch)))
            begin += len(group.batch)

    def missing(self, groups: Sequence[Scored]) -> list[Scored]:
        """Return the groups of a batch that were not annotated early."""
        return [group for group in groups if group.number not in self._by_group]

    def collect(self, groups: Sequence[Scored]) -> AnnotatedBatch:
        """A batch of which none is missing, in the order of `groups`."""
        return concat(alike([self._by_group[group.number] for group in groups]))

    def clear(self) -> None:
        """A model has been trained."""
        self._by_group.clear()


END_S = 20.0  # that a thread gets to end; it is a daemon


@dataclass(frozen=True)
class Work:
    """The work that others do for a supply."""

    session: Session
    draw: Draw
    make_requests: MakeRequests
    score: Score
    annotate: Annotate  # by the main thread, while the hosts are free


@dataclass(frozen=True)
class Found:
    """The groups in flight as a process begins."""

    num_drawn: int  # prompts of the stream so far
    known: tuple[Finished, ...] = ()  # their samples had come
    lost: tuple[int, ...] = ()  # numbers of the others


@dataclass(eq=False)
class Background:
    """A `ledger.Supply`. All but the constructor is called by the main thread.

    with Background(flow, schedule, work, version=lambda: sync.version, mini_batch_size=64) as supply:
        batch = supply.take(step, guard)
        ...
        with supply.syncing():
            sync()
    """

    flow: Flow  # where the run stands; the engines serve its version, and its next number is the next prompt's
    schedule: Schedule
    work: Work
    version: Callable[[], int]  # of the policy; `syncing` reads it at its end
    mini_batch_size: int  # samples that an early piece has at least
    begin_step: Callable[[], None] = lambda: None  # called first in `take`
    should_stop: Callable[[], None] = lambda: None
    exclusive: Callable[[], AbstractContextManager[object]] = nullcontext  # in it the session leaves the engines alone
    is_serving: Callable[[], bool] = lambda: True  # False: no engine will end what runs before it gets new weights
    few: FewGroups | None = None  # of `algorithm.filter_groups`
    journal: GroupJournal | None = None  # keeps finished groups
    found: Found = Found(0)  # what to go on with
    leave_out: Callable[[int, Sequence[str]], None] = lambda step, routes: None  # told of files that train nothing
    report: Callable[[str], None] = lambda text: None  # told what is waited for
    on_events: Callable[[Sequence[Event]], None] = lambda events: None  # gets the lines of the Flow, in order

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.flow, self.schedule, self.few.most_groups if self.few else None, self.on_events)
        self._early = EarlyAnnotations(self.work.annotate, self.mini_batch_size)
        self._threads: list[threading.Thread] = []
        self._metrics: dict[str, float] = {}
        self.ledger.begin(self.found.num_drawn, self.found.known, self.found.lost)

    def __enter__(self) -> Background:
        ledger, work = self.ledger, self.work
        driver = Driver(ledger, work.session, work.draw, work.make_requests, self.journal)
        scoring = Scoring(ledger, work.score)
        self._threads = [
            start("supply-drive", driver.run, ledger.failed),
            start("supply-score", scoring.run, ledger.failed),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self.ledger.close()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def take(self, step: int, stage: Stage) -> ScoredBatch:
        self.begin_step()
        began, seconds = time.monotonic(), 0.0
        while True:
            with stage("take"):
                taken, piece = self._await(step)
            if taken is not None:
                break
            seconds += time.monotonic() - began
            with stage("annotate"):
                self._annotate(step, piece)
            began = time.monotonic()
        seconds += time.monotonic() - began
        assert taken.step == step, f"the supply made step {taken.step}, the loop is at {step}"
        batch = concat(alike([group.batch for group in taken.groups]))
        give_back_memory()
        self.leave_out(step, taken.left_out)
        self._metrics = self._metrics_of(taken, batch, seconds)
        missing = self._early.missing(taken.groups)
        if len(missing) < len(taken.groups):
            with stage("annotate"):
                if missing:
                    self._early.add(step, missing)
                batch = self._early.collect(taken.groups)
        faults.reach("loop.after_score")
        return batch

    @contextmanager
    def syncing(self) -> Iterator[None]:
        self._early.clear()
        self.ledger.updated()
        if self.schedule.on_sync is OnSync.WAIT:
            self._await_engines()
        with self.exclusive():
            yield
        self.ledger.synced(self.version())

    def progress(self) -> Progress:
        return self.ledger.progress()

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _await(self, step: int) -> tuple[Taken | None, list[Scored]]:
        """The batch of the step, or groups whose log-probs are to be made while it is awaited."""
        ledger = self.ledger
        while True:
            self.should_stop()
            self.work.session.mend()
            with ledger.changed:
                if ledger.changed.wait_for(lambda: ledger.error or ledger.batch or self._piece(), WAIT_S):
                    if ledger.error:
                        raise ledger.error
                    taken = ledger.fetch()
                    return taken, [] if taken else self._piece()
                text = str(ledger)
            self.report(f"step {step} waits for groups: {text}")

    def _piece(self) -> list[Scored]:
        if not self.schedule.annotates_early or self.ledger.flow.is_training:
            return []
        return self._early.piece(self.ledger.to_annotate())

    def _annotate(self, step: int, piece: Sequence[Scored]) -> None:
        self._early.add(step, piece)
        self.ledger.annotated([group.number for group in piece])

    def _await_engines(self) -> None:
        """Wait until nothing is generated. It returns early where no engine serves or the run is to stop. The
        deadline of the stage sync ends it too.
        """
        ledger = self.ledger
        while self.is_serving() and not self._is_to_stop():
            with ledger.changed:
                if ledger.changed.wait_for(lambda: ledger.error or not ledger.flow.num_running, WAIT_S):
                    if ledger.error:
                        raise ledger.error
                    return
                text = str(ledger)
            self.report(f"the sync waits for groups: {text}")

    def _is_to_stop(self) -> bool:
        try:
            self.should_stop()
        except RunStopped:
            return True
        return False

    def _metrics_of(self, taken: Taken, batch: ScoredBatch, seconds: float) -> dict[str, float]:
        """Raises AssertionError where a sample is older than the schedule allows."""
        oldest = int(lags(taken.version, batch).max())
        bound = self.schedule.max_lag
        assert oldest <= bound, f"a sample of step {taken.step} has lag {oldest}, the schedule's bound is {bound}"
        metrics = {
            "schedule/wait_s": seconds,
            "schedule/generating": float(taken.num_running),
            "schedule/started_again": float(taken.counts["again"]),
        }
        for reason in ("lag", "no signal", "tail"):
            metrics[f"schedule/dropped_{reason.replace(' ', '_')}"] = float(taken.counts[reason])
        if greedy := [group.greedy for group in taken.groups if group.greedy is not None]:
            metrics |= greedy_length_metrics(concat(greedy))
        if self.few is not None:
            num_kept = len(taken.groups) if taken.has_signal else 0
            metrics |= self.few(num_kept, taken.num_scored, taken.num_with_signal)
        return metrics
