"""Work of a fleet: the pieces that wait, those on their way, and those that failed. Checks that
samples come from weights that the engines served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from rlhf_megatron.data.expert_route_files import remove_route_files
from rlhf_megatron.rollout import http_client
from rlhf_megatron.rollout.engine_interface import (
    DriverLostError,
    EngineError,
    EngineRequestError,
    EngineStaleError,
    GeneratedSample,
    InferenceEngine,
    SampleGroups,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog, FairLock, make_call_name
from rlhf_megatron.rollout.fleet.engine_supervisor import EngineSupervisor, FleetMember, MemberState
from rlhf_megatron.rollout.fleet.request_balancer import (
    ChunkAssignment,
    EnginePreference,
    OutstandingLoad,
    RequestBalancer,
    RequestChunk,
)

logger = logging.getLogger(__name__)

POLL_S = 0.1
FAILURE_GATHER_S = 0.5  # for other calls that fail with the same engine, until one line for all
FAILURE_LOG_S = 10.0  # between two lines of the log about failed calls of one engine
_ABORT_TIMEOUT_S = 5.0
_MAX_DRIVER_LOSSES = 20  # of a piece with drivers that end: then it may be what ends them
# that an engine gets to end what nobody awaits any more; its connection is closed then
_CANCEL_DELAY_S = 60.0
# Clients give up by themselves so much after `request_timeout_s`: weight syncs, which are not
# counted, end before.
_ALLOWANCE_S = 86400.0


@dataclass(frozen=True, eq=False, slots=True)
class ChunkCall:
    """A piece on its way."""

    assignment: ChunkAssignment
    call_name: str  # "": the engine cannot end it alone
    version: int | None  # of the weights that were served when it was sent
    sent_at: float  # at that time


@dataclass
class _UnloggedFailures:
    """Failed calls of one engine that the log has no line of yet."""

    reason: str  # of the last one
    first_at: float
    num_calls: int = 0
    num_samples: int = 0


@dataclass
class ServedVersions:
    """Versions of weights that a fleet's engines have served."""

    current_version: int | None = None  # None: before the first sync
    all_versions: set[int] = field(default_factory=set)  # the current one too

    def set_current(self, version: int) -> None:
        """Set the current version, and add it to the versions that engines have served."""
        self.current_version = version
        self.all_versions.add(version)


@dataclass(frozen=True)
class FleetResources:
    """Objects that all work of a fleet shares. Only the thread that has the lock may use them."""

    lock: FairLock
    supervisor: EngineSupervisor
    balancer: RequestBalancer
    call_log: EngineCallLog
    served_versions: ServedVersions
    request_timeout_s: float
    request_retries: int


