"""Several engines as one: a balancer spreads the work, and what an engine fails to do another does.

A supervisor says which engines serve; see `supervisor`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rlhf_megatron import faults
from rlhf_megatron.data.expert_route_files import remove_route_files
from rlhf_megatron.rollout.drivers.driver_pool import DriverPool
from rlhf_megatron.rollout.engine_interface import (
    MEMORY_PARTS,
    EngineError,
    EngineRequestError,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
    MemoryPart,
    SampleGroups,
)
from rlhf_megatron.rollout.fleet.chunk_generation import (
    ChunkGeneration,
    FleetResources,
    ServedVersions,
)
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog, EngineCallRecord, FairLock
from rlhf_megatron.rollout.fleet.engine_supervisor import (
    VERB_TIMEOUT_S,
    EngineSupervisor,
    FleetMember,
    MemberState,
    SupervisionSettings,
)
from rlhf_megatron.rollout.fleet.generation_session import GenerationSession
from rlhf_megatron.rollout.fleet.request_balancer import (
    LeastOutstandingBalancer,
    OutstandingLoad,
    RequestBalancer,
    RequestChunk,
    find_unknown_runs,
    select_unknown_chunks,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
GroupsCallback = Callable[[int, SampleGroups], None]

COUNTERS = tuple(
    f"rollout/{of}"
    for of in ("engine_failures", "engine_restarts", "driver_restarts", "requests_reissued")
)
_HEALTH_TIMEOUT_S = 5.0
_QUESTION_TIMEOUT_S = 30.0
_WATCH_PURPOSE = "generate"
_LATE_COMMIT_WAIT_S = 5.0  # that engines which commit are waited for when one has done so


class EngineFleet:
    """Several engines that serve the same weights, used as one. One thread at a time may use it,
    and beside that the thread of a session.

    In `generate`, engines that fail are started again where `supervision` allows it, and brought to
    the current weights by `resync_engines`. In a weight sync an engine that fails is left out, and
    mended in the next `generate`.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        request_timeout_s: float,
        request_retries: int,
        *,
        supervision: SupervisionSettings | None = None,
        balancer: RequestBalancer | None = None,
        is_isolated: bool = False,
        check_stop: Callable[[], None] = lambda: None,
        driver_pool: DriverPool | None = None,
    ) -> None:
        """Make a fleet of these clients. `balancer` spreads the work; None:
        `LeastOutstandingBalancer`. It is closed with the fleet.

        `is_isolated`: engines decode each chunk by itself, so the borders of chunks must not depend
        on the groups that are known already.

        `check_stop` is called every moment while samples are awaited: `StopRequest.check`, which
        raises.

        `driver_pool`: the drivers through which this process calls engines; closed with the fleet.
        Raise ValueError without engines.
        """
        if not engines:
            raise ValueError("a fleet needs at least one engine; set rollout.num_engines.")
        self.is_isolated = is_isolated
        self.check_stop = check_stop
        self._call_log = EngineCallLog()
        self._supervisor = EngineSupervisor(
            engines, supervision or SupervisionSettings(), self._call_log
        )
        self._served_versions = ServedVersions()
        self._lock = FairLock()
        self._driver_pool = driver_pool
        self._session: GenerationSession | None = None
        self._balancer = balancer or LeastOutstandingBalancer()
        self._resources = FleetResources(
            self._lock,
            self._supervisor,
            self._balancer,
            self._call_log,
            self._served_versions,
            request_timeout_s,
            request_retries,
        )
        # of the call of `generate` that is under way
        self._current_generation: ChunkGeneration | None = None

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """Return the client of each engine, also of engines that do not serve."""
        return tuple(member.engine for member in self._supervisor.members)

    @property
    def live_engines(self) -> tuple[InferenceEngine, ...]:
        """Return the clients of the engines that weights go to: those that take part in the weight
        sync that is under way and do not commit yet, else those that serve.
        """
        return tuple(member.engine for member in self._live_members)

    @property
    def resync_engines(self) -> Callable[[Sequence[InferenceEngine]], object] | None:
        """Return the function that sends engines the current weights again, verified, and raises
        EngineError; None where it is not set. Set it to `WeightSync.resync_engines`.

        It is called inside `generate` and `GenerationSession.mend_engines`, on their thread:
        nothing else may run on the hosts then.
        """
        return self._supervisor.resync_engines

    @resync_engines.setter
    def resync_engines(
        self, function: Callable[[Sequence[InferenceEngine]], object] | None
    ) -> None:
        self._supervisor.resync_engines = function

    def set_engine_aside(self, engine_name: str, reason: str) -> None:
        """Mark an engine that missed the weights of the current sync as STALE: it serves nothing
        until it has them.
        """
        self._supervisor.mark_stale(self._supervisor.get_member(engine_name), reason)

    def list_recent_calls(self) -> list[EngineCallRecord]:
        """Return the records of the last calls to engines, oldest first, with those that still
        run.
        """
        return self._call_log.list_recent_calls()

    def take_counters(self) -> dict[str, float]:
        """Return the metrics of COUNTERS, counted since the last call, and reset them."""
        with self._lock.hold_lock():
            counters = self._supervisor.counters
            if self._driver_pool is not None:
                counters["rollout/driver_restarts"] = self._driver_pool.take_restart_count()
            taken = {name: float(counters[name]) for name in COUNTERS}
            counters.clear()
            return taken

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_groups: GroupsCallback | None = None,
        known_groups: Mapping[int, list[GeneratedSample]] | None = None,
    ) -> SampleGroups:
        """Generate the samples of each request and return them in the order of the requests; each
        sample exactly once, whatever fails on the way, and each of the current policy version.

        `on_groups(first, groups)` is called with neighbouring groups as they come, once for each
        group. `known_groups`: groups by index that an earlier process got. They are returned, but
        neither generated nor handed to `on_groups`; those of another version are generated again.
        Raise EngineRequestError when a request itself is wrong, EngineError when retries or engines
        run out, and what `check_stop` raises.
        """
        self._learn_served_version()
        known_groups = self._select_current_groups(known_groups or {})
        results: list[list[GeneratedSample] | None] = [
            known_groups.get(index) for index in range(len(requests))
        ]
        num_missing = results.count(None)
        chunks = self._balancer.cut_chunks(
            requests, len(self._supervisor.members), self.is_isolated
        )
        with self._open_generation(
            select_unknown_chunks(chunks, known_groups, self.is_isolated)
        ) as work:
            while not work.is_finished:
                self.check_stop()
                for chunk, groups in self._advance_generation(work):
                    for run in find_unknown_runs(chunk.start, len(groups), known_groups):
                        new = groups[run.start - chunk.start :][: len(run)]
                        results[run.start : run.stop] = new
                        num_missing -= len(run)
                        if on_groups is not None:
                            on_groups(run.start, new)
                    again = (
                        group for i, group in enumerate(groups, chunk.start) if i in known_groups
                    )
                    remove_route_files(sample.routes for group in again for sample in group)
                    if num_missing:
                        faults.reach_fault_point("rollout.mid_generate")
        assert all(group is not None for group in results), "a group was lost"
        return [group for group in results if group is not None]

    def open_session(
        self, keeps_failures: bool = False, keeps_finished_calls: bool = False
    ) -> GenerationSession:
        """Open and return a session, whose generation goes on over weight syncs; one at a time.
        While it is open, a sync must run inside `hold_exclusively`. Ask the engines first how many
        samples they decode at once. `keeps_failures` and `keeps_finished_calls`: see
        `GenerationSession`.
        """
        assert self._session is None, "a session is open"
        self._learn_served_version()
        found, _ = self._supervisor.call_members(
            "max_running",
            lambda engine: engine.get_max_running_samples(),
            self._supervisor.list_members(MemberState.SERVING),
            _QUESTION_TIMEOUT_S,
        )
        for member, count in found.items():
            member.max_running_samples = count

        def clear_session() -> None:
            """Forget the session, when it closes."""
            self._session = None

        self._session = GenerationSession(
            self._resources,
            lambda: (
                self._current_generation.outstanding_load
                if self._current_generation
                else OutstandingLoad()
            ),
            clear_session,
            keeps_failures,
            keeps_finished_calls,
        )
        return self._session

    @contextmanager
    def hold_exclusively(self) -> Iterator[None]:
        """Hold the fleet's lock within the block: for a weight sync beside a session, whose
        `poll_finished` finds nothing meanwhile. No other thread changes the state of the engines or
        sends them anything. Running requests stay on their engines and go on afterwards.

        It waits for other threads, which hold the lock for milliseconds. The same thread may take
        it again. Raise EngineError where a chunk that must be sent again has used up its retries.
        """
        with self._lock.hold_lock():
            if self._session is not None:
                self._session.take_back_chunks()
            yield

    def begin_weight_update(self, version: int, is_full_resync: bool = False) -> None:
        """Open a sync on all engines that answer; `live_engines` are then those that take part.
        There may be none where some will be mended later. Raise EngineError where none takes part
        and none can be mended, or where the engines refused and a restart would not help.
        """
        self._assert_exclusive()
        supervisor = self._supervisor
        supervisor.await_commits(self._served_versions.current_version, VERB_TIMEOUT_S)
        supervisor.start_watching()
        supervisor.advance_states(self._served_versions.current_version)
        candidates = supervisor.list_members(
            MemberState.SERVING, MemberState.CHECKED, MemberState.STALE, MemberState.SYNCING
        )
        candidates += [
            member
            for member in supervisor.list_members(MemberState.DOWN)
            if self._is_answering_again(member)
        ]
        done, failures = self._supervisor.call_members(
            "begin_update",
            lambda engine: engine.begin_weight_update(version, is_full_resync),
            candidates,
        )
        for member in done:
            supervisor.mark_syncing(member)
        for member, error in failures.items():
            supervisor.mark_stale(member, str(error))
        self._require_usable_engine(len(done), failures.values())

    def commit_weight_update(self, version: int, waits_for_all: bool = True) -> None:
        """Commit on all engines that take part, then check that each serves `version`. Afterwards
        `version` is the fleet's current version, also where an engine does not have it. Raise
        EngineError as `begin_weight_update` does.

        `waits_for_all` False: return when some engines serve `version` and a few seconds have
        passed for the others. A late engine gets no work until it serves `version` too; an engine
        that fails is STALE. With a router it always waits for all.
        """
        self._assert_exclusive()
        supervisor = self._supervisor
        members = supervisor.list_members(MemberState.SYNCING)
        futures = supervisor.start_commits(members, version)
        # a router sends to any engine
        waits_for_all = waits_for_all or not isinstance(self._balancer, LeastOutstandingBalancer)
        supervisor.await_commits(version, VERB_TIMEOUT_S, num_required=None if waits_for_all else 1)
        supervisor.await_commits(version, _LATE_COMMIT_WAIT_S)
        late = [member.name for member in members if member.is_committing]
        if late and waits_for_all:
            for name in late:
                self.set_engine_aside(
                    name, f"{name} has not ended commit_update within {VERB_TIMEOUT_S:g} s"
                )
        elif late:
            logger.warning("%s still commit version %d; the others go on", ", ".join(late), version)
        supervisor.stop_watching()
        failures = [
            (future.exception() if future.done() else None) or EngineError(member.reason)
            for member, future in futures.items()
            if not member.is_committing and member.state is not MemberState.SERVING
        ]
        self._require_usable_engine(len(supervisor.list_members(MemberState.SERVING)), failures)
        self._served_versions.set_current(version)

    def abandon_weight_update(self, reason: str) -> None:
        """End the sync that is under way: the engines that take part become STALE, until they get
        the weights of the current version again.
        """
        self._assert_exclusive()
        for member in self._supervisor.list_members(MemberState.SYNCING):
            self._supervisor.mark_stale(member, reason)
        self._supervisor.stop_watching()

    def get_served_version(self) -> int | None:
        """Ask the live engines and return the version that all of them serve; None: never synced or
        STALE. Raise EngineError when they differ, one fails, or none lives.
        """
        if not self.live_engines:
            raise EngineError(self._supervisor.no_engine_message)
        found, failures = self._supervisor.call_members(
            "version", lambda engine: engine.get_served_version(), self._live_members
        )
        if failures:
            raise EngineError("; ".join(map(str, failures.values())))
        if len(set(found.values())) > 1:
            named = {member.name: version for member, version in found.items()}
            raise EngineError(f"engines serve different versions: {named}; sync the weights again.")
        return next(iter(found.values()))

    def get_weight_digests(self) -> dict[str, dict[str, str] | None]:
        """Return what `InferenceEngine.get_weight_digests` returns for each live engine, by engine
        name. An engine that fails is set aside and left out.
        """
        found, failures = self._supervisor.call_members(
            "weight_digests", lambda engine: engine.get_weight_digests(), self._live_members
        )
        for member, error in failures.items():
            self.set_engine_aside(member.name, str(error))
        return {member.name: digests for member, digests in found.items()}

    def release_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Release memory of all running engines, whether they serve or not. Wait first for engines
        that commit or are being started, and kill an engine that fails to release its memory, since
        it would keep it.
        """
        self._assert_exclusive()
        self._supervisor.await_commits(self._served_versions.current_version, VERB_TIMEOUT_S)
        self._supervisor.await_starts(self._served_versions.current_version)
        self._supervisor.call_running_members(
            f"release_memory {' '.join(memory_parts)}",
            lambda engine: engine.release_memory(memory_parts),
        )

    def resume_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Take the memory of these parts back on all running engines after `release_memory`; kill
        an engine that fails.
        """
        self._supervisor.call_running_members(
            f"resume_memory {' '.join(memory_parts)}",
            lambda engine: engine.resume_memory(memory_parts),
        )

    def close(self) -> None:
        """Close the session, the balancer, the clients and the drivers. The servers keep running.
        Safe to call twice.
        """
        if self._session is not None:
            self._session.close()
        for purpose in ("sync", _WATCH_PURPOSE):
            self._supervisor.stop_watching(purpose)
        self._balancer.close()
        for engine in self.engines:
            engine.close()
        if self._driver_pool is not None:
            self._driver_pool.close()

    @property
    def _live_members(self) -> list[FleetMember]:
        """Return the members of `live_engines`."""
        syncing = [
            member
            for member in self._supervisor.list_members(MemberState.SYNCING)
            if not member.is_committing
        ]
        return syncing or self._supervisor.list_members(MemberState.SERVING)

    @contextmanager
    def _open_generation(self, chunks: Sequence[RequestChunk]) -> Iterator[ChunkGeneration]:
        """Yield the generation of these chunks, with the engines watched meanwhile. Abort its calls
        where the block raises.
        """
        supervisor = self._supervisor
        work = self._current_generation = ChunkGeneration(
            self._resources, chunks, has_named_calls=self._session is not None
        )
        try:
            with self._lock.hold_lock():
                supervisor.start_watching(_WATCH_PURPOSE)
            yield work
        except BaseException:
            work.abandon_calls()
            raise
        finally:
            work.log_remaining_failures()
            with self._lock.hold_lock():
                self._current_generation = None
                supervisor.stop_watching(_WATCH_PURPOSE)

    def _advance_generation(
        self, generation: ChunkGeneration
    ) -> list[tuple[RequestChunk, SampleGroups]]:
        """Update the states of the engines, send waiting chunks, wait a moment without the lock,
        and return the chunks that finished, with their samples.
        """
        supervisor = self._supervisor
        version = self._served_versions.current_version
        with self._lock.hold_lock():
            supervisor.advance_states(version)
            generation.take_back_chunks()
            others = OutstandingLoad()
            if self._session is not None:
                self._session.take_back_chunks()
                others = self._session.outstanding_load
            supervisor.mend_stale_members(version)
            generation.dispatch_chunks(version, others)
        generation.wait_for_answers()
        with self._lock.hold_lock():
            generation.take_back_chunks()
            return generation.harvest_answers(version)

    def _assert_exclusive(self) -> None:
        """Assert that the caller holds the lock where a session is open."""
        assert self._session is None or self._lock.is_held_by_caller, (
            "a session is open: do this within `hold_exclusively`"
        )

    def _learn_served_version(self) -> None:
        """Where this fleet has made no sync, ask the serving engines for their version, and take it
        as the current one where all agree: they may have got weights another way.
        """
        if self._served_versions.current_version is None:
            members = self._supervisor.list_members(MemberState.SERVING)
            found, _ = self._supervisor.call_members(
                "version", lambda engine: engine.get_served_version(), members, _HEALTH_TIMEOUT_S
            )
            if len(set(found.values())) == 1:
                (version,) = set(found.values())
                if version is not None:
                    self._served_versions.set_current(version)

    def _select_current_groups(
        self, known_groups: Mapping[int, list[GeneratedSample]]
    ) -> dict[int, list[GeneratedSample]]:
        """Return the known groups whose samples are all of the current version; all groups before
        the first sync.
        """
        version = self._served_versions.current_version
        if version is None:
            return dict(known_groups)
        good = {
            i: group
            for i, group in known_groups.items()
            if all(s.policy_version == version for s in group)
        }
        if len(good) < len(known_groups):
            logger.warning(
                "%d of %d known groups are of another version than %d and are asked for again",
                *(len(known_groups) - len(good), len(known_groups), version),
            )
        return good

    def _is_answering_again(self, member: FleetMember) -> bool:
        """Return whether an engine that was down passes a health check again."""
        try:
            member.engine.check_health(_HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        logger.warning("%s answers again and joins the weight sync", member.name)
        return True

    def _require_usable_engine(
        self, num_successes: int, failures: Collection[BaseException]
    ) -> None:
        """Raise EngineError where a verb of a sync succeeded on no engine and none will come back;
        `failures` are the errors of the others.

        Before the first sync, or where a request itself is refused, a restart would not help unless
        a server has died or is being started again.
        """
        if num_successes:
            return
        supervisor = self._supervisor
        has_died = any(
            supervisor.describe_exit(member.name) is not None for member in supervisor.members
        )
        has_died = has_died or bool(supervisor.list_members(MemberState.STARTING))
        is_refused = self._served_versions.current_version is None or any(
            isinstance(error, EngineRequestError) for error in failures
        )
        if not supervisor.may_recover or (failures and is_refused and not has_died):
            raise EngineError(self._supervisor.no_engine_message)
        logger.warning(
            "no engine takes part in this weight sync; they get the weights before they serve again"
        )
