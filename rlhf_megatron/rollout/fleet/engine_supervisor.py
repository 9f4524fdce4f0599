"""Which engines serve. One that is dead, hung or serves other weights is killed, started again,
brought to the current weights, and only then given work. Health is watched in threads, and servers
start in threads; every state changes in the thread that calls the methods here: the controller's,
one at a time.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    GenerateRequest,
    InferenceEngine,
    SamplingParams,
    compute_stall_limit_s,
)
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog
from rlhf_megatron.rollout.fleet.server_watch import PROCESS_POLL_S, RestartBudget, ServerWatch

logger = logging.getLogger(__name__)
T = TypeVar("T")

# of any verb; the clients have deadlines of their own for each HTTP call in it
VERB_TIMEOUT_S = 3600.0
# at the processes of all engines together, each from a thread of its own
_PROCESS_CHECKS_PER_SECOND = 500
# an engine that is found with other weights more often, without a good answer between, is replaced
_MAX_STALE_IN_A_ROW = 1
_PROBE_REQUEST = GenerateRequest((0,), (0,), SamplingParams(max_new_tokens=1))
_START_TIMEOUT_S = 7200.0  # of a server, which `RestartableServers.restart` limits itself
_EXIT_DELAY_S = 0.5  # a process that ends closes its connections a moment before


class RestartableServers(Protocol):
    """The processes of the engines. Thread-safe. See `server_process.EngineServers`."""

    def describe_exit(self, name: str) -> str | None:
        """Return how the server of this name ended; None while it runs."""

    def kill_server(self, name: str) -> None:
        """Kill the server of this name at once."""

    def restart_server(self, name: str) -> EngineAddress:
        """Start the server of this name again, wait for it, and return its new address."""


@dataclass(frozen=True)
class SupervisionSettings:
    """The means and limits of a supervisor."""

    # None: somebody else's engines, which are neither killed nor started again
    servers: RestartableServers | None = None
    # a client; goes with `servers`
    make_client: Callable[[EngineAddress], InferenceEngine] | None = None
    health_interval_s: float = 10.0
    health_timeout_s: float = 30.0
    max_restarts: int = 0  # over all engines
    num_restarts_before: int = 0  # of them, those that the first start has taken


class MemberState(enum.Enum):
    SERVING = "serves"
    CHECKED = "is asked for its health after it failed"
    SYNCING = "is STALE until a weight sync ends"
    STALE = "has not got the current weights"
    DOWN = "is down"
    STARTING = "is started again"
    LOST = "is lost"


@dataclass(eq=False)
class FleetMember:
    """One engine of the fleet. A restart changes `engine` and keeps the name."""

    name: str
    engine: InferenceEngine
    state: MemberState = MemberState.SERVING
    reason: str = ""  # why it does not serve: what it said last
    # of CHECKED and a commit (its version) and STARTING (its address)
    pending_call: Future[Any] | None = None
    is_suspect: bool = False  # CHECKED, as are all others, since nobody knows which of them failed
    max_running_samples: int | None = None  # samples that it decodes at once; None: not known
    num_stale_in_a_row: int = 0  # times in a row that it was found without the current weights
    server_watch: ServerWatch | None = None

    @property
    def is_committing(self) -> bool:
        """Return whether the engine takes part in a sync and has a commit under way: it has the
        weights but has not confirmed that it serves them.
        """
        return self.state is MemberState.SYNCING and self.pending_call is not None


class EngineSupervisor:
    """Knows the state of each engine of a fleet, and kills, restarts and mends engines. One thread
    at a time calls it, the thread that holds the fleet's lock.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        settings: SupervisionSettings,
        call_log: EngineCallLog,
    ) -> None:
        self.members = tuple(FleetMember(engine.address.name, engine) for engine in engines)
        # gives engines the current weights, verified
        self.resync_engines: Callable[[Sequence[InferenceEngine]], object] | None = None
        self.counters: Counter[str] = Counter()
        self.restart_budget = RestartBudget(settings.max_restarts, settings.num_restarts_before)
        self.counters["rollout/engine_restarts"] = settings.num_restarts_before
        self._settings = settings
        self._call_log = call_log
        self._watch_purposes: set[str] = set()
        self._lock = threading.Lock()  # of `start_watching` and `_illness_by_name`
        self._illness_by_name: dict[str, str] = {}  # name -> what a watch found

    def list_members(self, *states: MemberState) -> list[FleetMember]:
        """Return the members in any of these states, in the order of the fleet."""
        return [member for member in self.members if member.state in states]

    def get_member(self, name: str) -> FleetMember:
        """Return the member of this name. Raise StopIteration where there is none."""
        return next(member for member in self.members if member.name == name)

    @property
    def may_recover(self) -> bool:
        """Return whether some engine that does not serve may serve later without a full sync."""
        return any(self._may_return_to_service(member) for member in self.members)

    @property
    def no_engine_message(self) -> str:
        """Return the message for the case that no engine is left, with the state and reason of
        each.
        """
        words = "; ".join(
            f"{member.name} {member.state.value}: {member.reason}" for member in self.members
        )
        return f"no engine is left of {len(self.members)}: {words}"

    def describe_exit(self, name: str) -> str | None:
        """Return how the server of this name ended; None while it runs, or where the run did not
        start it.
        """
        return (
            None if self._settings.servers is None else self._settings.servers.describe_exit(name)
        )

    def start_watching(self, purpose: str = "sync") -> None:
        """Watch the health of all running engines until `stop_watching` was called for every
        purpose. An engine that is ill is killed at once.
        """
        self._watch_purposes.add(purpose)
        for member in self.list_members(
            MemberState.SERVING, MemberState.CHECKED, MemberState.SYNCING, MemberState.STALE
        ):
            self._watch_member(member)

    def stop_watching(self, purpose: str = "sync") -> None:
        """End the watch for this purpose; stop watching the engines when no purpose is left."""
        self._watch_purposes.discard(purpose)
        if not self._watch_purposes:
            for member in self.members:
                self._stop_member_watch(member)

    def mark_failed(self, member: FleetMember, reason: str) -> None:
        """Take an engine out of service after a failed request, and examine its health and version
        in a thread; `advance_states` puts it back, or marks it STALE or down.
        """
        self._leave_service(member, MemberState.CHECKED, reason)
        member.pending_call = self._call_log.start_in_thread(
            member.name, "check", partial(self._examine_engine, member.name, member.engine)
        )

    def mark_all_suspect(self, reason: str) -> None:
        """Take all serving engines out of service, because a request failed that a router gave to
        one of them, and examine each in a thread: its health, and a token that it draws from the
        current weights.
        """
        for member in self.list_members(MemberState.SERVING):
            member.state = MemberState.CHECKED
            member.reason = reason
            member.is_suspect = True
            examine = partial(self._examine_engine, member.name, member.engine, draws_token=True)
            member.pending_call = self._call_log.start_in_thread(member.name, "check", examine)

    def mark_stale(self, member: FleetMember, reason: str) -> None:
        """Mark an engine as without the current weights, whatever version it reports. An engine
        that was found so twice in a row is marked down and killed.
        """
        member.num_stale_in_a_row += 1
        if member.num_stale_in_a_row > _MAX_STALE_IN_A_ROW:
            self.mark_down(member, reason)
        else:
            self._leave_service(member, MemberState.STALE, reason)

    def mark_down(self, member: FleetMember, reason: str) -> None:
        """Mark an engine as down, because it does not answer or cannot be mended, stop its watch,
        and kill its server process, where the run started it.
        """
        self._leave_service(member, MemberState.DOWN, reason)
        self._stop_member_watch(member)
        with self._lock:
            self._illness_by_name.pop(member.name, None)
        if self._settings.servers is not None:
            self._settings.servers.kill_server(member.name)

    def mark_serving(self, member: FleetMember, is_proven: bool = False) -> None:
        """Put an engine into service. `is_proven` says that it has returned samples of the current
        weights, or committed them, which resets its count of stale findings.
        """
        member.state = MemberState.SERVING
        member.reason = ""
        member.pending_call = None
        member.is_suspect = False
        if is_proven:
            member.num_stale_in_a_row = 0

    def mark_syncing(self, member: FleetMember) -> None:
        """Mark an engine as taking part in a weight sync that is open."""
        member.state = MemberState.SYNCING
        member.reason = "a weight sync is under way"
        member.pending_call = None

    def advance_states(self, version: int | None) -> None:
        """Update the states by what the watches and the pending calls have found, and begin to
        restart engines that are down. Return at once.

        `version` is the current version; None before the first sync, when a restarted engine serves
        at once, without weights.
        """
        for member in self.members:
            with self._lock:
                words = self._illness_by_name.pop(member.name, None)
            if words is not None and member.state in _ALIVE_STATES:
                self.mark_down(member, words)
            if member.pending_call is not None and member.pending_call.done():
                self._conclude_pending_call(member, member.pending_call, version)
            if member.state is MemberState.DOWN:
                self._restart_server(member)

    def start_commits(
        self, members: Sequence[FleetMember], version: int
    ) -> dict[FleetMember, Future[int | None]]:
        """Make these members commit the sync to `version` and then report the version that they
        serve, each in a thread. Return the futures; `advance_states` and `await_commits` act on the
        results.
        """

        def commit_and_get_version(engine: InferenceEngine) -> int | None:
            """Commit the sync on the engine and return the version that it serves afterwards."""
            engine.commit_weight_update(version)
            return engine.get_served_version()

        start = self._call_log.start_in_thread
        futures = {
            member: start(
                member.name, "commit_update", partial(commit_and_get_version, member.engine)
            )
            for member in members
        }
        for member, future in futures.items():
            member.pending_call = future
        return futures

    def await_commits(
        self, version: int | None, timeout_s: float, num_required: int | None = None
    ) -> None:
        """Wait until all commits under way have ended, or until `num_required` engines serve, but
        no longer than `timeout_s`, and update the states of the engines that ended. `version` is
        the version that they should serve then.
        """
        deadline = time.monotonic() + timeout_s
        while committing := [member for member in self.members if member.is_committing]:
            if (
                num_required is not None
                and len(self.list_members(MemberState.SERVING)) >= num_required
            ):
                return
            pending = [
                member.pending_call for member in committing if member.pending_call is not None
            ]
            if not wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED).done:
                return
            for member in committing:
                if member.pending_call is not None and member.pending_call.done():
                    self._conclude_pending_call(member, member.pending_call, version)

    def await_starts(self, version: int | None) -> None:
        """Wait until no server is being started any more, and update the states; their launcher
        limits the time. Begin no further restart.
        """
        for member in self.list_members(MemberState.STARTING):
            if member.pending_call is not None:
                wait([member.pending_call], timeout=_START_TIMEOUT_S)
                if member.pending_call.done():
                    self._conclude_pending_call(member, member.pending_call, version)

    def mend_stale_members(self, version: int | None) -> None:
        """Send the current weights to all STALE engines and put them into service; do nothing
        without `resync_engines` or a version. The hosts send the weights, so they must be free.
        """
        if self.resync_engines is not None and version is not None:
            for member in self.list_members(MemberState.STALE):
                self._resync_member(member, version)

    def call_members(
        self,
        verb_name: str,
        call_engine: Callable[[InferenceEngine], T],
        members: Collection[FleetMember],
        timeout_s: float = VERB_TIMEOUT_S,
    ) -> tuple[dict[FleetMember, T], dict[FleetMember, EngineError]]:
        """Call `call_engine` on the engines of these members, each in a thread, and wait for all.
        Return the results of those that succeeded and the errors of those that failed or took
        longer than `timeout_s`, by member. Any other error than EngineError is raised.
        """
        futures = {
            member: self._call_log.start_in_thread(
                member.name, verb_name, partial(call_engine, member.engine)
            )
            for member in members
        }
        deadline = time.monotonic() + timeout_s
        results: dict[FleetMember, T] = {}
        failures: dict[FleetMember, EngineError] = {}
        for member, future in futures.items():
            try:
                results[member] = future.result(max(0.0, deadline - time.monotonic()))
            except EngineError as error:
                failures[member] = error
            except TimeoutError:
                failures[member] = EngineError(
                    f"{member.name} has not ended {verb_name} within {timeout_s:g} s"
                )
        return results, failures

    def call_running_members(
        self, verb_name: str, call_engine: Callable[[InferenceEngine], object]
    ) -> None:
        """Call `call_engine` on all running engines, whether they serve or not, and wait for all.
        An engine that fails is marked down and killed.
        """
        _, failures = self.call_members(
            verb_name,
            call_engine,
            self.list_members(
                MemberState.SERVING, MemberState.CHECKED, MemberState.STALE, MemberState.SYNCING
            ),
        )
        for member, error in failures.items():
            self.mark_down(member, str(error))

    def _may_return_to_service(self, member: FleetMember) -> bool:
        """Return whether the member may serve later without a full sync."""
        if member.state in (MemberState.CHECKED, MemberState.STARTING) or member.is_committing:
            return True
        if member.state is MemberState.STALE:
            return self.resync_engines is not None
        return member.state is MemberState.DOWN and self._settings.servers is not None

    def _leave_service(self, member: FleetMember, state: MemberState, reason: str) -> None:
        """Put a member into a state in which it does not serve, with the reason logged, and drop
        its pending call. Count a failure where it served or took part in a sync.
        """
        if member.state in (MemberState.SERVING, MemberState.SYNCING) or member.is_suspect:
            self.counters["rollout/engine_failures"] += 1
        logger.warning("%s %s: %s", member.name, state.value, reason)
        member.state = state
        member.reason = reason
        member.pending_call = None
        member.is_suspect = False

    def _examine_engine(
        self, name: str, engine: InferenceEngine, draws_token: bool = False
    ) -> int | None:
        """Check the engine's health and return the version that it serves; with `draws_token` the
        version of a token that it generates. Raise EngineError where it fails, with the exit of its
        process where that ended.
        """
        try:
            engine.check_health(self._settings.health_timeout_s)
            if draws_token:
                # behind the step that is under way, which may be long
                limit_s = compute_stall_limit_s(self._settings.health_timeout_s, 0.0)
                return engine.generate([_PROBE_REQUEST], limit_s)[0][0].policy_version
            return engine.get_served_version()
        except EngineError:
            time.sleep(_EXIT_DELAY_S)
            words = self.describe_exit(name)
            if words is not None:
                raise EngineError(words) from None
            raise

    def _conclude_pending_call(
        self, member: FleetMember, pending_call: Future[Any], version: int | None
    ) -> None:
        """Change the state of a member by the result of its call that ended: a commit, an
        examination, or a restart, which also gives it a new client.
        """
        member.pending_call = None
        try:
            found = pending_call.result(timeout=0)
        except (EngineError, OSError) as error:
            if member.state is MemberState.SYNCING:
                self.mark_stale(member, str(error))
                return
            words = (
                str(error)
                if member.state is MemberState.STARTING
                else f"{member.reason} (and then: {error})"
            )
            self.mark_down(member, words)
            return
        if member.state is MemberState.SYNCING:
            if found == version:
                self.mark_serving(member, is_proven=True)
            else:
                self.mark_stale(
                    member, f"{member.name} serves version {found} after the sync to {version}"
                )
            return
        if member.state is MemberState.CHECKED:
            if version is None or found == version:
                self.mark_serving(member)
            else:
                self.mark_stale(
                    member,
                    f"{member.reason} (it serves version {found}, the current one is {version})",
                )
            return
        assert self._settings.make_client is not None, "servers go with connect"
        member.engine.close()
        member.engine = self._settings.make_client(found)
        logger.warning("%s runs again at %s", member.name, member.engine.address.url)
        if version is None:
            self.mark_serving(member)
        else:
            member.state = MemberState.STALE
            member.reason = "it was started again and has no weights yet"
        if self._watch_purposes:
            self._watch_member(member)

    def _restart_server(self, member: FleetMember) -> None:
        """Begin to restart the server of an engine that is down, in a thread; mark it LOST where
        rollout.max_engine_restarts is used up. Do nothing for servers that the run did not start.
        """
        servers = self._settings.servers
        if servers is None:
            return
        limit = self._settings.max_restarts
        if not self.restart_budget.take_restart():
            member.state = MemberState.LOST
            num_left = len(self.members) - len(self.list_members(MemberState.LOST))
            logger.warning(
                "%s is lost, rollout.max_engine_restarts (%d) is used up; engines left: %d of %d",
                *(member.name, limit, num_left, len(self.members)),
            )
            return
        self.counters["rollout/engine_restarts"] += 1
        number = self.restart_budget.num_restarts
        logger.warning("%s is started again (%d of %d)", member.name, number, limit)
        member.state = MemberState.STARTING
        member.pending_call = self._call_log.start_in_thread(
            member.name, "restart", lambda: servers.restart_server(member.name)
        )

    def _resync_member(self, member: FleetMember, version: int) -> None:
        """Abort the engine's calls, send it the current weights again, verified, and put it into
        service where it reports `version`. Mark it down where that fails.
        """
        assert self.resync_engines is not None
        try:
            with self._call_log.record_call(member.name, "abort"):
                member.engine.abort_calls()  # requests that went to other engines
            with self._call_log.record_call(member.name, f"resync to version {version}"):
                self.resync_engines([member.engine])
            found = member.engine.get_served_version()
            if found != version:
                raise EngineError(f"it serves version {found} after a sync to version {version}")
        except EngineError as error:
            self.mark_down(member, f"{member.reason}; it could not be brought current: {error}")
            return
        logger.warning("%s has the weights of version %d and serves again", member.name, version)
        self.mark_serving(member)

    def _watch_member(self, member: FleetMember) -> None:
        """Start the health watch of a member that has none."""
        if member.server_watch is not None:
            return
        limits = self._settings
        member.server_watch = ServerWatch(
            member.name,
            member.engine.check_health,
            lambda: self.describe_exit(member.name),
            lambda watch, words: self._kill_ill_server(member, watch, words),
            limits.health_interval_s,
            limits.health_timeout_s,
            max(PROCESS_POLL_S, len(self.members) / _PROCESS_CHECKS_PER_SECOND),
        )

    def _stop_member_watch(self, member: FleetMember) -> None:
        """Stop the health watch of a member, where it has one."""
        with self._lock:
            if member.server_watch is not None:
                member.server_watch.stop_watching()
                member.server_watch = None

    def _kill_ill_server(self, member: FleetMember, watch: ServerWatch, reason: str) -> None:
        """Note the illness for `advance_states`, and kill the server process at once, in the
        watch's thread, so that no call to it goes on waiting. Ignore a watch that was stopped.
        """
        with self._lock:
            if member.server_watch is not watch:
                return
            self._illness_by_name[member.name] = reason
            if self._settings.servers is not None:
                self._settings.servers.kill_server(member.name)


_ALIVE_STATES = (MemberState.SERVING, MemberState.CHECKED, MemberState.SYNCING, MemberState.STALE)
