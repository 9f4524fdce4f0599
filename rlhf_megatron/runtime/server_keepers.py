"""Engine servers on other machines than the controller's: a keeper there is the parent of a server.

The keeper starts the server as the controller does on its own machine: the same launch, in another
process. Requests and weights go to the server directly. A server that is killed, or whose keeper is
lost, is started again (`rollout.max_engine_restarts`). How a keeper is reached, `RemoteHandle`, is
the launcher's business.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rlhf_megatron.data import codec
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineKilledError,
    EngineTimeoutError,
)
from rlhf_megatron.rollout.fleet.server_process import (
    TAIL_LINES,
    ServerLaunch,
    ServerProcessHandle,
    ServerSeat,
    StartProgress,
    archive_log,
)
from rlhf_megatron.runtime.driver_gate import DriverGate

logger = logging.getLogger(__name__)

CALL_S = 5.0  # of a question to a keeper, which answers at once where it lives
STOP_S = 30.0  # for a server to end, with its grace period and the kernel's
_POLL_S = 0.1


class RemoteProcessLostError(RuntimeError):
    """A process elsewhere ended, could not be started, or its machine became unreachable."""


class LateAnswerError(TimeoutError):
    """A call to a process elsewhere was not answered in time."""


class CallHandle(Protocol):
    """A call that was made and may not have an answer yet."""

    @property
    def is_done(self) -> bool:
        """Return whether the call has an answer, or has failed because the process ended."""

    def wait_for_result(self, timeout_s: float) -> Any:
        """Wait for the call's result and return the result. Raise the errors that
        `RemoteHandle.call_method` raises.
        """


class RemoteHandle(Protocol):
    """A handle of a `ServerKeeper` in another process. Thread-safe."""

    def call_method(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the method in the other process and return its result. Raise the exception that the
        method raises there, RemoteProcessLostError, or LateAnswerError after `timeout_s`.
        """

    def submit_call(self, method: str, *arguments: Any) -> CallHandle:
        """Make the same call without waiting, and return a handle of the answer."""

    def kill(self) -> None:
        """Kill the keeper and the rest of its server. Safe to call twice."""


@codec.register("Report")
@dataclass(frozen=True)
class ServerReport:
    """The state of a server, as its keeper sees it."""

    pid: int | None = None  # on its machine
    exit_code: int | None = None
    tail: str = ""  # of its log
    address: EngineAddress | None = None  # when it is healthy
    error: str = ""  # why it could not be started
    is_late: bool = False  # that was a deadline
    is_killed: bool = False  # a signal ended the server before it was ready


class ServerKeeper:
    """The parent process's side of one server. Every call returns soon, but `stop`, which waits for
    the server's end.
    """

    driver_gate: DriverGate | None = None  # of its machine

    def __init__(self) -> None:
        """Keep no server yet; `start_server` starts one."""
        self._launch: ServerLaunch | None = None
        self._report = ServerReport()

    def start_server(
        self,
        launch: ServerLaunch,
        find_seat: Callable[[], ServerSeat],
        is_restart: bool,
        timeout_s: float,
    ) -> str:
        """Start the server, and wait in a thread until it is healthy; `report` tells the outcome,
        also the error of a failed start. Return the launch's rendezvous address, or "" where the
        start failed.

        `find_seat` may raise EngineError. With `is_restart` the log of the former server is kept
        under a number. `timeout_s` limits the time until the server is healthy.
        """
        assert self._launch is None, "a keeper starts one server"
        if is_restart:
            archive_log(launch.log)
        try:
            launch.take_seat(find_seat())
            launch.start()
        except EngineError as error:
            self._report = ServerReport(error=str(error))
            return ""
        except OSError as error:
            self._report = ServerReport(error=f"{launch.name} could not be started: {error}")
            return ""
        self._launch = launch
        deadline = time.monotonic() + timeout_s
        threading.Thread(
            target=self._wait_until_healthy,
            args=(launch, deadline),
            name="server-start",
            daemon=True,
        ).start()
        return launch.get_rendezvous_address()

    def report(self) -> ServerReport:
        """Return the state of the server: process number, exit code, end of the log, and the
        address or the error.
        """
        process = self.server_process
        found = self._report
        if process is None:
            return found
        return replace(
            found, pid=process.pid, exit_code=process.exit_code, tail=process.read_log_tail()
        )

    @property
    def server_process(self) -> ServerProcessHandle | None:
        """Return the server's process, or None before the server was started."""
        return None if self._launch is None else self._launch.process

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the server's process group, if the server was started."""
        if self.server_process is not None:
            self.server_process.send_signal(signal_number)

    def request_stop(self) -> None:
        """Ask the server to stop, without waiting, if the server was started."""
        if self.server_process is not None:
            self.server_process.request_stop()

    def stop(self) -> None:
        """Stop the server and wait until it has ended, if the server was started."""
        if self.server_process is not None:
            self.server_process.stop()

    def kill(self) -> None:
        """Kill the server, if the server was started."""
        if self.server_process is not None:
            self.server_process.kill()

    def _wait_until_healthy(self, launch: ServerLaunch, deadline: float) -> None:
        """Wait, in a thread, until the server is healthy or `deadline` has passed, and record the
        address or the error in the report.
        """
        try:
            drivers = "" if self.driver_gate is None else self.driver_gate.address
            self._report = ServerReport(
                address=replace(launch.wait_until_healthy(deadline, None), drivers=drivers)
            )
        except Exception as error:  # told to the controller
            logger.exception("the server has not become healthy")
            self._report = ServerReport(
                error=str(error),
                is_late=isinstance(error, EngineTimeoutError),
                is_killed=isinstance(error, EngineKilledError),
            )


