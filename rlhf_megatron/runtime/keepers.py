"""Engine servers on other machines than the controller's: a keeper there is the parent of a server.

The keeper starts the server as the controller does on its own machine: the same launch, in another process. Requests
and weights go to the server directly. A server that is killed, or whose keeper is lost, is started again
(`rollout.max_engine_restarts`). How a keeper is reached, `Remote`, is the launcher's business.
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
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.fleet.process import TAIL_LINES, Launch, Process, Progress, Seat, keep_log
from rlhf_megatron.runtime.driver_gate import DriverGate

logger = logging.getLogger(__name__)

CALL_S = 5.0  # of a question to a keeper, which answers at once where it lives
STOP_S = 30.0  # for a server to end, with its grace period and the kernel's
_POLL_S = 0.1


class ProcessLostError(RuntimeError):
    """A process elsewhere ended, could not be started, or its machine became unreachable."""


class LateAnswerError(TimeoutError):
    """A call to a process elsewhere was not answered in time."""


class Answer(Protocol):
    """A call that runs."""

    @property
    def is_done(self) -> bool:
        """True also when its process has ended."""

    def result(self, timeout_s: float) -> Any:
        """Raises as `Remote.call`."""


class Remote(Protocol):
    """A `ServerKeeper` somewhere. Thread-safe."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the method there and return its result. Raises what it raises there, ProcessLostError and
        LateAnswerError.
        """

    def submit(self, method: str, *arguments: Any) -> Answer:
        """Make the same call without waiting for its answer."""

    def kill(self) -> None:
        """End what is left of the server. Safe to call twice."""


@codec.register
@dataclass(frozen=True)
class Report:
    """How a server is, as its keeper sees it."""

    pid: int | None = None  # on its machine
    exit_code: int | None = None
    tail: str = ""  # of its log
    address: EngineAddress | None = None  # when it is healthy
    error: str = ""  # why it could not be started
    is_late: bool = False  # that was a deadline


class ServerKeeper:
    """Parent of one server. Every call returns soon."""

    gate: DriverGate | None = None  # of its machine

    def __init__(self) -> None:
        self._launch: Launch | None = None
        self._report = Report()

    def begin(self, launch: Launch, find_seat: Callable[[], Seat], is_again: bool, timeout_s: float) -> str:
        """Start the server, and wait in a thread until it is healthy; `report` says what came of it. `find_seat` may
        raise EngineError. `is_again`: the log of the former one is kept under a number. Returns `Launch.meets_at`."""
        assert self._launch is None, "a keeper starts one server"
        if is_again:
            keep_log(launch.log)
        try:
            launch.take(find_seat())
            launch.start()
        except EngineError as error:
            self._report = Report(error=str(error))
            return ""
        except OSError as error:
            self._report = Report(error=f"{launch.name} could not be started: {error}")
            return ""
        self._launch = launch
        deadline = time.monotonic() + timeout_s
        threading.Thread(target=self._wait, args=(launch, deadline), name="server-start", daemon=True).start()
        return launch.meets_at()

    def report(self) -> Report:
        process, found = self.process, self._report
        if process is None:
            return found
        return replace(found, pid=process.pid, exit_code=process.exit_code, tail=process.tail())

    @property
    def process(self) -> Process | None:
        """The server's process; None before it was started."""
        return None if self._launch is None else self._launch.process

    def send_signal(self, number: int) -> None:
        """Send a signal to the server's process group."""
        if self.process is not None:
            self.process.send_signal(number)

    def request_stop(self) -> None:
        if self.process is not None:
            self.process.request_stop()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _wait(self, launch: Launch, deadline: float) -> None:
        try:
            drivers = "" if self.gate is None else self.gate.address
            self._report = Report(address=replace(launch.wait(deadline, None), drivers=drivers))
        except Exception as error:  # told to the controller
            logger.exception("the server has not become healthy")
            self._report = Report(error=str(error), is_late=isinstance(error, EngineTimeoutError))


