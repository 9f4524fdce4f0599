"""The request that a run stops: the run ends at the next place where its state can be saved, and
can be resumed from there.
"""

from __future__ import annotations

import signal
import threading
import time

# The exit code of a run that stopped on request and can go on (EX_TEMPFAIL of sysexits: start it
# again).
STOPPED_EXIT_CODE = 75


def get_startup_exit_code(signal_number: int) -> int:
    """Return the exit code of a run that signal `signal_number` ended before the first step:
    nothing is lost, and the same command starts the run again.
    """
    return 128 + signal_number if signal_number == signal.SIGINT else STOPPED_EXIT_CODE


class RunStopped(Exception):
    """The run ends on request. The message says which signal to which process requested it."""


class StopRequest:
    """The request that a run stops: a signal or a host sets it, and the loop reads it. Threads may
    share it.

    `answer` is what the user reads after Ctrl-C: what the run does before it ends.
    """

    def __init__(self, answer: str = "stopping") -> None:
        self.answer = answer
        self._event = threading.Event()
        self.reason = ""
        self._requested_at = 0.0

    def request(self, reason: str) -> None:
        """Request the stop. Only the first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._requested_at = time.monotonic()
            self._event.set()

    @property
    def is_requested(self) -> bool:
        """Return whether a stop of the run was requested."""
        return self._event.is_set()

    @property
    def seconds_since_request(self) -> float:
        """Return the seconds since the first request; 0 without a request."""
        return time.monotonic() - self._requested_at if self.is_requested else 0.0

    def raise_if_requested(self) -> None:
        """Raise RunStopped, with the reason, when a stop of the run was requested."""
        if self._event.is_set():
            raise RunStopped(self.reason)