class RemoteServerProcess:
    """The process of a server, reached through its keeper; see
    `rollout.fleet.server_process.ServerProcessHandle`. Thread-safe.
    """

    def __init__(self, name: str, log: Path, keeper: RemoteHandle, start_call: CallHandle) -> None:
        """Keep the handle of a server whose keeper is already called. `start_call` is the call that
        starts the server.
        """
        self.name = name
        self.log = log
        self._keeper = keeper
        self._start_call = start_call
        self._loss_reason = ""  # how the keeper ended
        self._is_stopped = False  # on purpose
        self._exit_code: int | None = None
        self._last_report = ServerReport()

    @property
    def pid(self) -> int:
        """Fetch a report and return the server's process number on its machine, or 0 where the
        number is not known.
        """
        self.fetch_report()
        return self._last_report.pid or 0

    @property
    def exit_code(self) -> int | None:
        """Return the server's exit code, or None while the server runs. Fetch a report for it. A
        server whose keeper has ended counts as killed by SIGKILL.
        """
        if self._exit_code is None:
            report = self.fetch_report()
            if report is not None:
                self._exit_code = report.exit_code
        return self._exit_code

    @property
    def last_pid(self) -> int | None:
        """Return the process number in the last report, without fetching a new report."""
        return self._last_report.pid

    def raise_start_error(self) -> None:
        """Raise EngineError if the call that starts the server has raised on the keeper. A lost
        keeper raises nothing here; `fetch_report` finds it.
        """
        if self._start_call.is_done:
            try:
                self._start_call.wait_for_result(CALL_S)
            except (RemoteProcessLostError, LateAnswerError):
                pass  # found by `fetch_report`
            except Exception as error:
                raise EngineError(
                    f"{self.name} could not be started: {type(error).__name__}: {error}"
                ) from error

    def wait_for_rendezvous_address(self, timeout_s: float) -> str:
        """Wait until the keeper has started the server, and return the rendezvous address that
        `ServerKeeper.start_server` returned. Raise EngineError where the keeper is lost or late.
        """
        try:
            return str(self._start_call.wait_for_result(timeout_s))
        except (RemoteProcessLostError, LateAnswerError) as error:
            raise EngineError(f"{self.name} could not be started: {error}") from error

    def fetch_report(self) -> ServerReport | None:
        """Return a new report from the keeper, or None where the keeper is not there yet, has
        ended, or does not answer in CALL_S. Record a keeper that has ended in `loss_reason` and the
        exit code.
        """
        if self._loss_reason or self._is_stopped:
            return None
        try:
            found = self._keeper.call_method("report", timeout_s=CALL_S)
        except LateAnswerError:
            return None
        except RemoteProcessLostError as error:
            self._loss_reason = str(error)
            self._exit_code = -signal.SIGKILL
            return None
        assert isinstance(found, ServerReport)
        self._last_report = found
        return found

    @property
    def loss_reason(self) -> str:
        """Return how the keeper ended, or "" while no call has found the keeper lost."""
        return self._loss_reason

    def read_log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """Fetch a report and return the last lines of the server's log, with a line about the
        keeper's end where the keeper is lost.
        """
        self.fetch_report()
        lines = self._last_report.tail.splitlines()
        if self._loss_reason:
            lines.append(f"its keeper has ended: {self._loss_reason}")
        return "\n".join(lines[-num_lines:])

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the server's process group. Raise RemoteProcessLostError or
        LateAnswerError where the keeper does not answer.
        """
        self._keeper.call_method("send_signal", signal_number, timeout_s=CALL_S)

    def request_stop(self) -> None:
        """Ask the server to stop, without waiting. Do nothing where the server or its keeper has
        ended.
        """
        if not self._loss_reason and not self._is_stopped:
            self._keeper.submit_call("request_stop")

    def stop(self) -> None:
        """Stop the server within STOP_S, then kill its keeper."""
        self._end_server_and_keeper("stop", STOP_S)

    def kill(self) -> None:
        """Kill the server, then its keeper."""
        self._end_server_and_keeper("kill", CALL_S)

    def archive_log(self) -> None:
        """Do nothing: the keeper of the next server archives the log on its machine."""

    def _end_server_and_keeper(self, method: str, timeout_s: float) -> None:
        """Call `method` ("stop" or "kill") of the keeper, then kill the keeper, with which the rest
        of the server ends. Raise nothing where the keeper is lost.
        """
        if not self._loss_reason and not self._is_stopped:
            with contextlib.suppress(RemoteProcessLostError, LateAnswerError):
                self._keeper.call_method(method, timeout_s=timeout_s)
            self._exit_code = self.exit_code
        self._is_stopped = True
        self._keeper.kill()
        if self._exit_code is None:
            self._exit_code = -signal.SIGKILL


@dataclass
class RemoteLaunch:
    """A launch with the name and the paths of another launch, and another way to start; see
    `rollout.fleet.server_process.ServerLaunch`.
    """

    launch: ServerLaunch

    @property
    def name(self) -> str:
        """Return the name of the server."""
        return self.launch.name

    @property
    def log(self) -> Path:
        """Return the path of the server's log."""
        return self.launch.log

    @property
    def transfer_dir(self) -> Path:
        """Return the directory through which weights come."""
        return self.launch.transfer_dir

    @property
    def rendezvous_address(self) -> str:
        """Return the rendezvous address that the wrapped launch was given."""
        return self.launch.rendezvous_address

    @rendezvous_address.setter
    def rendezvous_address(self, address: str) -> None:
        """Set the rendezvous address of the wrapped launch."""
        self.launch.rendezvous_address = address

    def get_rendezvous_address(self) -> str:
        """Return "": this launch has no rendezvous address of its own."""
        return ""