class ChunkGeneration:
    """Generates the samples of chunks on the engines of a fleet. The thread that holds the fleet's
    lock calls `take_back_chunks`, `dispatch_chunks`, `harvest_answers`, again and again;
    `wait_for_answers` and `add_chunk` need no lock.
    """

    def __init__(
        self,
        resources: FleetResources,
        chunks: Iterable[RequestChunk],
        *,
        has_named_calls: bool,
        is_session: bool = False,
        keeps_failures: bool = False,
    ) -> None:
        """Queue `chunks`. `has_named_calls`: other work runs on the engines as well, so that calls
        get names and are aborted one by one. `is_session`: the work goes on over weight syncs,
        whose time does not count. `keeps_failures`: a chunk that no engine can do is added to
        `failed_chunks`, instead of raising its error.
        """
        self._resources = resources
        self._supervisor = resources.supervisor
        self._has_named_calls = has_named_calls
        self._is_session = is_session
        self._read_clock = resources.lock.read_unlocked_clock if is_session else time.monotonic
        self._waiting_chunks = deque(chunks)
        # in the order in which they were sent
        self._task_by_call: dict[ChunkCall, http_client.EventLoopTask] = {}
        self._ended_calls: deque[tuple[ChunkCall, asyncio.Task[SampleGroups]]] = deque()
        self._wake_event = threading.Event()
        self._is_abandoned = False
        # of what is on its way; only the thread that has the lock may read it
        self.outstanding_load = OutstandingLoad()
        # where it is
        self._call_counts: Counter[tuple[FleetMember | None, InferenceEngine | None]] = Counter()
        self._keeps_failures = keeps_failures
        self.failed_chunks: list[tuple[RequestChunk, EngineError]] = []
        # by the name of the engine, router or driver
        self._unlogged_failures: dict[str, _UnloggedFailures] = {}
        self._failure_logged_at: dict[str, float] = {}

    @property
    def is_finished(self) -> bool:
        """Return whether no chunk waits or is on its way."""
        return not self._waiting_chunks and not self._task_by_call

    def take_back_chunks(self) -> None:
        """Queue the chunks again that were sent to engines that no longer serve, as failed ones.
        Later answers of those engines are dropped. Raise EngineError where a chunk has used up its
        retries.
        """
        if all(_is_answer_awaited(member, engine) for member, engine in self._call_counts):
            return
        for call in list(self._task_by_call):
            member = call.assignment.member
            if member is not None and not _is_answer_awaited(member, call.assignment.engine):
                self._cancel_call(call)
                self._retry_chunk(call.assignment, member.reason)
        self._log_failures()

    def dispatch_chunks(self, version: int | None, other_load: OutstandingLoad) -> None:
        """Send waiting chunks in order, as long as the balancer has a place for them. Raise
        EngineError when no engine serves and none will come back.

        `version` is the version that the engines serve, and `other_load` other work that is on its
        way to them.
        """
        if not self._waiting_chunks:
            return
        serving = self._supervisor.list_members(MemberState.SERVING)
        if not serving:
            if not self._supervisor.may_recover:
                raise EngineError(self._supervisor.no_engine_message)
            return
        load = self.outstanding_load + other_load
        while self._waiting_chunks:
            sent = self._resources.balancer.place_chunk(
                self._waiting_chunks[0], serving, load, version
            )
            if sent is None:
                return
            load.add_chunk(sent)
            self._send_chunk(self._waiting_chunks.popleft(), sent, version)

    def wait_for_answers(self) -> bool:
        """Wait for an answer, or for `wake_waiter`, for about 0.1 s at most. Return whether one
        came.
        """
        has_come = self._wake_event.wait(POLL_S)
        self._wake_event.clear()
        return has_come

    def wake_waiter(self) -> None:
        """End a `wait_for_answers` that is under way, or the next one. Any thread may call it."""
        self._wake_event.set()

    def harvest_answers(self, version: int | None) -> list[tuple[RequestChunk, SampleGroups]]:
        """Return the chunks whose answers came and are accepted, with the samples of each request.
        Queue the chunks again whose answers failed, were aborted or come from wrong weights, and
        mark the engines to blame. `version` is the version that the engines serve now. Raise
        EngineError where a chunk has used up its retries, EngineRequestError where a request itself
        is wrong.
        """
        accepted: list[tuple[RequestChunk, SampleGroups]] = []
        while self._ended_calls:
            call, task = self._ended_calls.popleft()
            if self._remove_call(call) is None:
                _discard_groups(task)  # it was taken back or dropped
                continue
            sent = call.assignment
            try:
                groups = task.result()
            except EngineRequestError as error:
                self._give_up_chunk(sent.chunk, error)
                continue
            except EngineError as error:
                if isinstance(error, EngineStaleError) and call.version != version:
                    # it came when the sync had begun, which is over
                    self._waiting_chunks.appendleft(sent.chunk)
                    continue
                if isinstance(error, DriverLostError):
                    # nobody reads what the engine still makes
                    self._abort_on_engines([call] if call.call_name else ())
                    self._retry_chunk(sent, str(error), "a driver")
                    continue
                if not self._resources.balancer.is_balancer_failure(error):
                    self._blame_member(sent, str(error), self._supervisor.mark_failed)
                self._retry_chunk(sent, str(error))
                continue
            served = self._resources.served_versions
            words = (
                describe_wrong_spans(groups, call.version, served)
                if self._is_session
                else describe_wrong_version(groups, call.version)
            )
            if words or any(s.finish_reason == "abort" for g in groups for s in g):
                _discard_groups(task)
            if words:
                words = f"{sent.target_name} returned {words}"
                self._blame_member(sent, words, self._supervisor.mark_stale)
                self._retry_chunk(sent, words)
            elif any(s.finish_reason == "abort" for g in groups for s in g):
                self._retry_chunk(
                    sent, f"{sent.target_name} ended samples before they were complete"
                )
            else:
                if sent.member is not None:
                    sent.member.num_stale_in_a_row = 0
                    sent.chunk.preference = EnginePreference(sent.target_name, version)
                accepted.append((sent.chunk, groups))
        self._log_failures()
        return accepted

    def measure_engine_seconds(self, chunk: RequestChunk) -> float:
        """Return the seconds that calls for this chunk have spent at engines, the one that is under
        way included. Only the thread that holds the lock may call it.
        """
        now = self._read_clock()
        current = [
            now - call.sent_at for call in self._task_by_call if call.assignment.chunk is chunk
        ]
        return chunk.engine_seconds + sum(current)

    def add_chunk(self, chunk: RequestChunk) -> None:
        """Queue a chunk behind the waiting ones."""
        self._waiting_chunks.append(chunk)

    def drop_chunks(self, chunks: Collection[RequestChunk]) -> None:
        """Drop these chunks, waiting or on their way, and abort their calls on the engines."""
        if not chunks:
            return
        gone = set(map(id, chunks))
        self._waiting_chunks = deque(
            chunk for chunk in self._waiting_chunks if id(chunk) not in gone
        )
        dropped = [call for call in self._task_by_call if id(call.assignment.chunk) in gone]
        for call in dropped:
            self._cancel_call(call)
        self._abort_on_engines(dropped)

    def expire_late_calls(self) -> None:
        """Fail the calls that run longer than `request_timeout_s`: mark their engines as failed,
        queue their chunks again, and abort the calls. The time of weight syncs does not count in a
        session.
        """
        now = self._read_clock()
        most_s = self._resources.request_timeout_s
        late = list(takewhile(lambda call: now - call.sent_at > most_s, self._task_by_call))
        for call in late:
            self._cancel_call(call)
            words = (
                f"{call.assignment.target_name}: no answer within {most_s:g}"
                " s (rollout.request_timeout_s)"
            )
            self._blame_member(call.assignment, words, self._supervisor.mark_failed)
            self._retry_chunk(call.assignment, words)
        self._log_failures()
        self._abort_on_engines(late)

    def abandon_calls(self) -> None:
        """Abort all calls on the engines, wait for that a few seconds at most, and remove the route
        files of all answers, also of later ones.
        """
        self._is_abandoned = True
        self.log_remaining_failures()
        wait(self._abort_on_engines(self._task_by_call), timeout=_ABORT_TIMEOUT_S)
        for spawned in self._task_by_call.values():
            spawned.cancel_after(_CANCEL_DELAY_S)
        self._discard_ended_calls()

    def _send_chunk(
        self, chunk: RequestChunk, assignment: ChunkAssignment, version: int | None
    ) -> None:
        """Start the call that generates the chunk's samples, and count it in the load."""
        name = make_call_name(chunk.num_samples) if self._has_named_calls else ""
        named = {"name": name} if name else {}
        timeout_s = self._resources.request_timeout_s + (_ALLOWANCE_S if self._is_session else 0.0)
        work = assignment.generate(chunk.requests, timeout_s, **named)
        call = ChunkCall(assignment, name, version, self._read_clock())
        self.outstanding_load.add_chunk(assignment)
        self._call_counts[assignment.member, assignment.engine] += 1
        start = self._resources.call_log.start_in_event_loop
        self._task_by_call[call] = start(
            assignment.target_name, "generate", work, partial(self._record_ended_call, call)
        )

    def _record_ended_call(self, call: ChunkCall, task: asyncio.Task[SampleGroups]) -> None:
        """Note, in the event loop, that a call ended, and wake the waiting thread. Discard the
        answer where this generation was abandoned.
        """
        self._ended_calls.append((call, task))
        self._wake_event.set()
        if self._is_abandoned:
            self._discard_ended_calls()

    def _discard_ended_calls(self) -> None:
        """Drop the answers that were not harvested, with their route files. Any thread may call
        it.
        """
        with suppress(IndexError):
            while True:
                _discard_groups(self._ended_calls.popleft()[1])

    def _cancel_call(self, call: ChunkCall) -> None:
        """Forget a call whose answer nobody reads, and cancel it after a minute, so that it does
        not keep its connection where the engine never answers.
        """
        spawned = self._remove_call(call)
        if spawned is not None:
            spawned.cancel_after(_CANCEL_DELAY_S)

    def _remove_call(self, call: ChunkCall) -> http_client.EventLoopTask | None:
        """Remove a call from the calls under way and from the load, and return its task; None where
        the call is not under way.
        """
        spawned = self._task_by_call.pop(call, None)
        if spawned is None:
            return None
        place = (call.assignment.member, call.assignment.engine)
        call.assignment.chunk.engine_seconds += self._read_clock() - call.sent_at
        self.outstanding_load.add_chunk(call.assignment, -1)
        self._call_counts[place] -= 1
        if not self._call_counts[place]:
            del self._call_counts[place]
        return spawned

    def _abort_on_engines(self, calls: Iterable[ChunkCall]) -> list[Future[None]]:
        """Abort these calls on their engines, and in the router, in threads, and return the
        futures. Where calls have no names, abort all calls of those engines.
        """
        calls = list(calls)
        names = dict[FleetMember, list[str]]()
        of_router = [call.call_name for call in calls if call.assignment.member is None]
        if of_router:  # before the engines, so that none comes to them afterwards
            self._resources.balancer.abort_waiting_calls(of_router if self._has_named_calls else ())
        for call in calls:
            member = call.assignment.member
            if member is None:
                for each in self._supervisor.list_members(MemberState.SERVING, MemberState.CHECKED):
                    names.setdefault(each, []).append(call.call_name)
            elif call.assignment.has_current_engine:
                names.setdefault(member, []).append(call.call_name)
        start = self._resources.call_log.start_in_thread
        is_named = self._has_named_calls
        ends = {
            member: partial(member.engine.abort_calls, found if is_named else ())
            for member, found in names.items()
        }
        return [start(member.name, "abort", end) for member, end in ends.items()]

    def _blame_member(
        self,
        assignment: ChunkAssignment,
        reason: str,
        mark_member: Callable[[FleetMember, str], None],
    ) -> None:
        """Mark the engine of a failed call with `mark_member`, unless it was restarted or does not
        serve any more. Where a router chose the engine, mark all serving engines as suspect.
        """
        if assignment.member is None:
            self._supervisor.mark_all_suspect(reason)
        elif assignment.has_current_engine and assignment.member.state is MemberState.SERVING:
            mark_member(assignment.member, reason)

    def _retry_chunk(self, assignment: ChunkAssignment, reason: str, culprit: str = "") -> None:
        """Queue the chunk again, first in line and with the same seeds, and count its failure.
        `culprit` names a driver that was lost; "" means that the engine or router of the assignment
        failed. A chunk that has used up its retries is given up: raise EngineError, unless failures
        are kept.
        """
        chunk = assignment.chunk
        chunk.num_failures += not culprit
        chunk.num_driver_losses += bool(culprit)
        culprit = culprit or assignment.target_name
        chunk.failure_by_engine[culprit] = reason
        failures = self._unlogged_failures.setdefault(
            culprit, _UnloggedFailures(reason, time.monotonic())
        )
        failures.reason = reason
        failures.num_calls += 1
        failures.num_samples += chunk.num_samples
        if chunk.num_failures > self._resources.request_retries:
            reason = (
                f"{chunk.num_samples} samples failed {chunk.num_failures} times"
                " (rollout.request_retries is"
            )
            reason += (
                f" {self._resources.request_retries}):"
                f" {'; '.join(chunk.failure_by_engine.values())}"
            )
            self._give_up_chunk(chunk, EngineError(reason))
            return
        if chunk.num_driver_losses > _MAX_DRIVER_LOSSES:
            reason = (
                f"{chunk.num_samples} samples were lost with {chunk.num_driver_losses} drivers (set"
                " rollout.num_drivers to 0)"
            )
            self._give_up_chunk(chunk, EngineError(f"{reason}: {chunk.failure_by_engine[culprit]}"))
            return
        self._supervisor.counters["rollout/requests_reissued"] += len(chunk.requests)
        self._waiting_chunks.appendleft(chunk)

    def log_remaining_failures(self) -> None:
        """Log the failed calls that still wait for others, at the end of the work."""
        self._log_failures(is_last=True)

    def _log_failures(self, is_last: bool = False) -> None:
        """Log the calls that failed, one line an engine: hundreds of turns break together when an
        engine dies. Failures of a moment ago wait for others, and so do those of an engine that was
        logged lately, unless this is the last time.
        """
        now = time.monotonic()
        for culprit, failures in list(self._unlogged_failures.items()):
            logged_at = self._failure_logged_at.get(culprit, -math.inf)
            is_due = now - failures.first_at > FAILURE_GATHER_S and now - logged_at > FAILURE_LOG_S
            if not is_last and not is_due:
                continue
            del self._unlogged_failures[culprit]
            self._failure_logged_at[culprit] = now
            logger.warning(
                "%s failed with %d samples of %d calls: %s",
                culprit,
                failures.num_samples,
                failures.num_calls,
                failures.reason.splitlines()[0],
            )

    def _give_up_chunk(self, chunk: RequestChunk, error: EngineError) -> None:
        """Raise the error, or note the chunk with its error where failures are kept."""
        if not self._keeps_failures:
            self.log_remaining_failures()
            raise error
        self.failed_chunks.append((chunk, error))


