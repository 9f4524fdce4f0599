"""Several engines as one: a balancer spreads the work, and what an engine fails to do another does.

A supervisor says which engines serve; see `supervisor`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rlhf_megatron import faults
from rlhf_megatron.data.routes import remove_routes
from rlhf_megatron.rollout.drivers.pool import Drivers
from rlhf_megatron.rollout.engine import (
    MEMORY_PARTS,
    Engine,
    EngineError,
    EngineRequestError,
    GeneratedSample,
    GenerateRequest,
    Groups,
    MemoryPart,
)
from rlhf_megatron.rollout.fleet.balancer import (
    Balancer,
    Chunk,
    LeastOutstanding,
    Load,
    unknown_runs,
    without_known,
)
from rlhf_megatron.rollout.fleet.calls import EngineCall, EngineCalls, FairLock
from rlhf_megatron.rollout.fleet.session import Session
from rlhf_megatron.rollout.fleet.supervisor import VERB_S, Member, State, Supervision, Supervisor
from rlhf_megatron.rollout.fleet.work import Generation, Means, Served

logger = logging.getLogger(__name__)
T = TypeVar("T")
OnGroups = Callable[[int, Groups], None]

COUNTERS = tuple(
    f"rollout/{of}" for of in ("engine_failures", "engine_restarts", "driver_restarts", "requests_reissued")
)
_HEALTH_S = 5.0
_QUESTION_S = 30.0
_PURPOSE = "generate"
_LATE_S = 5.0  # that engines which commit are waited for when one has done so


class EngineFleet:
    """Engines that serve the same weights. One caller at a time, and beside it the one of a session.

    In `generate`, engines that fail are started again where `supervision` allows it, and brought to the current weights
    by `resync`. In a weight sync an engine that fails is left out; it is mended in the next `generate`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        request_timeout_s: float,
        request_retries: int,
        *,
        supervision: Supervision | None = None,
        balancer: Balancer | None = None,
        is_closed: bool = False,
        should_stop: Callable[[], None] = lambda: None,
        drivers: Drivers | None = None,
    ) -> None:
        """`balancer`: who spreads the work; None: `LeastOutstanding`. It is closed with the fleet.

        `is_closed`: engines decode each piece of work by itself, so the cuts must not depend on what is known.

        `should_stop` is called every moment while samples are awaited: `StopRequest.check`, which raises.

        `drivers`: through which this process asks engines; closed with the fleet.
        """
        if not engines:
            raise ValueError("a fleet needs at least one engine; set rollout.num_engines.")
        self.is_closed = is_closed
        self.should_stop = should_stop
        self._calls = EngineCalls()
        self._supervisor = Supervisor(engines, supervision or Supervision(), self._calls)
        self._served = Served()
        self._lock = FairLock()
        self._drivers = drivers
        self._session: Session | None = None
        self._balancer = balancer or LeastOutstanding()
        parts = (self._lock, self._supervisor, self._balancer, self._calls, self._served)
        self._means = Means(*parts, request_timeout_s, request_retries)
        self._work: Generation | None = None  # of the call of `generate` that is under way

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(member.engine for member in self._supervisor.members)

    @property
    def live(self) -> tuple[Engine, ...]:
        """Engines that serve, or take part in the weight sync that is under way: the ones that weights go to."""
        return tuple(member.engine for member in self._live)

    @property
    def resync(self) -> Callable[[Sequence[Engine]], object] | None:
        """Gives engines the current weights again, verified; raises EngineError. Set to `WeightSync.resync`.

        Called inside `generate` and `Session.mend`, on their thread: nothing else may run on the hosts then.
        """
        return self._supervisor.resync

    @resync.setter
    def resync(self, function: Callable[[Sequence[Engine]], object] | None) -> None:
        self._supervisor.resync = function

    def set_aside(self, name: str, reason: str) -> None:
        """Take an engine out that missed the weights of the current sync: it serves nothing until it has them."""
        self._supervisor.stale(self._supervisor.of_name(name), reason)

    def calls(self) -> list[EngineCall]:
        """The last calls to engines, oldest first; those that still run too."""
        return self._calls.last()

    def take_counters(self) -> dict[str, float]:
        """Metrics since the last time."""
        with self._lock.taken():
            counters = self._supervisor.counters
            if self._drivers is not None:
                counters["rollout/driver_restarts"] = self._drivers.take_restarts()
            taken = {name: float(counters[name]) for name in COUNTERS}
            counters.clear()
            return taken

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_groups: OnGroups | None = None,
        known: Mapping[int, list[GeneratedSample]] | None = None,
    ) -> Groups:
        """Per request its samples, in order; each sample exactly once, whatever failed on the way, and each of the
        current policy version.

        `on_groups(first, groups)` is called with neighbouring groups as they come, once for each group. `known`: groups
        by index that an earlier process got; they are not asked for, nor handed to `on_groups`.
        Raises EngineRequestError when a request itself is wrong, EngineError when retries or engines run out, and what
        `should_stop` raises.
        """
        self._learn_version()
        known = self._current(known or {})
        results: list[list[GeneratedSample] | None] = [known.get(index) for index in range(len(requests))]
        num_missing = results.count(None)
        chunks = self._balancer.cut(requests, len(self._supervisor.members), self.is_closed)
        with self._working(without_known(chunks, known, self.is_closed)) as work:
            while not work.is_finished:
                self.should_stop()
                for chunk, groups in self._advance(work):
                    for run in unknown_runs(chunk.start, len(groups), known):
                        new = groups[run.start - chunk.start :][: len(run)]
                        results[run.start : run.stop] = new
                        num_missing -= len(run)
                        if on_groups is not None:
                            on_groups(run.start, new)
                    again = (group for i, group in enumerate(groups, chunk.start) if i in known)
                    remove_routes(sample.routes for group in again for sample in group)
                    if num_missing:
                        faults.reach("rollout.mid_generate")
        assert all(group is not None for group in results), "a group was lost"
        return [group for group in results if group is not None]

    def open_session(self, keeps_failures: bool = False) -> Session:
        """Opens generation that goes on over weight syncs. One at a time. From now on a sync is made
        with `exclusive`. Asks the engines how much they decode at once. `keeps_failures`: see `Session`."""
        assert self._session is None, "a session is open"
        self._learn_version()
        found, _ = self._supervisor.each(
            "max_running", lambda engine: engine.max_running(), self._supervisor.of(State.SERVING), _QUESTION_S
        )
        for member, count in found.items():
            member.max_running = count

        def forget() -> None:
            self._session = None

        self._session = Session(self._means, lambda: self._work.load if self._work else Load(), forget, keeps_failures)
        return self._session

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, nobody else changes what is known of the engines, nor sends them anything: for a weight sync beside a
        session, whose `poll` finds nothing meanwhile. Requests that run stay where they are, and go on afterwards.

        Waits for the slices of other threads, which last milliseconds. The same thread may take it again. Raises
        EngineError where what must be sent again has used up its retries.
        """
        with self._lock.taken():
            if self._session is not None:
                self._session.take_back()
            yield

    def begin_update(self, version: int, full_resync: bool = False) -> None:
        """Opens a sync on all engines that answer; `live` are then those that take part. It may be none where some will
        be mended later. Raises EngineError where nothing is left to mend, or nothing but a refusal was heard."""
        self._assert_mine()
        supervisor = self._supervisor
        supervisor.await_commits(self._served.current, VERB_S)
        supervisor.watch()
        supervisor.advance(self._served.current)
        candidates = supervisor.of(State.SERVING, State.CHECKED, State.STALE, State.SYNCING)
        candidates += [member for member in supervisor.of(State.DOWN) if self._is_healthy(member)]
        done, failures = self._supervisor.each(
            "begin_update", lambda engine: engine.begin_update(version, full_resync), candidates
        )
        for member in done:
            supervisor.joins(member)
        for member, error in failures.items():
            supervisor.stale(member, str(error))
        self._require_future(len(done), failures.values())

    def commit_update(self, version: int, is_whole: bool = True) -> None:
        """Commit on all engines that take part, then ask each whether it serves `version`. From then on that is the
        current version, also where an engine does not have it. Raises EngineError as `begin_update` does.

        `is_whole` False: work goes on with engines that serve it, where others take longer. Such a one gets none until
        it says that it serves `version` too; one that fails is STALE.
        """
        self._assert_mine()
        supervisor = self._supervisor
        members = supervisor.of(State.SYNCING)
        futures = supervisor.commits(members, version)
        is_whole = is_whole or not isinstance(self._balancer, LeastOutstanding)  # a router sends to any engine
        supervisor.await_commits(version, VERB_S, num_wanted=None if is_whole else 1)
        supervisor.await_commits(version, _LATE_S)
        late = [member.name for member in members if member.is_committing]
        if late and is_whole:
            for name in late:
                self.set_aside(name, f"{name} has not ended commit_update within {VERB_S:g} s")
        elif late:
            logger.warning("%s still commit version %d; the others go on", ", ".join(late), version)
        supervisor.unwatch()
        failures = [
            (future.exception() if future.done() else None) or EngineError(member.reason)
            for member, future in futures.items()
            if not member.is_committing and member.state is not State.SERVING
        ]
        self._require_future(len(supervisor.of(State.SERVING)), failures)
        self._served.now(version)

    def abandon_update(self, reason: str) -> None:
        """Ends the sync that is under way: engines that take part are STALE, until they have the weights of before."""
        self._assert_mine()
        for member in self._supervisor.of(State.SYNCING):
            self._supervisor.stale(member, reason)
        self._supervisor.unwatch()

    def version(self) -> int | None:
        """The version that all engines serve; None: never synced or STALE. Raises EngineError when they differ."""
        if not self.live:
            raise EngineError(self._supervisor.nobody)
        found, failures = self._supervisor.each("version", lambda engine: engine.version(), self._live)
        if failures:
            raise EngineError("; ".join(map(str, failures.values())))
        if len(set(found.values())) > 1:
            named = {member.name: version for member, version in found.items()}
            raise EngineError(f"engines serve different versions: {named}; sync the weights again.")
        return next(iter(found.values()))

    def weight_digests(self) -> dict[str, dict[str, str] | None]:
        """Per engine name what `Engine.weight_digests` returns. An engine that fails is set aside."""
        found, failures = self._supervisor.each("weight_digests", lambda engine: engine.weight_digests(), self._live)
        for member, error in failures.items():
            self.set_aside(member.name, str(error))
        return {member.name: digests for member, digests in found.items()}

    def release_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Release memory of all running engines, whether they serve or not. It waits for those that are being
        started, and kills one that does not release its memory, since that would keep it.
        """
        self._assert_mine()
        self._supervisor.await_commits(self._served.current, VERB_S)
        self._supervisor.await_starts(self._served.current)
        self._supervisor.each_running(f"release_memory {' '.join(parts)}", lambda engine: engine.release_memory(parts))

    def resume_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Undoes `release_memory`."""
        self._supervisor.each_running(f"resume_memory {' '.join(parts)}", lambda engine: engine.resume_memory(parts))

    def close(self) -> None:
        """Drop all connections. Safe to call twice."""
        if self._session is not None:
            self._session.close()
        for purpose in ("sync", _PURPOSE):
            self._supervisor.unwatch(purpose)
        self._balancer.close()
        for engine in self.engines:
            engine.close()
        if self._drivers is not None:
            self._drivers.close()

    @property
    def _live(self) -> list[Member]:
        syncing = [member for member in self._supervisor.of(State.SYNCING) if not member.is_committing]
        return syncing or self._supervisor.of(State.SERVING)

    @contextmanager
    def _working(self, todo: Sequence[Chunk]) -> Iterator[Generation]:
        supervisor = self._supervisor
        work = self._work = Generation(self._means, todo, is_named=self._session is not None)
        try:
            with self._lock.taken():
                supervisor.watch(_PURPOSE)
            yield work
        except BaseException:
            work.abandon()
            raise
        finally:
            with self._lock.taken():
                self._work = None
                supervisor.unwatch(_PURPOSE)

    def _advance(self, work: Generation) -> list[tuple[Chunk, Groups]]:
        """Send what can be sent, wait a moment without the lock, and take what has come."""
        supervisor, version = self._supervisor, self._served.current
        with self._lock.taken():
            supervisor.advance(version)
            work.take_back()
            others = Load()
            if self._session is not None:
                self._session.take_back()
                others = self._session.load
            supervisor.mend(version)
            work.dispatch(version, others)
        work.wait()
        with self._lock.taken():
            work.take_back()
            return work.harvest(version)

    def _assert_mine(self) -> None:
        assert self._session is None or self._lock.is_mine, "a session is open: do this within `exclusive`"

    def _learn_version(self) -> None:
        """Ask the engines for their version where this fleet has made no sync: they may have got weights another
        way.
        """
        if self._served.current is None:
            members = self._supervisor.of(State.SERVING)
            found, _ = self._supervisor.each("version", lambda engine: engine.version(), members, _HEALTH_S)
            if len(set(found.values())) == 1:
                (version,) = set(found.values())
                if version is not None:
                    self._served.now(version)

    def _current(self, known: Mapping[int, list[GeneratedSample]]) -> dict[int, list[GeneratedSample]]:
        version = self._served.current
        if version is None:
            return dict(known)
        good = {i: group for i, group in known.items() if all(s.policy_version == version for s in group)}
        if len(good) < len(known):
            logger.warning(
                "%d of %d known groups are of another version than %d and are asked for again",
                *(len(known) - len(good), len(known), version),
            )
        return good

    def _is_healthy(self, member: Member) -> bool:
        try:
            member.engine.health(_HEALTH_S)
        except EngineError:
            return False
        logger.warning("%s answers again and joins the weight sync", member.name)
        return True

    def _require_future(self, num_good: int, failures: Collection[BaseException]) -> None:
        """Check, after a verb of a sync, that some engine is left or will come back. Raises EngineError.

        Before the first sync, or where a request itself is refused, a restart would not help unless a server has died
        or is being started again.
        """
        if num_good:
            return
        supervisor = self._supervisor
        has_died = any(supervisor.ending(member.name) is not None for member in supervisor.members)
        has_died = has_died or bool(supervisor.of(State.STARTING))
        is_refused = self._served.current is None or any(isinstance(error, EngineRequestError) for error in failures)
        if not supervisor.is_hopeful or (failures and is_refused and not has_died):
            raise EngineError(self._supervisor.nobody)
        logger.warning("no engine takes part in this weight sync; they get the weights before they serve again")
