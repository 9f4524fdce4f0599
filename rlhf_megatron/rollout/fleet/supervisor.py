"""Which engines serve. One that is dead, hung or serves other weights is killed, started again, brought to the current
weights, and only then given work. Health is watched in threads, and servers start in threads; every state changes in
the thread that calls the methods here: the controller's, one at a time."""

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

from rlhf_megatron.rollout.engine import Engine, EngineAddress, EngineError, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.calls import EngineCalls
from rlhf_megatron.rollout.fleet.watch import POLL_S, ServerWatch

logger = logging.getLogger(__name__)
T = TypeVar("T")

VERB_S = 3600.0  # of any verb; the clients have deadlines of their own for each HTTP call in it
_LOOKS_A_SECOND = 500  # at the processes of all engines together, each from a thread of its own
_STALE_IN_A_ROW = 1  # an engine that is found with other weights more often, without a good answer between, is replaced
_TOKEN = GenerateRequest((0,), (0,), SamplingParams(max_new_tokens=1))
_START_S = 7200.0  # of a server, which `Servers.restart` limits itself
_ENDING_S = 0.5  # a process that ends closes its connections a moment before


class Servers(Protocol):
    """The processes of the engines. Thread-safe. See `process.EngineServers`."""

    def ending(self, name: str) -> str | None: ...
    def kill(self, name: str) -> None: ...
    def restart(self, name: str) -> EngineAddress: ...


@dataclass(frozen=True)
class Supervision:
    """The means and limits of a supervisor."""

    servers: Servers | None = None  # None: somebody else's engines, which are neither killed nor started again
    connect: Callable[[EngineAddress], Engine] | None = None  # a client; goes with `servers`
    health_interval_s: float = 10.0
    health_timeout_s: float = 30.0
    max_restarts: int = 0  # over all engines


class State(enum.Enum):
    SERVING = "serves"
    CHECKED = "is asked for its health after it failed"
    SYNCING = "is STALE until a weight sync ends"
    STALE = "has not got the current weights"
    DOWN = "is down"
    STARTING = "is started again"
    LOST = "is lost"


@dataclass(eq=False)
class Member:
    """One engine of the fleet. A restart changes `engine` and keeps the name."""

    name: str
    engine: Engine
    state: State = State.SERVING
    reason: str = ""  # why it does not serve: what it said last
    pending: Future[Any] | None = None  # of CHECKED and a commit (its version) and STARTING (its address)
    is_suspect: bool = False  # CHECKED, as are all others, since nobody knows which of them failed
    max_running: int | None = None  # samples that it decodes at once; None: not known
    num_stale: int = 0  # times in a row that it was found without the current weights
    watch: ServerWatch | None = None

    @property
    def is_committing(self) -> bool:
        """It has the weights of a sync that is over for others, and has not said that it serves them."""
        return self.state is State.SYNCING and self.pending is not None


