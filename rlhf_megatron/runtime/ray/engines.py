"""Engines under Ray: an actor each, on the machine of its bundle, where the server is its child.

    driver --- actor of engine0 --- server         The server ends with its actor, the actor with the driver.
           `-- actor of engine1 --- server         Requests and weights go to the servers directly.

The actor starts the server as the controller does under the other launchers: the same launch, in another process. A
server that is killed, or whose actor is lost, is started again in a new actor (`rollout.max_engine_restarts`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.fleet.process import Launch, Progress, keep_log
from rlhf_megatron.runtime.processes import machine_id
from rlhf_megatron.runtime.ray.cluster import (
    Cluster,
    LateAnswerError,
    ProcessLostError,
    RemoteObject,
    Task,
    Whereabouts,
    whereabouts,
)
from rlhf_megatron.runtime.ray.places import Seating, bundle_of_engine, must_share_machine, seat_of

logger = logging.getLogger(__name__)

CALL_S = 5.0  # of a question to an actor, which answers at once where it lives
STOP_S = 30.0  # for a server to end, with its grace period and the kernel's
_POLL_S = 0.1
_TAIL_LINES = 20


@dataclass(frozen=True)
class Report:
    """How a server is, as its actor sees it."""

    pid: int | None = None  # on its machine
    exit_code: int | None = None
    tail: str = ""  # of its log
    address: EngineAddress | None = None  # when it is healthy
    error: str = ""  # why it could not be started
    is_late: bool = False  # that was a deadline


class ServerKeeper:
    """In the actor's process: parent of one server. Every call returns soon."""

    def __init__(self, directory: str) -> None:
        """`directory`: the driver's, from which relative paths of the settings count, where this machine has it."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        self._launch: Launch | None = None
        self._report = Report()

    def begin(self, launch: Launch, seating: Seating, is_again: bool, timeout_s: float) -> None:
        """Start the server, and wait in a thread until it is healthy; `report` says what came of it. `is_again`: the
        log of the former one is kept under a number."""
        assert self._launch is None, "an actor starts one server"
        if is_again:
            keep_log(launch.log)
        try:
            launch.take(seat_of(whereabouts(), seating))
            launch.start()
        except EngineError as error:
            self._report = Report(error=str(error))
            return
        except OSError as error:
            self._report = Report(error=f"{seating.name} could not be started: {error}")
            return
        self._launch = launch
        deadline = time.monotonic() + timeout_s
        threading.Thread(target=self._wait, args=(launch, deadline), name="server-start", daemon=True).start()

    def report(self) -> Report:
        process = None if self._launch is None else self._launch.process
        if process is None:
            return self._report
        found = self._report
        return replace(found, pid=process.pid, exit_code=process.exit_code, tail=process.tail())

    def send_signal(self, number: int) -> None:
        """To the server's process group."""
        if self._launch is not None and self._launch.process is not None:
            self._launch.process.send_signal(number)

    def request_stop(self) -> None:
        if self._launch is not None and self._launch.process is not None:
            self._launch.process.request_stop()

    def stop(self) -> None:
        if self._launch is not None and self._launch.process is not None:
            self._launch.process.stop()

    def kill(self) -> None:
        if self._launch is not None and self._launch.process is not None:
            self._launch.process.kill()

    def _wait(self, launch: Launch, deadline: float) -> None:
        try:
            self._report = Report(address=launch.wait(deadline, None))
        except Exception as error:  # told to the driver
            logger.exception("the server has not become healthy")
            self._report = Report(error=str(error), is_late=isinstance(error, EngineTimeoutError))


class ActorProcess:
    """A server by its actor; see `rollout.fleet.process.Process`. Thread-safe."""

    def __init__(self, name: str, log: Path, keeper: RemoteObject, begun: Task) -> None:
        """`begun`: the call that starts the server."""
        self.name = name
        self.log = log
        self._keeper = keeper
        self._begun = begun
        self._lost = ""  # how the actor ended
        self._is_ended = False  # on purpose
        self._exit_code: int | None = None
        self._last = Report()

    @property
    def pid(self) -> int:
        """On its machine; 0 where that is not known."""
        self.look()
        return self._last.pid or 0

    @property
    def exit_code(self) -> int | None:
        """That of SIGKILL where its actor has ended, and so the server."""
        if self._exit_code is None:
            report = self.look()
            if report is not None:
                self._exit_code = report.exit_code
        return self._exit_code

    def check_begun(self) -> None:
        """Raises EngineError where the server could not be started at all."""
        if self._begun.is_done:
            try:
                self._begun.result(CALL_S)
            except (ProcessLostError, LateAnswerError):
                pass  # found by `look`
            except Exception as error:
                raise EngineError(f"{self.name} could not be started: {type(error).__name__}: {error}") from error

    def look(self) -> Report | None:
        """None where the actor is not there yet, is not any more, or does not answer in time."""
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
        """How its actor ended; empty while it has not been found so."""
        return self._lost

    def tail(self, num_lines: int = _TAIL_LINES) -> str:
        self.look()
        lines = self._last.tail.splitlines()
        if self._lost:
            lines.append(f"its actor has ended: {self._lost}")
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
        """The actor of the next server does, on its machine."""

    def _end(self, method: str, timeout_s: float) -> None:
        """The server, then the actor; what is left of the server ends with it."""
        if not self._lost and not self._is_ended:
            with contextlib.suppress(ProcessLostError, LateAnswerError):
                self._keeper.call(method, timeout_s=timeout_s)
            self._exit_code = self.exit_code
        self._is_ended = True
        self._keeper.kill()
        if self._exit_code is None:
            self._exit_code = -signal.SIGKILL


