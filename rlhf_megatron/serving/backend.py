"""The fleet behind the front: coroutines await answers while dead engines are started again and newer weights come.

A request is one piece of a fleet's session: it goes to another engine where one fails, and over a weight sync it waits
and goes on. What no engine can do fails alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from rlhf_megatron.rollout.engine import EngineError, GeneratedSample, GenerateRequest
from rlhf_megatron.sync.weight_sync import WeightSync

_MEND_S = 0.2
Answer = list[GeneratedSample]


class Backend:
    """A context manager. One thread drives the session; another one mends engines and calls `follow`."""

    def __init__(self, sync: WeightSync, follow: Callable[[], None] | None = None) -> None:
        """`sync`: of engines that serve. `follow` may sync other weights; it is called a few times a second."""
        self.sync = sync
        self.ended: Future[None] = Future()  # fails with what ended a thread: nothing is answered any more
        self.counters: Counter[str] = Counter()  # of the fleet, since the start
        self._follow = follow
        self._session = sync.fleet.open_session(keeps_failures=True)
        self._keys = itertools.count()
        self._lock = threading.Lock()  # of the next three
        self._new: list[tuple[int, GenerateRequest]] = []
        self._dropped: list[int] = []
        self._running: dict[int, Future[Answer]] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(name, work), name=f"serve-{name}", daemon=True)
            for name, work in (("drive", self._drive), ("keep", self._keep))
        ]

    def __enter__(self) -> Backend:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._session.wake()
        for thread in self._threads:
            thread.join(timeout=60.0)
        self._session.close()
        self._fail_all(EngineError("the server has ended"))

    @property
    def version(self) -> int:
        """The version of the weights that are served."""
        return self.sync.version

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_engines(self) -> tuple[int, int]:
        """The engines that serve or are getting weights, and all engines."""
        return len(self.sync.fleet.live), len(self.sync.fleet.engines)

    async def ask(self, request: GenerateRequest) -> Answer:
        """The samples of a request, in order. Cancelled, engines end it. Raises EngineRequestError where it is wrong
        itself, EngineError where retries or engines have run out."""
        future: Future[Answer] = Future()
        with self._lock:
            key = next(self._keys)
            self._new.append((key, request))
            self._running[key] = future
        self._session.wake()
        if self.ended.done():
            self._fail_all(EngineError("no engine is left"))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                self._running.pop(key, None)
                self._dropped.append(key)
            raise

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with suppress(InvalidStateError):
                self.ended.set_exception(error)
            self._fail_all(EngineError(f"the server ends ({error})"))

    def _drive(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                new, self._new = self._new, []
                dropped, self._dropped = self._dropped, []
            for key, request in new:
                self._session.submit(key, [request])
            if dropped:
                self._session.abort(dropped)
            for key, groups in self._session.poll():
                future = self._taken(key)
                if future is not None:
                    with suppress(InvalidStateError):
                        future.set_result(groups[0])
            for key, error in self._session.take_failures():
                self._fail(key, error)

    def _keep(self) -> None:
        while not self._closing.wait(_MEND_S):
            self._session.mend()
            if self._follow is not None:
                self._follow()
            self.counters.update({name: int(count) for name, count in self.sync.fleet.take_counters().items()})

    def _taken(self, key: int) -> Future[Answer] | None:
        with self._lock:
            return self._running.pop(key, None)

    def _fail(self, key: int, error: Exception) -> None:
        future = self._taken(key)
        if future is not None:
            with suppress(InvalidStateError):
                future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        for key in list(self._running):
            self._fail(key, error)
