"""Looks after one server from a thread: its process, and its answers to health checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rlhf_megatron.rollout.engine import EngineError

POLL_S = 0.1  # between looks at the process
_RETRY_S = 0.5  # after a health check that failed at once


class ServerWatch:
    """Calls `on_ill` with what is wrong, at most once, from its own thread, unless `stop` came before."""

    def __init__(
        self,
        name: str,
        health: Callable[[float], None],
        ending: Callable[[], str | None],
        on_ill: Callable[[ServerWatch, str], None],
        interval_s: float,
        timeout_s: float,
        poll_s: float = POLL_S,
    ) -> None:
        """`health`: raises EngineError where it has not answered well within so many seconds. `ending`: how its process
        ended, None while it runs, looked at every `poll_s`. A first check comes after `interval_s`."""
        self._health = health
        self._ending = ending
        self._on_ill = on_ill
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._poll_s = min(poll_s, interval_s)
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"watch-{name}", daemon=True).start()

    def stop(self) -> None:
        """Does not wait for a check that is under way; what it finds is dropped."""
        self._stopped.set()

    def _run(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._stopped.wait(self._poll_s):
            words = self._ending()
            if words is None and time.monotonic() >= due:
                words = self._check()
                due = time.monotonic() + self._interval_s
            if words is not None and not self._stopped.is_set():
                self._on_ill(self, words)
                return

    def _check(self) -> str | None:
        """Check the health once; None: it answered. A check that fails at once is repeated until the time is over."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._health(max(0.1, deadline - time.monotonic()))
                return None
            except EngineError as error:
                words = self._ending()
                if words is not None:
                    return words
                if time.monotonic() >= deadline:
                    return (
                        f"no good answer to a health check within rollout.health_timeout_s ({self._timeout_s:g} s):"
                        f" {error}"
                    )
            if self._stopped.wait(_RETRY_S):
                return None
