"""Where generate calls of a client wait while their engine is paused, and a count of those that run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Stock SGLang holds what comes during a pause where its own abort does not reach it; here an abort does.
    Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_open = True
        self._num_aborts = 0
        self._num_inside = 0

    def open(self) -> None:
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def close(self) -> None:
        """For what comes from now on."""
        with self._condition:
            self._is_open = False

    def abort(self) -> None:
        """What waits is told so."""
        with self._condition:
            self._num_aborts += 1
            self._condition.notify_all()

    @contextmanager
    def passing(self, timeout_s: float) -> Iterator[bool]:
        """True: inside of the block the call runs. False: it was aborted as it waited. Raises TimeoutError."""
        with self._condition:
            before = self._num_aborts
            if not self._condition.wait_for(lambda: self._is_open or self._num_aborts != before, timeout_s):
                raise TimeoutError
            is_running = self._num_aborts == before
            self._num_inside += is_running
        try:
            yield is_running
        finally:
            with self._condition:
                self._num_inside -= is_running
                self._condition.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """False: something still ran then."""
        with self._condition:
            return self._condition.wait_for(lambda: self._num_inside == 0, timeout_s)