class KeptProcess:
    """A server by its keeper; see `rollout.fleet.process.Process`. Thread-safe."""

    def __init__(self, name: str, log: Path, keeper: Remote, begun: Answer) -> None:
        """`begun`: the call that starts the server."""
        self.name = name
        self.log = log
        self._keeper = keeper
        self._begun = begun
        self._lost = ""  # how the keeper ended
        self._is_ended = False  # on purpose
        self._exit_code: int | None = None
        self._last = Report()

    @property
    def pid(self) -> int:
        """The process number on its machine; 0 where that is not known."""
        self.look()
        return self._last.pid or 0

    @property
    def exit_code(self) -> int | None:
        """The exit code; that of SIGKILL where the keeper has ended, and with it the server."""
        if self._exit_code is None:
            report = self.look()
            if report is not None:
                self._exit_code = report.exit_code
        return self._exit_code

    @property
    def last_pid(self) -> int | None:
        """The process number of the last report."""
        return self._last.pid

    def check_begun(self) -> None:
        """Raises EngineError where the server could not be started at all."""
        if self._begun.is_done:
            try:
                self._begun.result(CALL_S)
            except (ProcessLostError, LateAnswerError):
                pass  # found by `look`
            except Exception as error:
                raise EngineError(f"{self.name} could not be started: {type(error).__name__}: {error}") from error

    def meets_at(self, timeout_s: float) -> str:
        """Return what `ServerKeeper.begin` did. Raises EngineError."""
        try:
            return str(self._begun.result(timeout_s))
        except (ProcessLostError, LateAnswerError) as error:
            raise EngineError(f"{self.name} could not be started: {error}") from error

    def look(self) -> Report | None:
        """Ask the keeper; None where it is not there yet, is gone, or does not answer in time."""
        if self._lost or self._is_ended:
            return None
        try:
            found = self._keeper.call("report", timeout_s=CALL_S)
        except LateAnswerError:
            return None
        except ProcessLostError as error:
            self._lost, self._exit_code = str(error), -signal.SIGKILL
            return None
        assert isinstance(found, Report)
        self._last = found
        return found

    @property
    def lost(self) -> str:
        """How its keeper ended; empty while it has not been found so."""
        return self._lost

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        self.look()
        lines = self._last.tail.splitlines()
        if self._lost:
            lines.append(f"its keeper has ended: {self._lost}")
        return "\n".join(lines[-num_lines:])

    def send_signal(self, number: int) -> None:
        self._keeper.call("send_signal", number, timeout_s=CALL_S)

    def request_stop(self) -> None:
        if not self._lost and not self._is_ended:
            self._keeper.submit("request_stop")

    def stop(self) -> None:
        self._end("stop", STOP_S)

    def kill(self) -> None:
        self._end("kill", CALL_S)

    def keep_log(self) -> None:
        """The keeper of the next server does, on its machine."""

    def _end(self, method: str, timeout_s: float) -> None:
        """The server, then its keeper; what is left of the server ends with it."""
        if not self._lost and not self._is_ended:
            with contextlib.suppress(ProcessLostError, LateAnswerError):
                self._keeper.call(method, timeout_s=timeout_s)
            self._exit_code = self.exit_code
        self._is_ended = True
        self._keeper.kill()
        if self._exit_code is None:
            self._exit_code = -signal.SIGKILL


@dataclass
class LaunchElsewhere:
    """Has the name and the places of a launch, and another way to start; see `rollout.fleet.process.Launch`."""

    launch: Launch

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def log(self) -> Path:
        return self.launch.log

    @property
    def transfer_dir(self) -> Path:
        return self.launch.transfer_dir

    @property
    def meeting(self) -> str:
        return self.launch.meeting

    @meeting.setter
    def meeting(self, place: str) -> None:
        self.launch.meeting = place

    def meets_at(self) -> str:
        return ""


@dataclass
class KeptLaunch(LaunchElsewhere):
    """Starts a server by a keeper."""

    begin: Callable[[bool], tuple[Remote, Answer]]  # again? -> a new keeper, and its call `begin`
    start_s: float  # for its keeper to begin
    machine: int = 0  # see EngineAddress
    process: KeptProcess | None = None
    num_starts: int = field(default=0)
    former_pid: int | None = None  # of the server before this one

    def take(self, seat: object) -> None:
        raise AssertionError("its keeper gives it a seat")

    def start(self) -> None:
        """Returns before the server runs. Raises EngineError where its keeper cannot be told where."""
        self.former_pid = None if self.process is None else self.process.last_pid
        try:
            self.process = KeptProcess(self.name, self.log, *self.begin(self.num_starts > 0))
        except (ProcessLostError, LateAnswerError) as error:
            raise EngineError(f"{self.name} could not be started: {error}") from error
        self.num_starts += 1

    def meets_at(self) -> str:
        """Waits until its keeper has begun. Raises EngineError."""
        assert self.process is not None, "it comes after start"
        return self.process.meets_at(self.start_s)

    def wait(self, deadline: float, progress: Progress | None) -> EngineAddress:
        """Until the server is healthy. Raises EngineError."""
        assert self.process is not None, "wait comes after start"
        start = reported = time.monotonic()
        while True:
            self.process.check_begun()
            report, now = self.process.look(), time.monotonic()
            if report is not None and report.pid is not None and report.pid == self.former_pid:
                report = None  # its keeper has not begun yet
            if report is not None and report.address is not None:
                return replace(report.address, machine=self.machine)
            if report is not None and report.error:
                raise (EngineTimeoutError if report.is_late else EngineError)(report.error)
            if self.process.lost:
                raise EngineError(f"{self.name}: its keeper ended before it was ready: {self.process.lost}")
            if now > deadline:
                tail = f"the end of {self.log}:\n{report.tail}" if report is not None else "its keeper does not answer"
                raise EngineTimeoutError(
                    f"{self.name} was not ready after {now - start:.0f} s (rollout.startup_timeout_s); {tail}"
                )
            if progress is not None and now - reported >= 1.0:
                reported = now
                line = report.tail.splitlines()[-1:] if report is not None else ["waits for its keeper"]
                progress(self.name, now - start, "".join(line))
            time.sleep(_POLL_S)
