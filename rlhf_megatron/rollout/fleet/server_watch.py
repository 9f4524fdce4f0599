"""Looks after one server from a thread: its process, and its answers to health checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rlhf_megatron.rollout.engine_interface import EngineError

PROCESS_POLL_S = 0.1  # between looks at the process
_RETRY_S = 0.5  # after a health check that failed at once
HEALTHY_S = 600.0  # without a failure, after which restarts are counted anew


class RestartBudget:
    """How often servers may be started again. The count begins anew after HEALTHY_S without a
    failure: a server that fails once a day is not one that cannot run.
    """

    def __init__(self, max_restarts: int, num_restarts_before: int = 0) -> None:
        """Begin with all restarts but those that the first start has taken."""
        self.num_restarts = num_restarts_before  # since the count began
        self._max_restarts = max_restarts
        self._last_failure_at = time.monotonic()

    def take_restart(self) -> bool:
        """Note a failure, and return whether the server may be started again."""
        now = time.monotonic()
        if now - self._last_failure_at >= HEALTHY_S:
            self.num_restarts = 0
        self._last_failure_at = now
        if self.num_restarts >= self._max_restarts:
            return False
        self.num_restarts += 1
        return True


class ServerWatch:
    """Watches one server from a thread of its own, and calls `on_ill` with the problem, at most
    once, and not after `stop_watching`.
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
        """Start the watch. `check_health` raises EngineError where the server does not answer well
        within the given seconds; it is called every `interval_s`, first after `interval_s`.
        `describe_exit` returns how the process ended, None while it runs; it is called every
        `poll_s`.
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
        """Stop the watch without waiting for a check that is under way; its result is dropped."""
        self._stop_event.set()

    def _watch_until_ill(self) -> None:
        """Check the process and the health in turns until a problem is found or the watch is
        stopped.
        """
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
        """Check the health once and return the problem; None where the server answers well or the
        watch is stopped. A check that fails before `timeout_s` has passed is repeated.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                # always the whole time: how long a busy scheduler is waited for goes by it
                self._check_health(self._timeout_s)
                return None
            except EngineError as error:
                words = self._describe_exit()
                if words is not None:
                    return words
                if time.monotonic() >= deadline:
                    return (
                        "no good answer to a health check (rollout.health_timeout_s is"
                        f" {self._timeout_s:g} s): {error}"
                    )
            if self._stop_event.wait(_RETRY_S):
                return None
