"""Calls to engines: those that generate in one event loop, each other verb in a thread. Also a
record of the last ones for the report on a run that hangs, and the lock of the one thread that may
change what a fleet knows of its engines.
"""

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

from rlhf_megatron.rollout import http_client

T = TypeVar("T")

_MAX_RECORDED_CALLS = 100

_MAX_LOCK_WAIT_S = 7200.0  # that the lock is waited for: two syncs at their deadlines


def make_call_name(num_samples: int) -> str:
    """A new name for a generate call, by which it can be aborted."""
    return f"{uuid.uuid4().hex}-{num_samples}"


def list_sample_names(call_name: str) -> list[str]:
    """Return the names of the samples of a call, by the number at the end of the call's name."""
    return [f"{call_name}-{index}" for index in range(int(call_name.rsplit("-", 1)[1]))]


@dataclass(slots=True)
class EngineCallRecord:
    """One call, a context manager around it. `seconds` is None while it runs."""

    start_time: float  # time.monotonic()
    engine: str
    verb: str
    seconds: float | None = None
    error: str = ""  # what it raised

    def __enter__(self) -> EngineCallRecord:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.seconds = time.monotonic() - self.start_time
        self.error = f"{type(error).__name__}: {error}" if error else ""

    def __str__(self) -> str:
        ago = time.monotonic() - self.start_time
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
        took = f"running for {ago:.1f} s" if self.seconds is None else f"{self.seconds:.2f} s"
        return f"{clock} {self.engine} {self.verb}: {took}" + (
            f", {self.error}" if self.error else ""
        )


class EngineCallLog:
    """Thread-safe. The threads are daemons: one that waits for a hung engine does not keep the
    process alive.
    """

    def __init__(self) -> None:
        self._records: deque[EngineCallRecord] = deque(maxlen=_MAX_RECORDED_CALLS)
        self._thread_numbers = itertools.count()

    def start_in_thread(self, engine: str, verb: str, make_call: Callable[[], T]) -> Future[T]:
        """Run `make_call` in a daemon thread of its own, record it as a call of `verb` to `engine`,
        and return the future of its result.
        """
        future: Future[T] = Future()

        def run_recorded() -> None:
            """Run and record the call, and put its result or error into the future."""
            try:
                with self.record_call(engine, verb):
                    result = make_call()
                future.set_result(result)
            except BaseException as error:  # goes to who reads the future
                future.set_exception(error)

        threading.Thread(
            target=run_recorded, name=f"{engine}-{verb}-{next(self._thread_numbers)}", daemon=True
        ).start()
        return future

    def start_in_event_loop(
        self,
        engine: str,
        verb: str,
        coroutine: Coroutine[Any, Any, T],
        on_done: Callable[[asyncio.Task[T]], None],
    ) -> http_client.EventLoopTask:
        """Start `coroutine` in the loop of `rollout.http_client`, record it as a call, and return
        its task without waiting. The loop calls `on_done` with the task when it ends.
        """
        call = self.record_call(engine, verb)

        async def run_recorded() -> T:
            """Await the coroutine, and end its record with it."""
            with call:
                return await coroutine

        return http_client.EventLoopTask(run_recorded(), on_done)

    def record_call(self, engine: str, verb: str) -> EngineCallRecord:
        """Add a record of a call that begins now, and return it: a context manager whose end ends
        the call.
        """
        call = EngineCallRecord(time.monotonic(), engine, verb)
        self._records.append(call)
        return call

    def list_recent_calls(self) -> list[EngineCallRecord]:
        """Return the records of the newest calls, also of running ones, oldest first."""
        return list(self._records)


class FairLock:
    """A lock that threads get in the order of their requests; the thread that holds it may take it
    again. Thread-safe.

    threading.RLock is not fair: a session that polls could keep a weight sync waiting.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[threading.Thread] = deque()  # the first one has it
        self._depth = 0
        self._held_since = 0.0  # when it was taken
        self._total_held_s = 0.0  # altogether, before

    @property
    def is_held_by_caller(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return bool(self._depth) and self._queue[0] is threading.current_thread()

    def read_unlocked_clock(self) -> float:
        """Return a clock in seconds that stands still while any thread holds the lock; its
        differences are the time that engines had for their work.
        """
        with self._condition:
            now = time.monotonic()
            return now - self._total_held_s - (now - self._held_since if self._depth else 0.0)

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the lock within the block. Raise RuntimeError, with the name of the thread that
        holds it, where it does not come free within two hours.
        """
        with self.try_hold_lock(_MAX_LOCK_WAIT_S) as is_mine:
            if not is_mine:
                raise RuntimeError(
                    f"the thread {self._queue[0].name} has held the engines of this run for"
                    f" {_MAX_LOCK_WAIT_S:g} s."
                )
            yield

    @contextmanager
    def try_hold_lock(self, timeout_s: float) -> Iterator[bool]:
        """Wait for the lock for at most `timeout_s`. Yield whether the block holds it; the block
        runs in both cases.
        """
        me = threading.current_thread()
        with self._condition:
            has_come = self.is_held_by_caller
            if not has_come:
                self._queue.append(me)
                try:
                    has_come = self._condition.wait_for(
                        lambda: self._queue[0] is me, max(0.0, timeout_s)
                    )
                finally:
                    if not has_come:
                        self._leave_queue(me)
            if has_come:
                self._held_since = self._held_since if self._depth else time.monotonic()
                self._depth += 1
        try:
            yield has_come
        finally:
            with self._condition:
                self._depth -= has_come
                if has_come and not self._depth:
                    self._total_held_s += time.monotonic() - self._held_since
                    self._leave_queue(me)

    def _leave_queue(self, thread: threading.Thread) -> None:
        """Remove the thread from the queue, and wake the others: another one may now be the first.
        The caller holds the condition.
        """
        self._queue.remove(thread)
        self._condition.notify_all()  # another one may be the first now
