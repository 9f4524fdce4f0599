"""Work of a fleet: the pieces that wait, those on their way, and those that failed. Checks that samples come from
weights that the engines served."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from rlhf_megatron.data.routes import remove_routes
from rlhf_megatron.rollout import http
from rlhf_megatron.rollout.engine import (
    DriverLostError,
    Engine,
    EngineError,
    EngineRequestError,
    EngineStaleError,
    GeneratedSample,
    Groups,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.balancer import Balancer, Chunk, Load, Sent
from rlhf_megatron.rollout.fleet.calls import EngineCalls, FairLock, call_name
from rlhf_megatron.rollout.fleet.supervisor import Member, State, Supervisor

logger = logging.getLogger(__name__)

POLL_S = 0.1
_ABORT_S = 5.0
_MOST_LOSSES = 20  # of a piece with drivers that end: then it may be what ends them
_GIVEN_UP_S = 60.0  # that an engine gets to end what nobody awaits any more; its connection is closed then
# Clients give up by themselves so much after `request_timeout_s`: weight syncs, which are not counted, end before.
_ALLOWANCE_S = 86400.0


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A piece on its way."""

    sent: Sent
    name: str  # "": the engine cannot end it alone
    version: int | None  # of the weights that were served when it was sent
    clock: float  # at that time


@dataclass
class Served:
    """Versions of weights that a fleet's engines have served."""

    current: int | None = None  # None: before the first sync
    past: set[int] = field(default_factory=set)  # the current one too

    def now(self, version: int) -> None:
        self.current = version
        self.past.add(version)


@dataclass(frozen=True)
class Means:
    """Objects that all work of a fleet shares. Only the thread that has the lock may use them."""

    lock: FairLock
    supervisor: Supervisor
    balancer: Balancer
    calls: EngineCalls
    served: Served
    request_timeout_s: float
    request_retries: int


