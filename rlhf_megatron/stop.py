"""Being asked to stop: a run ends at the next place where its state can be saved, and can be
resumed from there.
"""

from __future__ import annotations

import signal
import threading
import time

# of a run that stopped when asked to and can go on (sysexits' EX_TEMPFAIL: start it again)
STOPPED_EXIT_CODE = 75


def get_startup_exit_code(signal_number: int) -> int:
    """Return the exit code of a run that signal `signal_number` ended before its first step:
    nothing is lost, and the same command begins it again.
    """
    return 128 + signal_number if signal_number == signal.SIGINT else STOPPED_EXIT_CODE


class RunStopped(Exception):
    """The run ends here because somebody asked for it. The message says who."""


class StopRequest:
    """Set by a signal or a host, read by the loop. Threads may share it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self._requested_at = 0.0

    def request(self, reason: str) -> None:
        """Ask the run to stop. Only the first reason is kept."""
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
