"""Calls to engines: those that generate in one event loop, each other verb in a thread. Also a record of the last ones
for the report on a run that hangs, and the lock of the one thread that may change what a fleet knows of its engines."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf_megatron.rollout import http

T = TypeVar("T")

_CALLS_KEPT = 100


def call_name(num_samples: int) -> str:
    """A new name for a generate call, by which it can be aborted."""
    return f"{uuid.uuid4().hex}-{num_samples}"


def sample_names(name: str) -> list[str]:
    """Returns the names of a call's samples."""
    return [f"{name}-{index}" for index in range(int(name.rsplit("-", 1)[1]))]


@dataclass(slots=True)
class EngineCall:
    """One call, a context manager around it. `seconds` is None while it runs."""

    start: float  # time.monotonic()
    engine: str
    verb: str
    seconds: float | None = None
    error: str = ""  # what it raised

    def __enter__(self) -> EngineCall:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.seconds = time.monotonic() - self.start
        self.error = f"{type(error).__name__}: {error}" if error else ""

    def __str__(self) -> str:
        ago = time.monotonic() - self.start
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
        took = f"running for {ago:.1f} s" if self.seconds is None else f"{self.seconds:.2f} s"
        return f"{clock} {self.engine} {self.verb}: {took}" + (f", {self.error}" if self.error else "")


class EngineCalls:
    """Thread-safe. The threads are daemons: one that waits for a hung engine does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: deque[EngineCall] = deque(maxlen=_CALLS_KEPT)
        self._numbers = itertools.count()

    def start(self, engine: str, verb: str, function: Callable[[], T]) -> Future[T]:
        """Run `function` in a thread of its own."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                with self.recorded(engine, verb):
                    result = function()
                future.set_result(result)
            except BaseException as error:  # goes to who reads the future
                future.set_exception(error)

        threading.Thread(target=run, name=f"{engine}-{verb}-{next(self._numbers)}", daemon=True).start()
        return future

    def start_async(
        self, engine: str, verb: str, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]
    ) -> http.Spawned:
        """Run `work` in the loop of `rollout.http`, without a thread of its own. The loop calls `ended`."""
        call = self.recorded(engine, verb)

        async def run() -> T:
            with call:
                return await work

        return http.Spawned(run(), ended)

    def recorded(self, engine: str, verb: str) -> EngineCall:
        """Return a call that is over at the end of a `with` block."""
        call = EngineCall(time.monotonic(), engine, verb)
        self._calls.append(call)
        return call

    def last(self) -> list[EngineCall]:
        """The newest calls, oldest first."""
        return list(self._calls)


_LONGEST_S = 7200.0  # that the lock is waited for: two syncs at their deadlines


class FairLock:
    """Taken in the order in which it was asked for; whoever has it gets it again. Thread-safe.

    threading.RLock is not fair: a session that polls could keep a weight sync waiting.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[threading.Thread] = deque()  # the first one has it
        self._depth = 0
        self._since = 0.0  # when it was taken
        self._taken_s = 0.0  # altogether, before

    @property
    def is_mine(self) -> bool:
        return bool(self._depth) and self._queue[0] is threading.current_thread()

    def clock(self) -> float:
        """Seconds that stand still while somebody has the lock: what engines have had to work."""
        with self._condition:
            now = time.monotonic()
            return now - self._taken_s - (now - self._since if self._depth else 0.0)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises RuntimeError naming the thread that keeps it."""
        with self.tried(_LONGEST_S) as is_mine:
            if not is_mine:
                raise RuntimeError(
                    f"the thread {self._queue[0].name} has held the engines of this run for {_LONGEST_S:g} s."
                )
            yield

    @contextmanager
    def tried(self, timeout_s: float) -> Iterator[bool]:
        """False: another thread had it all that time."""
        me = threading.current_thread()
        with self._condition:
            has_come = self.is_mine
            if not has_come:
                self._queue.append(me)
                try:
                    has_come = self._condition.wait_for(lambda: self._queue[0] is me, max(0.0, timeout_s))
                finally:
                    if not has_come:
                        self._leave(me)
            if has_come:
                self._since = self._since if self._depth else time.monotonic()
                self._depth += 1
        try:
            yield has_come
        finally:
            with self._condition:
                self._depth -= has_come
                if has_come and not self._depth:
                    self._taken_s += time.monotonic() - self._since
                    self._leave(me)

    def _leave(self, thread: threading.Thread) -> None:
        self._queue.remove(thread)
        self._condition.notify_all()  # another one may be the first now
