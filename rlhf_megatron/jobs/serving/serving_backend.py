"""The fleet behind the front: coroutines await answers while dead engines are started again and
newer weights come.

A request is one piece of a fleet's session: it goes to another engine where one fails, and over a
weight sync it waits and goes on. What no engine can do fails alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.rollout.engine_interface import EngineError, GeneratedSample, GenerateRequest

_MEND_S = 0.2
Answer = list[GeneratedSample]


class ServingBackend:
    """The engines behind a server; a context manager that starts and ends its two threads. One
    thread drives the session of requests; the other one mends engines and calls `follow_run`.
    """

    def __init__(
        self, weight_sync: WeightSync, follow_run: Callable[[], None] | None = None
    ) -> None:
        """Prepare the threads, which `__enter__` starts. `weight_sync` has engines that serve
        already. `follow_run` may sync other weights, and is called a few times a second.
        """
        self.weight_sync = weight_sync
        # fails with what ended a thread: nothing is answered any more
        self.end_future: Future[None] = Future()
        self.counters: Counter[str] = Counter()  # of the fleet, since the start
        self._follow_run = follow_run
        self._session = weight_sync.fleet.open_session(keeps_failures=True)
        self._keys = itertools.count()
        self._lock = threading.Lock()  # of the next three
        self._new_requests: list[tuple[int, GenerateRequest]] = []
        self._cancelled_keys: list[int] = []
        self._running_futures: dict[int, Future[Answer]] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run_thread, args=(name, work), name=f"serve-{name}", daemon=True
            )
            for name, work in (("drive", self._drive_session), ("keep", self._mend_engines))
        ]

    def __enter__(self) -> ServingBackend:
        """Start both threads, and return this backend."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads and the session; requests that are still open fail with EngineError."""
        self._closing.set()
        self._session.wake_poll()
        for thread in self._threads:
            thread.join(timeout=60.0)
        self._session.close()
        self._fail_all_requests(EngineError("the server has ended"))

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that are served."""
        return self.weight_sync.policy_version

    @property
    def num_running(self) -> int:
        """Return the number of requests that wait or are being generated."""
        return len(self._running_futures)

    @property
    def engine_counts(self) -> tuple[int, int]:
        """Return (number of engines that serve or are getting weights, number of all engines)."""
        return len(self.weight_sync.fleet.live_engines), len(self.weight_sync.fleet.engines)

    async def generate_samples(self, request: GenerateRequest) -> Answer:
        """Return the samples of a request, in order; await this in the event loop. If the task is
        cancelled, the engines abort the request. Raise EngineRequestError for a request that no
        engine accepts, EngineError when retries or engines have run out.
        """
        future: Future[Answer] = Future()
        with self._lock:
            key = next(self._keys)
            self._new_requests.append((key, request))
            self._running_futures[key] = future
        self._session.wake_poll()
        if self.end_future.done():
            self._fail_all_requests(EngineError("no engine is left"))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                self._running_futures.pop(key, None)
                self._cancelled_keys.append(key)
            raise

    def _run_thread(self, name: str, run_loop: Callable[[], None]) -> None:
        """Run a loop in its thread; an exception becomes the result of `end_future` and fails all
        open requests.
        """
        try:
            run_loop()
        except BaseException as error:
            with suppress(InvalidStateError):
                self.end_future.set_exception(error)
            self._fail_all_requests(EngineError(f"the server ends ({error})"))

    def _drive_session(self) -> None:
        """Until the backend closes, submit new requests, abort cancelled ones, and pass results and
        failures to the waiting futures.
        """
        while not self._closing.is_set():
            with self._lock:
                new = self._new_requests
                self._new_requests = []
                dropped = self._cancelled_keys
                self._cancelled_keys = []
            for key, request in new:
                self._session.submit_requests(key, [request])
            if dropped:
                self._session.abort_keys(dropped)
            for key, groups in self._session.poll_finished():
                future = self._pop_future(key)
                if future is not None:
                    with suppress(InvalidStateError):
                        future.set_result(groups[0])
            for key, error in self._session.take_failures():
                self._fail_request(key, error)

    def _mend_engines(self) -> None:
        """Until the backend closes, restart dead engines, call `follow_run`, and collect the
        fleet's counters, a few times a second.
        """
        while not self._closing.wait(_MEND_S):
            self._session.mend_engines()
            if self._follow_run is not None:
                self._follow_run()
            self.counters.update(
                {name: int(count) for name, count in self.weight_sync.fleet.take_counters().items()}
            )

    def _pop_future(self, request_key: int) -> Future[Answer] | None:
        """Remove the future of a request and return it; None if the request is cancelled or
        answered.
        """
        with self._lock:
            return self._running_futures.pop(request_key, None)

    def _fail_request(self, request_key: int, error: Exception) -> None:
        """Fail a request that is still open with this error."""
        future = self._pop_future(request_key)
        if future is not None:
            with suppress(InvalidStateError):
                future.set_exception(error)

    def _fail_all_requests(self, error: Exception) -> None:
        """Fail all open requests with this error."""
        for key in list(self._running_futures):
            self._fail_request(key, error)
