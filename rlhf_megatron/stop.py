"""Being asked to stop: a run ends at the next place where its state can be saved, and can be resumed from there."""

from __future__ import annotations

import threading

STOPPED_EXIT_CODE = (
    75  # of a run that stopped when asked to and saved its state (sysexits' EX_TEMPFAIL: start it again)
)


class RunStopped(Exception):
    """The run ends here because somebody asked for it. The message says who."""


class StopRequest:
    """Set by a signal or a host, read by the loop. Threads may share it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def request(self, reason: str) -> None:
        """The first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises RunStopped when the run was asked to stop."""
        if self._event.is_set():
            raise RunStopped(self.reason)