class Generation:
    """The thread that has the fleet's lock calls `take_back`, `dispatch`, `harvest`, again and again; `wait` and `add`
    need no lock."""

    def __init__(
        self,
        means: Means,
        chunks: Iterable[Chunk],
        *,
        is_named: bool,
        is_open: bool = False,
        keeps_failures: bool = False,
    ) -> None:
        """`is_named`: others work on the engines as well, so that calls are ended one by one. `is_open`: it goes on
        over weight syncs, whose time does not count. `keeps_failures`: what no engine can do is added to `failed`,
        where it would raise otherwise."""
        self._means = means
        self._supervisor = means.supervisor
        self._is_named = is_named
        self._is_open = is_open
        self._clock = means.lock.clock if is_open else time.monotonic
        self._todo = deque(chunks)
        self._running: dict[Call, http.Spawned] = {}  # in the order in which they were sent
        self._ended: deque[tuple[Call, asyncio.Task[Groups]]] = deque()
        self._woken = threading.Event()
        self._is_abandoned = False
        self.load = Load()  # of what is on its way; only the thread that has the lock may read it
        self._places: Counter[tuple[Member | None, Engine | None]] = Counter()  # where it is
        self._keeps_failures = keeps_failures
        self.failed: list[tuple[Chunk, EngineError]] = []

    @property
    def is_finished(self) -> bool:
        return not self._todo and not self._running

    def take_back(self) -> None:
        """Chunks of engines that serve no more. What such an engine still answers is read by nobody."""
        if all(_serves(*place) for place in self._places):
            return
        for call in list(self._running):
            member = call.sent.member
            if member is not None and not _serves(member, call.sent.engine):
                self._give_back(call)
                self._again(call.sent, member.reason)

    def dispatch(self, version: int | None, others: Load) -> None:
        """Send what the balancer has a place for. Raises EngineError when no engine is left.

        `version`: that engines serve. `others`: other work that is on its way to them.
        """
        if not self._todo:
            return
        serving = self._supervisor.of(State.SERVING)
        if not serving:
            if not self._supervisor.is_hopeful:
                raise EngineError(self._supervisor.nobody)
            return
        load = self.load + others
        while self._todo:
            sent = self._means.balancer.place(self._todo[0], serving, load, version)
            if sent is None:
                return
            load.add(sent)
            self._send(self._todo.popleft(), sent, version)

    def wait(self) -> bool:
        """Wait a moment. True: something has come."""
        has_come = self._woken.wait(POLL_S)
        self._woken.clear()
        return has_come

    def wake(self) -> None:
        """End a `wait` that is under way, or the next one. Any thread may call it."""
        self._woken.set()

    def harvest(self, version: int | None) -> list[tuple[Chunk, Groups]]:
        """Chunks whose samples have come and are accepted; the others wait to be sent again. `version`: that engines
        serve now."""
        accepted: list[tuple[Chunk, Groups]] = []
        while self._ended:
            call, task = self._ended.popleft()
            if self._take(call) is None:
                _forget(task)  # it was taken back or dropped
                continue
            sent = call.sent
            try:
                groups = task.result()
            except EngineRequestError as error:
                self._give_up(sent.chunk, error)
                continue
            except EngineError as error:
                if isinstance(error, EngineStaleError) and call.version != version:
                    self._todo.appendleft(sent.chunk)  # it came when the sync had begun, which is over
                    continue
                if isinstance(error, DriverLostError):
                    self._end([call] if call.name else ())  # nobody reads what the engine still makes
                    self._again(sent, str(error), "a driver")
                    continue
                if not self._means.balancer.blames_itself(error):
                    self._blame(sent, str(error), self._supervisor.failed)
                self._again(sent, str(error))
                continue
            served = self._means.served
            words = (
                open_problem(groups, call.version, served) if self._is_open else closed_problem(groups, call.version)
            )
            if words or any(s.finish_reason == "abort" for g in groups for s in g):
                _forget(task)
            if words:
                words = f"{sent.name} returned {words}"
                self._blame(sent, words, self._supervisor.stale)
                self._again(sent, words)
            elif any(s.finish_reason == "abort" for g in groups for s in g):
                self._again(sent, f"{sent.name} ended samples before they were complete")
            else:
                if sent.member is not None:
                    sent.member.num_stale = 0
                accepted.append((sent.chunk, groups))
        return accepted

    def add(self, chunk: Chunk) -> None:
        self._todo.append(chunk)

    def drop(self, chunks: Collection[Chunk]) -> None:
        """These are wanted no more: engines are told to end them."""
        if not chunks:
            return
        gone = set(map(id, chunks))
        self._todo = deque(chunk for chunk in self._todo if id(chunk) not in gone)
        dropped = [call for call in self._running if id(call.sent.chunk) in gone]
        for call in dropped:
            self._give_back(call)
        self._end(dropped)

    def expire(self) -> None:
        """Chunks that have taken longer than `request_timeout_s` of the clock fail."""
        now, most_s = self._clock(), self._means.request_timeout_s
        late = list(takewhile(lambda call: now - call.clock > most_s, self._running))
        for call in late:
            self._give_back(call)
            words = f"{call.sent.name}: no answer within {most_s:g} s (rollout.request_timeout_s)"
            self._blame(call.sent, words, self._supervisor.failed)
            self._again(call.sent, words)
        self._end(late)

    def abandon(self) -> None:
        """Make the engines finish at once what nobody will read. Waits for them a moment."""
        self._is_abandoned = True
        wait(self._end(self._running), timeout=_ABORT_S)
        for spawned in self._running.values():
            spawned.give_up(_GIVEN_UP_S)
        self._forget_ended()

    def _send(self, chunk: Chunk, sent: Sent, version: int | None) -> None:
        name = call_name(chunk.num_samples) if self._is_named else ""
        named = {"name": name} if name else {}
        timeout_s = self._means.request_timeout_s + (_ALLOWANCE_S if self._is_open else 0.0)
        work = sent.generate(chunk.requests, timeout_s, **named)
        call = Call(sent, name, version, self._clock())
        self.load.add(sent)
        self._places[sent.member, sent.engine] += 1
        start = self._means.calls.start_async
        self._running[call] = start(sent.name, "generate", work, partial(self._has_ended, call))

    def _has_ended(self, call: Call, task: asyncio.Task[Groups]) -> None:
        self._ended.append((call, task))
        self._woken.set()
        if self._is_abandoned:
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Any thread may call it."""
        with suppress(IndexError):
            while True:
                _forget(self._ended.popleft()[1])

    def _give_back(self, call: Call) -> None:
        """Give up a call whose answer nobody reads. It must not keep its connection where the engine never answers."""
        spawned = self._take(call)
        if spawned is not None:
            spawned.give_up(_GIVEN_UP_S)

    def _take(self, call: Call) -> http.Spawned | None:
        """Take a call off the books; None: it was not on its way."""
        spawned = self._running.pop(call, None)
        if spawned is None:
            return None
        place = (call.sent.member, call.sent.engine)
        self.load.add(call.sent, -1)
        self._places[place] -= 1
        if not self._places[place]:
            del self._places[place]
        return spawned

    def _end(self, calls: Iterable[Call]) -> list[Future[None]]:
        """Make engines end these: all that they do, where nobody else asks them for anything."""
        calls, names = list(calls), dict[Member, list[str]]()
        of_router = [call.name for call in calls if call.sent.member is None]
        if of_router:  # before the engines, so that none comes to them afterwards
            self._means.balancer.abort(of_router if self._is_named else ())
        for call in calls:
            member = call.sent.member
            if member is None:
                for each in self._supervisor.of(State.SERVING, State.CHECKED):
                    names.setdefault(each, []).append(call.name)
            elif call.sent.is_current:
                names.setdefault(member, []).append(call.name)
        start, is_named = self._means.calls.start, self._is_named
        ends = {member: partial(member.engine.abort, found if is_named else ()) for member, found in names.items()}
        return [start(member.name, "abort", end) for member, end in ends.items()]

    def _blame(self, sent: Sent, words: str, act: Callable[[Member, str], None]) -> None:
        if sent.member is None:
            self._supervisor.suspect(words)
        elif sent.is_current and sent.member.state is State.SERVING:
            act(sent.member, words)

    def _again(self, sent: Sent, words: str, who: str = "") -> None:
        """Ask for the chunk again, with the same seeds. `who`: a driver, which was lost; "": whom it was sent to has
        failed. Raises EngineError when it has used up its retries."""
        chunk = sent.chunk
        chunk.num_failures += not who
        chunk.num_losses += bool(who)
        who = who or sent.name
        chunk.failures[who] = words
        logger.warning("%s failed with %d samples: %s", who, chunk.num_samples, words.splitlines()[0])
        if chunk.num_failures > self._means.request_retries:
            words = f"{chunk.num_samples} samples failed {chunk.num_failures} times (rollout.request_retries is"
            words += f" {self._means.request_retries}): {'; '.join(chunk.failures.values())}"
            self._give_up(chunk, EngineError(words))
            return
        if chunk.num_losses > _MOST_LOSSES:
            words = (
                f"{chunk.num_samples} samples were lost with {chunk.num_losses} drivers (set rollout.num_drivers to 0)"
            )
            self._give_up(chunk, EngineError(f"{words}: {chunk.failures[who]}"))
            return
        self._supervisor.counters["rollout/requests_reissued"] += len(chunk.requests)
        self._todo.appendleft(chunk)

    def _give_up(self, chunk: Chunk, error: EngineError) -> None:
        if not self._keeps_failures:
            raise error
        self.failed.append((chunk, error))


def _forget(task: asyncio.Task[Groups]) -> None:
    """Nobody reads what came: files that an engine has written for it go."""
    if not task.cancelled() and task.exception() is None:
        remove_routes(sample.routes for group in task.result() for sample in group)


def _serves(member: Member | None, engine: Engine | None) -> bool:
    """Whether what was sent there is still awaited. A router's connection breaks when the engine behind it is killed,
    and one that is STALE aborts it."""
    if member is None:
        return True
    return member.engine is engine and (member.state in (State.SERVING, State.CHECKED) or member.is_committing)


def spans_of(sample: GeneratedSample) -> tuple[VersionSpan, ...]:
    """Whole: of a sample that says nothing of spans, all tokens are of its version."""
    return sample.version_spans or (VersionSpan(sample.policy_version, 0, len(sample.token_ids)),)


def closed_problem(groups: Groups, version: int | None) -> str:
    """Checks samples made between two syncs; `version`: the one that was served then, None: any. Returns "" or the
    problem."""
    versions = {sample.policy_version for group in groups for sample in group}
    if version is None or versions <= {version}:
        return ""
    return f"samples of version {sorted(versions)}, the current is {version}"


def open_problem(groups: Groups, sent_at: int | None, served: Served) -> str:
    """Checks samples that went on over syncs. `sent_at`: the version served when they were asked for. Returns "" where
    each token is of a version that engines had since then, in order."""
    current = served.current
    if sent_at is None or current is None:
        return ""
    for sample in (sample for group in groups for sample in group):
        spans = spans_of(sample)
        versions = [span.version for span in spans]
        ends = [0, *(span.end for span in spans)]
        is_whole = all(s.start == end for s, end in zip(spans, ends[:-1], strict=True))
        if not is_whole or ends[-1] != len(sample.token_ids):
            return f"a sample of {len(sample.token_ids)} tokens with the versions of {spans}"
        if not sample.version_spans and sample.token_ids and sent_at != current:
            return f"a sample that does not say which tokens came before version {current}"
        if sample.policy_version != versions[0] or versions != sorted(versions):
            return f"a sample of version {sample.policy_version} whose tokens are of versions {versions}"
        wrong = [version for version in versions if version not in served.past or not sent_at <= version <= current]
        if wrong:
            return (
                f"samples of version {wrong}, though it was asked for them at version {sent_at} and the current one is"
                f" {current}"
            )
    return ""