def _discard_groups(task: asyncio.Task[SampleGroups]) -> None:
    """Remove the route files of a finished call whose samples nobody reads."""
    if not task.cancelled() and task.exception() is None:
        remove_route_files(sample.routes for group in task.result() for sample in group)


def _is_answer_awaited(member: FleetMember | None, engine: InferenceEngine | None) -> bool:
    """Return whether the answer of a call to this engine is still awaited: the member still has
    this engine, and serves, is examined or commits. It is true for calls through a router (None),
    whose connection breaks when the engine behind it is killed; an engine that becomes STALE aborts
    them.
    """
    if member is None:
        return True
    return member.engine is engine and (
        member.state in (MemberState.SERVING, MemberState.CHECKED) or member.is_committing
    )


def get_version_spans(sample: GeneratedSample) -> tuple[VersionSpan, ...]:
    """Return the version spans of the sample; one span over all tokens where the sample has
    none.
    """
    return sample.version_spans or (VersionSpan(sample.policy_version, 0, len(sample.token_ids)),)


def describe_wrong_version(groups: SampleGroups, version: int | None) -> str:
    """Return "" where all samples, made between two syncs, come from the weights of `version`, else
    a text of the wrong versions. None as `version` accepts any.
    """
    versions = {sample.policy_version for group in groups for sample in group}
    if version is None or versions <= {version}:
        return ""
    return f"samples of version {sorted(versions)}, the current is {version}"


