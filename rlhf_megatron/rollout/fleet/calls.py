"""Calls to engines: a thread each, and a record of the last ones for the report on a run that hangs."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_CALLS_KEPT = 100


def call_name(num_samples: int) -> str:
    """A new name for a generate call, by which it can be aborted."""
    return f"{uuid.uuid4().hex}-{num_samples}"


def sample_names(name: str) -> list[str]:
    """Of the samples of a call."""
    return [f"{name}-{index}" for index in range(int(name.rsplit("-", 1)[1]))]


@dataclass
class EngineCall:
    """One call. `seconds` is None while it runs."""

    time: float  # of its start, unix seconds
    engine: str
    verb: str
    seconds: float | None = None
    error: str = ""  # what it raised

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.time))
        took = f"running for {time.time() - self.time:.1f} s" if self.seconds is None else f"{self.seconds:.2f} s"
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
                future.set_result(self.record(engine, verb, function))
            except BaseException as error:  # goes to who reads the future
                future.set_exception(error)

        threading.Thread(target=run, name=f"{engine}-{verb}-{next(self._numbers)}", daemon=True).start()
        return future

    def record(self, engine: str, verb: str, function: Callable[[], T]) -> T:
        """Run `function` in this thread."""
        call = EngineCall(time.time(), engine, verb)
        self._calls.append(call)
        start = time.monotonic()
        try:
            return function()
        except BaseException as error:
            call.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            call.seconds = time.monotonic() - start

    def last(self) -> list[EngineCall]:
        """The newest calls, oldest first."""
        return list(self._calls)
