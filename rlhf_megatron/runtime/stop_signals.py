"""Being told to stop. A signal to any process of a job becomes a StopRequest in the controller.

The first signal asks: the run ends at the next place where its state is whole, within `grace_s`. A
second one, or the end of that time, ends it where it is: SystemExit in the controller, so that
`finally` clauses run, for CLEANUP_S at most. A host that gets the signal tells the controller and
stays until it is told to leave; only where the controller does not end it in time does
it end itself.
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

from rlhf_megatron.parent_process import is_orphan
from rlhf_megatron.runtime.control_messages import HostSignalNotice
from rlhf_megatron.stop import StopRequest, get_startup_exit_code

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# seconds after a signal until the agent kills the ranks that are left
STOP_LIMIT_ENV = "RLHF_MEGATRON_STOP_LIMIT_S"
# within it a host's signals are one: a scheduler signals every process, and the agent passes it on
REPEAT_S = 3.0
CONTROLLER_REPEAT_S = 0.5  # the controller gets no signal from a host that can send a message
CLEANUP_S = 12.0  # for the controller to end engines and hosts once it does not go on
HOST_SLACK_S = 5.0  # beyond it, for the controller to end this host
# Seconds until the console shows that the run stops; a run that has ended by then needs no notice.
# Whoever presses Ctrl-C sits at the console, and gets the answer at once.
NOTICE_S = 1.0
LOSS_S = 2.0  # for the group to say which host was lost


class FailureSource(Protocol):
    @property
    def failure(self) -> Exception | None: ...


class ControllerStopHandler:
    """The signal handling of the controller, also of an inline run."""

    def __init__(
        self, stop_request: StopRequest, grace_s: float, parent_pid: int | None = None
    ) -> None:
        """Make the handler, without handling signals yet; see `install_handlers`. The loop reads
        `stop_request`. The run is interrupted wherever it is `grace_s` seconds after the first
        signal.

        `parent_pid` is the host process that started this controller; None for an inline run, which
        counts as begun.
        """
        self.is_startup = parent_pid is not None  # nothing to save yet: the first signal ends it
        # the run itself; what ends it before says so by its exit code
        self.has_begun = parent_pid is None
        self._stop_request = stop_request
        self._grace_s = grace_s
        self._parent_pid = parent_pid
        self._lock = threading.Lock()
        self._stop_requested_at = 0.0
        self._last_signal_at = 0.0  # this process itself, last
        self._is_interrupted = False  # what comes now raises
        self._is_uninstalled = False
        self._main_thread_id = threading.main_thread().ident
        self._timers: list[threading.Timer] = []
        self._get_failure: Callable[[], Exception | None] = lambda: None

    def set_failure_source(self, source: FailureSource) -> None:
        """Set the source of the hosts' failure. A signal that ends the run raises `source.failure`,
        where there is one, in place of SystemExit: the failure tells more.
        """
        self._get_failure = lambda: source.failure

    @contextmanager
    def install_handlers(self) -> Iterator[None]:
        """Handle SIGNALS within the block. Must be entered on the main thread. Afterwards restore
        the former handlers; a controller with a parent is about to exit, and ignores the signals to
        keep its exit code.
        """
        before = {number: signal.signal(number, self._handle_signal) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            with self._lock:
                self._is_uninstalled = True
            for timer in self._timers:
                timer.cancel()
            for number, handler in before.items():
                # else it was told to end at once
                if signal.getsignal(number) == self._handle_signal:
                    signal.signal(number, handler if self._parent_pid is None else signal.SIG_IGN)

    def stop_for_host_signal(self, rank_label: str, notice: HostSignalNotice) -> None:
        """Stop the run for a signal that a host got: interrupt the main thread at once where the
        notice is urgent or the run has not started, else request an orderly stop. Any thread may
        call it.
        """
        number = signal.Signals[notice.signal]
        if notice.is_urgent or self.is_startup:
            self._interrupt_main_thread(number)
        else:
            self._request_stop(f"{number.name} to {rank_label}", number)

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Request an orderly stop for the first signal. For a second signal, during the start, or
        where the parent process has ended, raise the hosts' failure or SystemExit. Runs on the main
        thread.
        """
        has_lost_parent = self._parent_pid is not None and is_orphan(self._parent_pid)
        now = time.monotonic()
        last = self._last_signal_at
        self._last_signal_at = now
        is_second = (last > 0 and now - last > CONTROLLER_REPEAT_S) or (
            self._stop_request.is_requested and now - self._stop_requested_at > REPEAT_S
        )
        if has_lost_parent or is_second or self._is_interrupted or self.is_startup:
            self._raise_failure_or_exit(signal_number, LOSS_S if has_lost_parent else 0.0)
        self._request_stop(f"{signal.Signals(signal_number).name} to the controller", signal_number)

    def _request_stop(self, reason: str, signal_number: int) -> None:
        """Record the stop in the StopRequest, and start the timers that announce the stop and that
        interrupt the main thread after `grace_s`. Do nothing where a stop is requested already.
        """
        # No lock: the handler runs on the main thread between any two of its instructions.
        if self._stop_request.is_requested:
            return
        self._stop_requested_at = time.monotonic()
        self._stop_request.request(reason)
        notice_s = 0.0 if signal_number == signal.SIGINT else NOTICE_S
        self._timers = [
            threading.Timer(notice_s, self._announce_stop, (reason,)),
            threading.Timer(self._grace_s, self._interrupt_main_thread, (signal_number,)),
        ]
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def _announce_stop(self, reason: str) -> None:
        """Write to stderr that the run stops, unless the hosts have failed."""
        # else torchrun tells the ranks that are left, and the controller with rank 0, to end
        if self._get_failure() is None:
            sys.stderr.write(
                f"\n{reason}: {self._stop_request.answer}, within {self._grace_s:g} s"
                " (trainer.stop_grace_s); a second signal ends the run at once, without saving\n"
            )

    def _interrupt_main_thread(self, signal_number: int) -> None:
        """Send the signal to the main thread, from another thread, so that the main thread raises
        wherever it is; the process exits after CLEANUP_S. Only the first call has an effect.
        """
        with self._lock:
            if self._is_interrupted or self._is_uninstalled:
                return
            self._is_interrupted = True
            # where the main thread does not come back to Python
            _schedule_exit(CLEANUP_S, self._choose_exit_code(signal_number))
            assert self._main_thread_id is not None
            signal.pthread_kill(self._main_thread_id, signal_number)

    def _raise_failure_or_exit(self, signal_number: int, wait_s: float) -> None:
        """Raise the hosts' failure, if there is one within `wait_s` seconds, else SystemExit with
        the exit code of the signal. Ignore further signals, and end the process after CLEANUP_S.
        """
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        _schedule_exit(CLEANUP_S, self._choose_exit_code(signal_number))
        deadline = time.monotonic() + wait_s
        while self._get_failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        # torchrun ends all ranks when one has died
        if (failure := self._get_failure()) is not None:
            raise failure
        raise SystemExit(self._choose_exit_code(signal_number))

    def _choose_exit_code(self, signal_number: int) -> int:
        """Return 128 + signal number once the run has begun, before that the exit code of a start
        that was interrupted.
        """
        return 128 + signal_number if self.has_begun else get_startup_exit_code(signal_number)


