"""Groups are generated and scored while the trainer works, as the run's schedule says. The main
thread's side of it.

Three threads share a `GroupLedger`: one drives the engines, one has finished groups scored
(`drive.py`), and this one takes batches, computes log-probs early where the schedule says
so, and syncs.

Also: Log-probs and values of groups while others of their batch are still awaited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from rlhf_megatron import faults
from rlhf_megatron.controller.observe.metrics.batch_metrics import compute_sample_lags
from rlhf_megatron.controller.recovery.run_journal import GroupJournal
from rlhf_megatron.controller.recovery.save_policy import StageContext
from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowEvent, GroupFlow
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import Schedule, SyncPolicy
from rlhf_megatron.controller.scheduler.scored_samples import (
    GroupFilterReport,
    align_reward_parts,
    compute_greedy_length_metrics,
    release_free_memory,
)
from rlhf_megatron.controller.scheduler.supply.group_ledger import (
    DrawPrompts,
    FinishedGroup,
    GroupLedger,
    MakeRequests,
    PromptProgress,
    ScoredGroup,
    ScoreFinishedGroups,
    TakenBatch,
)
from rlhf_megatron.controller.scheduler.supply.supply_threads import (
    WAIT_S,
    EngineDriver,
    ScoringThread,
    start_daemon_thread,
)
from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, concat_batches, select_samples
from rlhf_megatron.rollout.fleet.generation_session import GenerationSession
from rlhf_megatron.stop import RunStopped

# step that trains on the samples, samples
AnnotateSamples = Callable[[int, ScoredBatch], AnnotatedBatch]

THREAD_END_TIMEOUT_S = 20.0  # that a thread gets to end; it is a daemon


class EarlyAnnotations:
    """The annotations of the groups of one step, which hold until one of them is trained. Used by
    the main thread.

    `min_samples`: fewer are not sent to the hosts while more may come.
    """

    def __init__(self, annotate_samples: AnnotateSamples, min_samples: int) -> None:
        """Begin without annotations. `annotate_samples(step, samples)` annotates on the hosts.
        `min_samples`: with fewer samples a call is not worth it while more may come.
        """
        self._annotate_samples = annotate_samples
        self._min_samples = min_samples
        self._annotations_by_group: dict[int, AnnotatedBatch] = {}

    def select_groups_to_annotate(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups to annotate now: all groups that are not annotated yet, or none while
        they have fewer than `min_samples` samples.
        """
        new = self.list_missing_groups(groups)
        return new if sum(len(group.batch) for group in new) >= self._min_samples else []

    def annotate_groups(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Annotate these groups in one call, and keep the annotations by group."""
        annotated = self._annotate_samples(
            step, concat_batches(align_reward_parts([group.batch for group in groups]))
        )
        begin = 0
        for group in groups:
            self._annotations_by_group[group.number] = select_samples(
                annotated, range(begin, begin + len(group.batch))
            )
            begin += len(group.batch)

    def list_missing_groups(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups of `groups` that are not annotated yet."""
        return [group for group in groups if group.number not in self._annotations_by_group]

    def collect_batch(self, groups: Sequence[ScoredGroup]) -> AnnotatedBatch:
        """Return the annotated samples of `groups`, all of which must be annotated, as one batch in
        their order.
        """
        return concat_batches(
            align_reward_parts([self._annotations_by_group[group.number] for group in groups])
        )

    def discard_annotations(self) -> None:
        """Forget all annotations, because a model has been trained."""
        self._annotations_by_group.clear()


@dataclass(frozen=True)
class SupplyServices:
    """The work that others do for a supply."""

    session: GenerationSession
    draw_prompts: DrawPrompts
    make_requests: MakeRequests
    score_groups: ScoreFinishedGroups
    annotate_samples: AnnotateSamples  # by the main thread, while the hosts are free


@dataclass(frozen=True)
class ResumedGroups:
    """The groups in flight as a process begins."""

    num_drawn: int  # prompts of the stream so far
    generated_groups: tuple[FinishedGroup, ...] = ()  # their samples had come
    lost_numbers: tuple[int, ...] = ()  # numbers of the others


@dataclass(eq=False)
class BackgroundSupply:
    """A `group_ledger.BatchSupply`. All but the constructor is called by the main thread.

    with Background(flow, schedule, work, version=lambda: sync.version,
    mini_batch_size=64) as supply:
        batch = supply.take(step, guard)
        ...
        with supply.syncing():
            sync()
    """

    # where the run stands; the engines serve its version, and its next number is the next prompt's
    flow: GroupFlow
    schedule: Schedule
    services: SupplyServices
    get_policy_version: Callable[[], int]  # of the policy; `sync_window` reads it at its end
    mini_batch_size: int  # samples that an early piece has at least
    begin_step: Callable[[], None] = lambda: None  # called first in `take_batch`
    should_stop: Callable[[], None] = lambda: None
    # in it the session leaves the engines alone
    pause_session: Callable[[], AbstractContextManager[object]] = nullcontext
    # False: no engine will end what runs before it gets new weights
    is_serving: Callable[[], bool] = lambda: True
    filter_report: GroupFilterReport | None = None  # of `algorithm.filter_groups`
    journal: GroupJournal | None = None  # keeps finished groups
    resumed_groups: ResumedGroups = ResumedGroups(0)  # what to go on with
    # told of files that train nothing
    discard_route_files: Callable[[int, Sequence[str]], None] = lambda step, routes: None
    report_waiting: Callable[[str], None] = lambda text: None  # told what is waited for
    # gets the lines of the Flow, in order
    on_events: Callable[[Sequence[FlowEvent]], None] = lambda events: None

    def __post_init__(self) -> None:
        """Make the ledger, and put the groups of a former process into it. No thread is started
        yet.
        """
        self.ledger = GroupLedger(
            self.flow,
            self.schedule,
            self.filter_report.max_groups_per_step if self.filter_report else None,
            self.on_events,
        )
        self._early_annotations = EarlyAnnotations(
            self.services.annotate_samples, self.mini_batch_size
        )
        self._threads: list[threading.Thread] = []
        self._metrics: dict[str, float] = {}
        self.ledger.restore_groups(
            self.resumed_groups.num_drawn,
            self.resumed_groups.generated_groups,
            self.resumed_groups.lost_numbers,
        )

    def __enter__(self) -> BackgroundSupply:
        """Start the threads that drive the engines and score finished groups."""
        ledger = self.ledger
        work = self.services
        driver = EngineDriver(
            ledger, work.session, work.draw_prompts, work.make_requests, self.journal
        )
        scoring = ScoringThread(ledger, work.score_groups)
        self._threads = [
            start_daemon_thread("supply-drive", driver.run_until_closed, ledger.record_failure),
            start_daemon_thread("supply-score", scoring.run_until_closed, ledger.record_failure),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        """Close the ledger, and wait up to THREAD_END_TIMEOUT_S for the threads to end."""
        self.ledger.close()
        deadline = time.monotonic() + THREAD_END_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def take_batch(self, step: int, enter_stage: StageContext) -> ScoredBatch:
        """Wait for the step's batch, and return its samples. Groups are annotated early meanwhile;
        where any group of the batch was, the whole batch is returned with annotations.
        """
        self.begin_step()
        began = time.monotonic()
        seconds = 0.0
        while True:
            with enter_stage("take"):
                taken, piece = self._await_batch(step)
            if taken is not None:
                break
            seconds += time.monotonic() - began
            with enter_stage("annotate"):
                self._annotate_early(step, piece)
            began = time.monotonic()
        seconds += time.monotonic() - began
        assert taken.step == step, f"the supply made step {taken.step}, the loop is at {step}"
        batch = concat_batches(align_reward_parts([group.batch for group in taken.groups]))
        release_free_memory()
        self.discard_route_files(step, taken.unused_route_files)
        self._metrics = self._compute_batch_metrics(taken, batch, seconds)
        missing = self._early_annotations.list_missing_groups(taken.groups)
        if len(missing) < len(taken.groups):
            with enter_stage("annotate"):
                if missing:
                    self._early_annotations.annotate_groups(step, missing)
                batch = self._early_annotations.collect_batch(taken.groups)
        faults.reach_fault_point("loop.after_score")
        return batch

    @contextmanager
    def sync_window(self) -> Iterator[None]:
        """Record the update, wait for running groups where the schedule says so, pause the session
        for the sync in the block, and record the sync afterwards.
        """
        self._early_annotations.discard_annotations()
        self.ledger.record_update()
        if self.schedule.sync_policy is SyncPolicy.WAIT:
            self._await_running_groups()
        with self.pause_session():
            yield
        self.ledger.record_sync(self.get_policy_version())

    def get_progress(self) -> PromptProgress:
        """Return which prompts of the stream are done with."""
        return self.ledger.get_progress()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the batch that was taken last, and forget them."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _await_batch(self, step: int) -> tuple[TakenBatch | None, list[ScoredGroup]]:
        """Wait, and return (the batch of the step, []) or (None, groups to annotate while the batch
        is awaited). Raise RunStopped, or the error of a thread.
        """
        ledger = self.ledger
        while True:
            self.should_stop()
            self.services.session.mend_engines()
            with ledger.state_changed:
                if ledger.state_changed.wait_for(
                    lambda: (
                        ledger.thread_error
                        or ledger.pending_batch
                        or self._select_groups_to_annotate()
                    ),
                    WAIT_S,
                ):
                    if ledger.thread_error:
                        raise ledger.thread_error
                    taken = ledger.take_pending_batch()
                    return taken, [] if taken else self._select_groups_to_annotate()
                text = str(ledger)
            self.report_waiting(f"step {step} waits for groups: {text}")

    def _select_groups_to_annotate(self) -> list[ScoredGroup]:
        """Return the groups to annotate now; none where the schedule does not annotate early or
        while a step is trained.
        """
        if not self.schedule.annotates_early or self.ledger.flow.is_training:
            return []
        return self._early_annotations.select_groups_to_annotate(
            self.ledger.list_groups_to_annotate()
        )

    def _annotate_early(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Annotate these groups, and record it in the ledger."""
        self._early_annotations.annotate_groups(step, groups)
        self.ledger.record_annotated([group.number for group in groups])

    def _await_running_groups(self) -> None:
        """Wait until no group is being generated. Return early where no engine serves or the run is
        to stop. Raise the error of a thread. The deadline of the sync stage also ends the wait.
        The watchdog of the sync stage ends a wait that takes too long, with HostTimeoutError.
        """
        ledger = self.ledger
        while self.is_serving() and not self._is_stop_requested():
            with ledger.state_changed:
                if ledger.state_changed.wait_for(
                    lambda: ledger.thread_error or not ledger.flow.num_running, WAIT_S
                ):
                    if ledger.thread_error:
                        raise ledger.thread_error
                    return
                text = str(ledger)
            self.report_waiting(f"the sync waits for groups: {text}")

    def _is_stop_requested(self) -> bool:
        """Return whether the run was asked to stop, instead of raising RunStopped."""
        try:
            self.should_stop()
        except RunStopped:
            return True
        return False

    def _compute_batch_metrics(
        self, taken_batch: TakenBatch, batch: ScoredBatch, wait_s: float
    ) -> dict[str, float]:
        """Return the metrics of a taken batch; `wait_s` is the time that the step waited for it.
        Raise AssertionError where a sample is older than the schedule allows.
        """
        oldest = int(compute_sample_lags(taken_batch.policy_version, batch).max())
        bound = self.schedule.max_lag
        assert oldest <= bound, (
            f"a sample of step {taken_batch.step} has lag {oldest}, the schedule's bound is {bound}"
        )
        metrics = {
            "schedule/wait_s": wait_s,
            "schedule/generating": float(taken_batch.num_running),
            "schedule/started_again": float(taken_batch.drop_counts["again"]),
        }
        for reason in ("lag", "no signal", "tail"):
            metrics[f"schedule/dropped_{reason.replace(' ', '_')}"] = float(
                taken_batch.drop_counts[reason]
            )
        if greedy := [
            group.greedy_rollout for group in taken_batch.groups if group.greedy_rollout is not None
        ]:
            metrics |= compute_greedy_length_metrics(concat_batches(greedy))
        if self.filter_report is not None:
            num_kept = len(taken_batch.groups) if taken_batch.has_signal else 0
            metrics |= self.filter_report(
                num_kept, taken_batch.num_scored, taken_batch.num_with_signal
            )
        return metrics