def describe_wrong_spans(
    groups: SampleGroups, version_when_sent: int | None, served_versions: ServedVersions
) -> str:
    """Return "" where each token of these samples, generated over weight syncs, comes from a
    version that engines have served since the request was sent, in rising order; else a text of the
    problem. `version_when_sent` is the version that was served when the samples were requested;
    None accepts any.
    """
    current = served_versions.current_version
    if version_when_sent is None or current is None:
        return ""
    for sample in (sample for group in groups for sample in group):
        spans = get_version_spans(sample)
        versions = [span.version for span in spans]
        ends = [0, *(span.end for span in spans)]
        is_whole = all(s.start == end for s, end in zip(spans, ends[:-1], strict=True))
        if not is_whole or ends[-1] != len(sample.token_ids):
            return f"a sample of {len(sample.token_ids)} tokens with the versions of {spans}"
        if not sample.version_spans and sample.token_ids and version_when_sent != current:
            return f"a sample that does not say which tokens came before version {current}"
        if sample.policy_version != versions[0] or versions != sorted(versions):
            return (
                f"a sample of version {sample.policy_version} whose tokens are of"
                f" versions {versions}"
            )
        wrong = [
            version
            for version in versions
            if version not in served_versions.all_versions
            or not version_when_sent <= version <= current
        ]
        if wrong:
            return (
                f"samples of version {wrong}, though it was asked for them at version"
                f" {version_when_sent} and the current one is {current}"
            )
    return ""