class HostStopHandler:
    """The signal handling of a host. `process_control.handle_signals_in_thread` calls
    `handle_signal` in a thread of its own, once for each signal.
    """

    def __init__(
        self, grace_s: float, controller_process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Make the handler. `grace_s` is the time in seconds that the controller may take to end
        the run. `controller_process` is the controller that this host started, on rank 0.
        """
        # to the controller; None until registered
        self.send_notice: Callable[[HostSignalNotice], None] | None = None
        self.is_startup = True  # set to False when the roles stand here
        self._grace_s = grace_s
        self._controller_process = controller_process
        self._parent_pid = os.getppid()
        self._first_signal_at: float | None = None
        self._is_urgent = False

    def handle_signal(self, signal_number: int) -> None:
        """Send the controller a notice of the first signal, and an urgent notice of a signal more
        than REPEAT_S later or where the parent has ended. Without a channel to the controller end
        this process.
        """
        now = time.monotonic()
        has_lost_parent = is_orphan(self._parent_pid)
        # The controller reads what hosts say when all have come: until then only a signal of its
        # own reaches it.
        if self.send_notice is None or (self.is_startup and self._controller_process is not None):
            self._exit_at_startup(signal_number)
        elif self._first_signal_at is None and not has_lost_parent:
            self._first_signal_at = now
            self._notify_controller(
                signal_number,
                is_urgent=False,
                exit_after_s=self._grace_s + CLEANUP_S + HOST_SLACK_S,
            )
        elif not self._is_urgent and (
            has_lost_parent
            or (self._first_signal_at is not None and now - self._first_signal_at > REPEAT_S)
        ):
            self._is_urgent = True
            self._notify_controller(
                signal_number, is_urgent=True, exit_after_s=CLEANUP_S + HOST_SLACK_S
            )

    def _notify_controller(self, signal_number: int, is_urgent: bool, exit_after_s: float) -> None:
        """Send the notice to the controller, and end this process after `exit_after_s` seconds
        where the controller has not ended it by then.
        """
        timer = threading.Timer(exit_after_s, self._exit_unserved, (signal_number,))
        timer.daemon = True
        timer.start()
        assert self.send_notice is not None
        # the run has ended, and this host is about to leave
        with contextlib.suppress(ConnectionError):
            self.send_notice(HostSignalNotice(signal.Signals(signal_number).name, is_urgent))

    def _exit_at_startup(self, signal_number: int) -> None:
        """End this process with the exit code of an interrupted start: after the controller that
        this host started has got the signal and ended, else after REPEAT_S. No process waits for
        this host yet, and there is nothing to save.
        """
        if self._controller_process is not None:
            self._controller_process.send_signal(signal_number)
            try:
                self._controller_process.wait(CLEANUP_S + HOST_SLACK_S)
            except subprocess.TimeoutExpired:
                self._controller_process.kill()
            time.sleep(0.5)  # until the other nodes have read its exit code
        else:
            # a job is told to stop everywhere: the controller must not take this host
            # for lost first
            time.sleep(REPEAT_S)
        os._exit(get_startup_exit_code(signal_number))

    def _exit_unserved(self, signal_number: int) -> None:
        """Kill the controller that this host started and end this process, because the controller
        has not ended this host in time.
        """
        if self._controller_process is not None:
            self._controller_process.kill()
            # the main thread or the service may end this process with the controller's code
            time.sleep(1.0)
        os._exit(128 + signal_number)


def _schedule_exit(delay_s: float, exit_code: int) -> None:
    """Start a daemon timer that ends this process with `exit_code` after `delay_s` seconds."""
    timer = threading.Timer(delay_s, os._exit, (exit_code,))
    timer.daemon = True
    timer.start()
