"""One run at a time on a server that is not its own. The lock is kept by the server: sessions, which stock SGLang opens
once a name and drops after a time, so that a killed run does not hold it for ever.

Two sessions are one lease. They are renewed in turns, by closing and opening: while one is renewed the other one
stands, and who finds one of them open has no lease.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from rlhf_megatron.rollout.engine import EngineError, EngineRequestError
from rlhf_megatron.rollout.http import HttpClient

LEASE_S = 60.0
SLOTS = ("rlhf_megatron-lease-a", "rlhf_megatron-lease-b")
_CALL_S = 120.0  # a server that loads weights answers late
_VERDICT_S = 30.0
_RETRY_S = 1.0


class Lease:
    """Held from `acquire` to `release`, renewed by a thread. `epoch` counts the times that it was held anew: another
    run can have used the server between two of them."""

    def __init__(self, http: HttpClient, seconds: float = LEASE_S) -> None:
        """`http`: with the key of verbs that take no admin key."""
        self.epoch = 0
        self._http = http
        self._seconds = seconds
        self._renewed = 0.0  # when the last session that was opened was asked for
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, deadline: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until nobody else holds it; `waiting` is called every moment. `deadline`: of time.monotonic().

        Raises EngineError: at the deadline, or where the server fails.
        """
        while True:
            sent = _now()
            if self._open(SLOTS[0]):
                if self._open(SLOTS[1]):
                    break
                self._close(SLOTS[0])
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._http.address.url} is in use by another run; stop that run, or give this one servers of its"
                    f" own (a run that was killed is forgotten after {self._seconds:g} s)."
                )
            waiting()
            time.sleep(_RETRY_S)
        self.epoch, self._renewed = self.epoch + 1, sent
        self._thread = threading.Thread(target=self._keep, name=f"lease-{self._http.address.name}", daemon=True)
        self._thread.start()

    def current(self) -> int:
        """The epoch. Where the last renewal is too long ago, e.g. after this process was stopped, waits for the next
        one. Raises EngineError where the lease is lost."""
        with self._changed:
            if self._changed.wait_for(lambda: _now() - self._renewed < self._seconds, _VERDICT_S):
                return self.epoch
        raise EngineError(
            f"{self._http.address.name} ({self._http.address.url}): this run has lost its lease of the server, which"
            " another run may use now."
        )

    def release(self) -> None:
        """Safe to call twice. Does not raise where the server is gone."""
        self._stopped.set()
        if self._thread is None:
            return
        self._thread.join(_RETRY_S)
        self._thread = None
        for slot in SLOTS:
            with contextlib.suppress(EngineError):
                self._close(slot, _VERDICT_S)

    def _keep(self) -> None:
        """In its thread. A session that was asked for within `seconds` of the other one came while that one stood, or
        before whoever asked later: no other run had both, also where the server answers late."""
        turn, pause = 0, self._seconds / 6
        while not self._stopped.wait(pause):
            sent, is_renewed = 0.0, False
            with contextlib.suppress(EngineError):
                self._close(SLOTS[turn])
                sent = _now()
                is_renewed = self._open(SLOTS[turn])
            pause = self._seconds / 6 if is_renewed else _RETRY_S
            if is_renewed:
                turn = 1 - turn  # never before: while this session is not there again, the other one is the lease
                with self._changed:
                    self.epoch += sent - self._renewed >= self._seconds
                    self._renewed = sent
                    self._changed.notify_all()

    def _open(self, slot: str) -> bool:
        body = {"session_id": slot, "capacity_of_str_len": 0, "timeout": self._seconds}
        try:
            return bool(self._http.post("/open_session", body, _CALL_S) == slot)
        except EngineRequestError as error:
            if "Failed to open the session" in str(error):
                return False
            raise

    def _close(self, slot: str, timeout_s: float = _CALL_S) -> None:
        self._http.post("/close_session", {"session_id": slot}, timeout_s)


def _now() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
