"""Looks after one server from a thread: its process, and its answers to health checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rlhf_megatron.rollout.engine_interface import EngineError

PROCESS_POLL_S = 0.1  # between looks at the process
_RETRY_S = 0.5  # after a health check that failed at once


class ServerWatch:
    """Calls `on_ill` with what is wrong, at most once, from its own thread, unless
    `stop_watching` came before.
    """

    def __init__(
        self,
        name: str,
        check_health: Callable[[float], None],
        describe_exit: Callable[[], str | None],
        on_ill: Callable[[ServerWatch, str], None],
        interval_s: float,
        timeout_s: float,
        poll_s: float = PROCESS_POLL_S,
    ) -> None:
        """`check_health`: raises EngineError where it has not answered well within so many seconds.
        `describe_exit`: how its process ended, None while it runs, looked at every `poll_s`. A
        first check comes after `interval_s`.
        """
        self._check_health = check_health
        self._describe_exit = describe_exit
        self._on_ill = on_ill
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._poll_s = min(poll_s, interval_s)
        self._stop_event = threading.Event()
        threading.Thread(target=self._watch_until_ill, name=f"watch-{name}", daemon=True).start()

    def stop_watching(self) -> None:
        """Does not wait for a check that is under way; what it finds is dropped."""
        self._stop_event.set()

    def _watch_until_ill(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._stop_event.wait(self._poll_s):
            words = self._describe_exit()
            if words is None and time.monotonic() >= due:
                words = self._find_health_problem()
                due = time.monotonic() + self._interval_s
            if words is not None and not self._stop_event.is_set():
                self._on_ill(self, words)
                return

    def _find_health_problem(self) -> str | None:
        """Check the health once; None: it answered. A check that fails at once is repeated until
        the time is over.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._check_health(max(0.1, deadline - time.monotonic()))
                return None
            except EngineError as error:
                words = self._describe_exit()
                if words is not None:
                    return words
                if time.monotonic() >= deadline:
                    return (
                        "no good answer to a health check within rollout.health_timeout_s"
                        f" ({self._timeout_s:g} s): {error}"
                    )
            if self._stop_event.wait(_RETRY_S):
                return None