@dataclass
class ActorLaunch:
    """How a server is started by an actor; see `rollout.fleet.process.Launch`."""

    launch: Launch
    make: Callable[[], RemoteObject]
    seating: Callable[[], Seating]
    timeout_s: float
    process: ActorProcess | None = None
    num_starts: int = field(default=0)

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def log(self) -> Path:
        return self.launch.log

    def take(self, seat: object) -> None:
        raise AssertionError("Ray gives it a seat")

    def start(self) -> None:
        """Returns before the actor has a process. Raises EngineError where a rank that it is to see has none."""
        try:
            seating = self.seating()
        except (ProcessLostError, LateAnswerError) as error:
            raise EngineError(f"{self.name} could not be started: {error}") from error
        keeper = self.make()
        begun = keeper.submit("begin", self.launch, seating, self.num_starts > 0, self.timeout_s)
        self.process = ActorProcess(self.name, self.log, keeper, begun)
        self.num_starts += 1

    def wait(self, deadline: float, progress: Progress | None) -> EngineAddress:
        """Until the server is healthy. Raises EngineError."""
        assert self.process is not None, "wait comes after start"
        start = reported = time.monotonic()
        while True:
            self.process.check_begun()
            report, now = self.process.look(), time.monotonic()
            if report is not None and report.address is not None:
                return report.address
            if report is not None and report.error:
                raise (EngineTimeoutError if report.is_late else EngineError)(report.error)
            if self.process.lost:
                raise EngineError(f"{self.name}: its actor ended before it was ready: {self.process.lost}")
            if now > deadline:
                tail = f"the end of {self.log}:\n{report.tail}" if report is not None else "its actor does not answer"
                raise EngineTimeoutError(
                    f"{self.name} was not ready after {now - start:.0f} s (rollout.startup_timeout_s); {tail}"
                )
            if progress is not None and now - reported >= 1.0:
                reported = now
                line = report.tail.splitlines()[-1:] if report is not None else ["waits for an actor"]
                progress(self.name, now - start, "".join(line))
            time.sleep(_POLL_S)


class RayEngines:
    """A `rollout.fleet.process.Place`: each launch that it is given goes to an actor in its bundle."""

    def __init__(
        self,
        cluster: Cluster,
        rollout: RolloutConfig,
        num_machines: int,
        num_cpus: float,
        num_gpus: int,
        ranks: Callable[[], Sequence[Whereabouts]],
        environment: Mapping[str, str],
    ) -> None:
        """`num_cpus`, `num_gpus`: of an engine; 0 GPUs on a CPU. `ranks`: where those of the trainer run, in order; it
        waits until they do.
        `environment`: of the actors, and so of the servers."""
        self._cluster = cluster
        self._rollout = rollout
        self._num_machines = num_machines
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._ranks = ranks
        self._environment = environment
        self._num_placed = 0

    def __call__(self, launch: Launch) -> Launch:
        index = self._num_placed
        self._num_placed += 1
        rollout, is_shared = self._rollout, self._rollout.colocated

        def make() -> RemoteObject:
            return self._cluster.start(
                launch.name,
                ServerKeeper,
                (os.getcwd(),),
                bundle=bundle_of_engine(self._num_machines, is_shared, index),
                num_cpus=self._num_cpus,
                num_gpus=0 if is_shared else self._num_gpus,
                environment=self._environment,
            )

        def seating() -> Seating:
            return Seating(
                launch.name,
                machine_id(),
                tuple(self._ranks()),
                must_share_machine(rollout),
                self._num_gpus if is_shared else 0,
                index // self._num_machines * self._num_gpus,
            )

        return ActorLaunch(launch, make, seating, rollout.startup_timeout_s)