class Supervisor:
    """One thread at a time calls it, the one that has the fleet's lock."""

    def __init__(self, engines: Sequence[Engine], supervision: Supervision, calls: EngineCalls) -> None:
        self.members = tuple(Member(engine.address.name, engine) for engine in engines)
        self.resync: Callable[[Sequence[Engine]], object] | None = None  # gives engines the current weights, verified
        self.counters: Counter[str] = Counter()
        self.num_restarts = 0
        self._supervision = supervision
        self._calls = calls
        self._watched_for: set[str] = set()
        self._lock = threading.Lock()  # of `watch` and `_ill`
        self._ill: dict[str, str] = {}  # name -> what a watch found

    def of(self, *states: State) -> list[Member]:
        return [member for member in self.members if member.state in states]

    def of_name(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    @property
    def is_hopeful(self) -> bool:
        """An engine that does not serve may do so later without a full sync."""
        return any(self._may_return(member) for member in self.members)

    @property
    def nobody(self) -> str:
        """The message when no engine is left."""
        words = "; ".join(f"{member.name} {member.state.value}: {member.reason}" for member in self.members)
        return f"no engine is left of {len(self.members)}: {words}"

    def ending(self, name: str) -> str | None:
        """How the server of that name ended; None while it runs, or where that is not known."""
        return None if self._supervision.servers is None else self._supervision.servers.ending(name)

    def watch(self, purpose: str = "sync") -> None:
        """Look after all engines until `unwatch`, for this and every other purpose."""
        self._watched_for.add(purpose)
        for member in self.of(State.SERVING, State.CHECKED, State.SYNCING, State.STALE):
            self._watch(member)

    def unwatch(self, purpose: str = "sync") -> None:
        self._watched_for.discard(purpose)
        if not self._watched_for:
            for member in self.members:
                self._stop_watch(member)

    def failed(self, member: Member, words: str) -> None:
        """A request to it failed: it gets no further one until it has answered for its health and its weights."""
        self._leave(member, State.CHECKED, words)
        member.pending = self._calls.start(member.name, "check", partial(self._examine, member.name, member.engine))

    def suspect(self, words: str) -> None:
        """A request failed that a router gave to one of those that serve: none gets a further one until it has answered
        for its health and has drawn a token from the current weights."""
        for member in self.of(State.SERVING):
            member.state, member.reason, member.is_suspect = State.CHECKED, words, True
            examine = partial(self._examine, member.name, member.engine, draws=True)
            member.pending = self._calls.start(member.name, "check", examine)

    def stale(self, member: Member, words: str) -> None:
        """Mark an engine as without the current weights, whatever it says itself."""
        member.num_stale += 1
        if member.num_stale > _STALE_IN_A_ROW:
            self.down(member, words)
        else:
            self._leave(member, State.STALE, words)

    def down(self, member: Member, words: str) -> None:
        """Kill the process of an engine that does not answer or cannot be mended."""
        self._leave(member, State.DOWN, words)
        self._stop_watch(member)
        with self._lock:
            self._ill.pop(member.name, None)
        if self._supervision.servers is not None:
            self._supervision.servers.kill(member.name)

    def serves(self, member: Member, is_proven: bool = False) -> None:
        """`is_proven`: it has returned samples of the current weights, or committed them."""
        member.state, member.reason, member.pending, member.is_suspect = State.SERVING, "", None, False
        if is_proven:
            member.num_stale = 0

    def joins(self, member: Member) -> None:
        """Mark an engine as having opened a weight sync."""
        member.state, member.reason, member.pending = State.SYNCING, "a weight sync is under way", None

    def advance(self, version: int | None) -> None:
        """Take in what threads have found, and start servers again.

        `version`: the current one; None before the first sync, when an engine that was started again just waits for it.
        """
        for member in self.members:
            with self._lock:
                words = self._ill.pop(member.name, None)
            if words is not None and member.state in _ALIVE:
                self.down(member, words)
            if member.pending is not None and member.pending.done():
                self._conclude(member, member.pending, version)
            if member.state is State.DOWN:
                self._restart(member)

    def commits(self, members: Sequence[Member], version: int) -> dict[Member, Future[int | None]]:
        """Have these commit a sync and say which version they serve, each in a thread, which `advance` hears of."""

        def commit(engine: Engine) -> int | None:
            engine.commit_update(version)
            return engine.version()

        start = self._calls.start
        futures = {member: start(member.name, "commit_update", partial(commit, member.engine)) for member in members}
        for member, future in futures.items():
            member.pending = future
        return futures

    def await_commits(self, version: int | None, deadline_s: float, num_wanted: int | None = None) -> None:
        """Wait until so many of those that commit do serve, None: until all are done."""
        deadline = time.monotonic() + deadline_s
        while committing := [member for member in self.members if member.is_committing]:
            if num_wanted is not None and len(self.of(State.SERVING)) >= num_wanted:
                return
            pending = [member.pending for member in committing if member.pending is not None]
            if not wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED).done:
                return
            for member in committing:
                if member.pending is not None and member.pending.done():
                    self._conclude(member, member.pending, version)

    def await_starts(self, version: int | None) -> None:
        """Waits until no server is being started any more; their launcher has a deadline for that. Starts none anew."""
        for member in self.of(State.STARTING):
            if member.pending is not None:
                wait([member.pending], timeout=_START_S)
                if member.pending.done():
                    self._conclude(member, member.pending, version)

    def mend(self, version: int | None) -> None:
        """Bring engines to the current version. The hosts send weights for it, so they must be free."""
        if self.resync is not None and version is not None:
            for member in self.of(State.STALE):
                self._bring_current(member, version)

    def each(
        self, what: str, verb: Callable[[Engine], T], members: Collection[Member], deadline_s: float = VERB_S
    ) -> tuple[dict[Member, T], dict[Member, EngineError]]:
        """Call these engines at once: what they returned, and what those that failed said."""
        futures = {member: self._calls.start(member.name, what, partial(verb, member.engine)) for member in members}
        deadline = time.monotonic() + deadline_s
        results: dict[Member, T] = {}
        failures: dict[Member, EngineError] = {}
        for member, future in futures.items():
            try:
                results[member] = future.result(max(0.0, deadline - time.monotonic()))
            except EngineError as error:
                failures[member] = error
            except TimeoutError:
                failures[member] = EngineError(f"{member.name} has not ended {what} within {deadline_s:g} s")
        return results, failures

    def each_running(self, what: str, verb: Callable[[Engine], object]) -> None:
        """Call all engines that run, whether they serve or not. Those that fail are down afterwards."""
        _, failures = self.each(what, verb, self.of(State.SERVING, State.CHECKED, State.STALE, State.SYNCING))
        for member, error in failures.items():
            self.down(member, str(error))

    def _may_return(self, member: Member) -> bool:
        if member.state in (State.CHECKED, State.STARTING) or member.is_committing:
            return True
        if member.state is State.STALE:
            return self.resync is not None
        return member.state is State.DOWN and self._supervision.servers is not None

    def _leave(self, member: Member, state: State, words: str) -> None:
        if member.state in (State.SERVING, State.SYNCING) or member.is_suspect:
            self.counters["rollout/engine_failures"] += 1
        logger.warning("%s %s: %s", member.name, state.value, words)
        member.state, member.reason, member.pending, member.is_suspect = state, words, None, False

    def _examine(self, name: str, engine: Engine, draws: bool = False) -> int | None:
        """Return an engine's version; with `draws`, the one that a token says it comes from. Raises EngineError
        where it is not well.
        """
        try:
            engine.health(self._supervision.health_timeout_s)
            if draws:
                return engine.generate([_TOKEN], self._supervision.health_timeout_s)[0][0].policy_version
            return engine.version()
        except EngineError:
            time.sleep(_ENDING_S)
            words = self.ending(name)
            if words is not None:
                raise EngineError(words) from None
            raise

    def _conclude(self, member: Member, pending: Future[Any], version: int | None) -> None:
        member.pending = None
        try:
            found = pending.result(timeout=0)
        except (EngineError, OSError) as error:
            if member.state is State.SYNCING:
                self.stale(member, str(error))
                return
            words = str(error) if member.state is State.STARTING else f"{member.reason} (and then: {error})"
            self.down(member, words)
            return
        if member.state is State.SYNCING:
            if found == version:
                self.serves(member, is_proven=True)
            else:
                self.stale(member, f"{member.name} serves version {found} after the sync to {version}")
            return
        if member.state is State.CHECKED:
            if version is None or found == version:
                self.serves(member)
            else:
                self.stale(member, f"{member.reason} (it serves version {found}, the current one is {version})")
            return
        assert self._supervision.connect is not None, "servers go with connect"
        member.engine.close()
        member.engine = self._supervision.connect(found)
        logger.warning("%s runs again at %s", member.name, member.engine.address.url)
        if version is None:
            self.serves(member)
        else:
            member.state, member.reason = State.STALE, "it was started again and has no weights yet"
        if self._watched_for:
            self._watch(member)

    def _restart(self, member: Member) -> None:
        servers = self._supervision.servers
        if servers is None:
            return
        limit = self._supervision.max_restarts
        if self.num_restarts >= limit:
            member.state = State.LOST
            num_left = len(self.members) - len(self.of(State.LOST))
            logger.warning(
                "%s is lost, rollout.max_engine_restarts (%d) is used up; engines left: %d of %d",
                *(member.name, limit, num_left, len(self.members)),
            )
            return
        self.num_restarts += 1
        self.counters["rollout/engine_restarts"] += 1
        logger.warning("%s is started again (%d of %d)", member.name, self.num_restarts, limit)
        member.state = State.STARTING
        member.pending = self._calls.start(member.name, "restart", lambda: servers.restart(member.name))

    def _bring_current(self, member: Member, version: int) -> None:
        """Weights again, verified. It serves only when it says that it has this version."""
        assert self.resync is not None
        try:
            with self._calls.recorded(member.name, "abort"):
                member.engine.abort()  # requests that went to other engines
            with self._calls.recorded(member.name, f"resync to version {version}"):
                self.resync([member.engine])
            found = member.engine.version()
            if found != version:
                raise EngineError(f"it serves version {found} after a sync to version {version}")
        except EngineError as error:
            self.down(member, f"{member.reason}; it could not be brought current: {error}")
            return
        logger.warning("%s has the weights of version %d and serves again", member.name, version)
        self.serves(member)

    def _watch(self, member: Member) -> None:
        if member.watch is not None:
            return
        limits = self._supervision
        member.watch = ServerWatch(
            member.name,
            member.engine.health,
            lambda: self.ending(member.name),
            lambda watch, words: self._found_ill(member, watch, words),
            limits.health_interval_s,
            limits.health_timeout_s,
            max(POLL_S, len(self.members) / _LOOKS_A_SECOND),
        )

    def _stop_watch(self, member: Member) -> None:
        with self._lock:
            if member.watch is not None:
                member.watch.stop()
                member.watch = None

    def _found_ill(self, member: Member, watch: ServerWatch, words: str) -> None:
        """Kills the process at once, in the watch's thread, so that no call to it goes on waiting."""
        with self._lock:
            if member.watch is not watch:
                return
            self._ill[member.name] = words
            if self._supervision.servers is not None:
                self._supervision.servers.kill(member.name)


_ALIVE = (State.SERVING, State.CHECKED, State.SYNCING, State.STALE)