@dataclass
class KeeperLaunch(RemoteLaunch):
    """A launch that starts its server by a keeper."""

    # again? -> a new keeper, and its call `start_keeper`
    start_keeper: Callable[[bool], tuple[RemoteHandle, CallHandle]]
    keeper_start_timeout_s: float  # for its keeper to begin
    machine: int = 0  # see EngineAddress
    process: RemoteServerProcess | None = None
    num_starts: int = field(default=0)
    previous_pid: int | None = None  # of the server before this one

    def take_seat(self, seat: object) -> None:
        """Raise AssertionError: the keeper assigns the seat on its machine."""
        raise AssertionError("its keeper gives it a seat")

    def start(self) -> None:
        """Call a new keeper that starts the server, and return before the server runs. Raise
        EngineError where the keeper cannot be called.
        """
        self.previous_pid = None if self.process is None else self.process.last_pid
        try:
            self.process = RemoteServerProcess(
                self.name, self.log, *self.start_keeper(self.num_starts > 0)
            )
        except (RemoteProcessLostError, LateAnswerError) as error:
            raise EngineError(f"{self.name} could not be started: {error}") from error
        self.num_starts += 1

    def get_rendezvous_address(self) -> str:
        """Wait until the keeper has started the server, for keeper_start_timeout_s at most, and
        return the server's rendezvous address. Raise EngineError where the keeper is lost or late.
        """
        assert self.process is not None, "it comes after start"
        return self.process.wait_for_rendezvous_address(self.keeper_start_timeout_s)

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Wait until the server is healthy and return its address. Raise EngineError where the
        server fails, EngineKilledError where the server or its keeper was killed,
        EngineTimeoutError at `deadline` (of time.monotonic). Call `progress` about once a second.
        """
        assert self.process is not None, "wait comes after start"
        start = reported = time.monotonic()
        while True:
            self.process.raise_start_error()
            report = self.process.fetch_report()
            now = time.monotonic()
            if report is not None and report.pid is not None and report.pid == self.previous_pid:
                report = None  # its keeper has not begun yet
            if report is not None and report.address is not None:
                return replace(report.address, machine=self.machine)
            if report is not None and report.error:
                raise _make_start_error(report)
            if self.process.loss_reason:
                raise EngineKilledError(
                    f"{self.name}: its keeper ended before it was ready: {self.process.loss_reason}"
                )
            if now > deadline:
                tail = (
                    f"the end of {self.log}:\n{report.tail}"
                    if report is not None
                    else "its keeper does not answer"
                )
                raise EngineTimeoutError(
                    f"{self.name} was not ready after {now - start:.0f} s"
                    f" (rollout.startup_timeout_s); {tail}"
                )
            if progress is not None and now - reported >= 1.0:
                reported = now
                line = (
                    report.tail.splitlines()[-1:]
                    if report is not None
                    else ["waits for its keeper"]
                )
                progress(self.name, now - start, "".join(line))
            time.sleep(_POLL_S)


def _make_start_error(report: ServerReport) -> EngineError:
    """Return the error of a start that failed, of the kind that the keeper has seen."""
    if report.is_late:
        return EngineTimeoutError(report.error)
    if report.is_killed:
        return EngineKilledError(report.error)
    return EngineError(report.error)
