"""Being told to stop. A signal to any process of a job becomes a StopRequest in the controller.

The first signal asks: the run ends at the next place where its state is whole, within `grace_s`. A second one, or the
end of that time, ends it where it is: SystemExit in the controller, so that `finally` clauses run, for CLEANUP_S at
most. A host that gets the signal tells the controller and stays until it is told to leave; only where the controller
does not end it in time does it end itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from rlhf_megatron.runtime.messages import Signalled
from rlhf_megatron.stop import StopRequest, startup_exit_code

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP_LIMIT_ENV = "RLHF_MEGATRON_STOP_LIMIT_S"  # seconds after a signal until the agent kills the ranks that are left
REPEAT_S = 3.0  # within it a host's signals are one: a scheduler signals every process, and the agent passes it on
CONTROLLER_REPEAT_S = 0.5  # the controller gets no signal from a host that can send a message
CLEANUP_S = 12.0  # for the controller to end engines and hosts once it does not go on
HOST_SLACK_S = 5.0  # beyond it, for the controller to end this host
NOTICE_S = 1.0  # until a person is told that the run stops, when it has not by then
LOSS_S = 2.0  # for the group to say which host was lost


class CanFail(Protocol):
    @property
    def failure(self) -> Exception | None: ...


class ControllerStop:
    """The controller's side, also of an inline run. `stop` is what the loop reads; `parent`: process that starts it."""

    def __init__(self, stop: StopRequest, grace_s: float, parent: int | None = None) -> None:
        self.is_startup = parent is not None  # nothing to save yet: the first signal ends it
        self.has_begun = parent is None  # the run itself; what ends it before says so by its exit code
        self._stop = stop
        self._grace_s = grace_s
        self._parent = parent
        self._lock = threading.Lock()
        self._asked_at = 0.0
        self._signalled_at = 0.0  # this process itself, last
        self._is_over = False  # what comes now raises
        self._is_ended = False
        self._main = threading.main_thread().ident
        self._timers: list[threading.Timer] = []
        self._failure: Callable[[], Exception | None] = lambda: None

    def watch(self, group: CanFail) -> None:
        """Raise what ended the hosts, which says more, in place of the signal that came with it."""
        self._failure = lambda: group.failure

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Signals go here while it lasts. On the main thread. Then a controller with a parent is about to exit, and
        keeps its exit code whatever comes."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            with self._lock:
                self._is_ended = True
            for timer in self._timers:
                timer.cancel()
            for number, handler in before.items():
                if signal.getsignal(number) == self._on_signal:  # else it was told to end at once
                    signal.signal(number, handler if self._parent is None else signal.SIG_IGN)

    def tell(self, where: str, message: Signalled) -> None:
        """Take a host's message, on any thread."""
        number = signal.Signals[message.signal]
        if message.is_urgent or self.is_startup:
            self._end_now(number)
        else:
            self._ask(f"{number.name} to {where}", number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_orphan = self._parent is not None and os.getppid() != self._parent
        now = time.monotonic()
        last, self._signalled_at = self._signalled_at, now
        is_second = (last > 0 and now - last > CONTROLLER_REPEAT_S) or (
            self._stop.is_requested and now - self._asked_at > REPEAT_S
        )
        if is_orphan or is_second or self._is_over or self.is_startup:
            self._raise(number, LOSS_S if is_orphan else 0.0)
        self._ask(f"{signal.Signals(number).name} to the controller", number)

    def _ask(self, reason: str, number: int) -> None:
        # No lock: the handler runs on the main thread between any two of its instructions.
        if self._stop.is_requested:
            return
        self._asked_at = time.monotonic()
        self._stop.request(reason)
        self._timers = [
            threading.Timer(NOTICE_S, self._say, (reason,)),
            threading.Timer(self._grace_s, self._end_now, (number,)),
        ]
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def _say(self, reason: str) -> None:
        if (
            self._failure() is None
        ):  # else torchrun tells the ranks that are left, and the controller with rank 0, to end
            sys.stderr.write(
                f"\n{reason}: the run stops, within {self._grace_s:g} s; a second signal ends it at once\n"
            )

    def _end_now(self, number: int) -> None:
        """Interrupt the main thread wherever it is, from another thread."""
        with self._lock:
            if self._is_over or self._is_ended:
                return
            self._is_over = True
            _exit_after(CLEANUP_S, self._code(number))  # where the main thread does not come back to Python
            assert self._main is not None
            signal.pthread_kill(self._main, number)

    def _raise(self, number: int, wait_s: float) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        _exit_after(CLEANUP_S, self._code(number))
        deadline = time.monotonic() + wait_s
        while self._failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if (failure := self._failure()) is not None:  # torchrun ends all ranks when one has died
            raise failure
        raise SystemExit(self._code(number))

    def _code(self, number: int) -> int:
        return 128 + number if self.has_begun else startup_exit_code(number)


class HostStop:
    """A host's side: `on_signal` is called in a thread of its own (`processes.on_signals`), once for each signal.

    `controller`: the process that this host has started, on rank 0.
    """

    def __init__(self, grace_s: float, controller: subprocess.Popen[bytes] | None = None) -> None:
        self.send: Callable[[Signalled], None] | None = None  # to the controller; None until registered
        self.is_startup = True  # set to False when the roles stand here
        self._grace_s = grace_s
        self._controller = controller
        self._parent = os.getppid()
        self._first: float | None = None
        self._is_urgent = False

    def on_signal(self, number: int) -> None:
        now = time.monotonic()
        is_orphan = os.getppid() != self._parent
        # The controller reads what hosts say when all have come: until then only a signal of its own reaches it.
        if self.send is None or (self.is_startup and self._controller is not None):
            self._leave_at_startup(number)
        elif self._first is None and not is_orphan:
            self._first = now
            self._tell(number, is_urgent=False, within_s=self._grace_s + CLEANUP_S + HOST_SLACK_S)
        elif not self._is_urgent and (is_orphan or (self._first is not None and now - self._first > REPEAT_S)):
            self._is_urgent = True
            self._tell(number, is_urgent=True, within_s=CLEANUP_S + HOST_SLACK_S)

    def _tell(self, number: int, is_urgent: bool, within_s: float) -> None:
        timer = threading.Timer(within_s, self._end, (number,))
        timer.daemon = True
        timer.start()
        assert self.send is not None
        with contextlib.suppress(ConnectionError):  # the run has ended, and this host is about to leave
            self.send(Signalled(signal.Signals(number).name, is_urgent))

    def _leave_at_startup(self, number: int) -> None:
        """Nobody waits for this host yet, and there is nothing to save."""
        if self._controller is not None:
            self._controller.send_signal(number)
            try:
                self._controller.wait(CLEANUP_S + HOST_SLACK_S)
            except subprocess.TimeoutExpired:
                self._controller.kill()
            time.sleep(0.5)  # until the other nodes have read its exit code
        else:  # a job is told to stop everywhere: the controller must not take this host for lost first
            time.sleep(REPEAT_S)
        os._exit(startup_exit_code(number))

    def _end(self, number: int) -> None:
        """The controller has not ended this host in time."""
        if self._controller is not None:
            self._controller.kill()
            time.sleep(1.0)  # the main thread or the service may end this process with the controller's code
        os._exit(128 + number)


def _exit_after(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
