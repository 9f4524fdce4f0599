"""Server processes: a log file each, awaited until healthy, started again by name. They and their
children end with this process, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf_megatron.config.cuda_environment import remove_expandable_segments
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineKilledError,
    EngineTimeoutError,
)
from rlhf_megatron.write_errors import explain_write_errors

# Reads until this process says that all is well, or has ended and with it the other
# end of the pipe.
_REAPER_SCRIPT = """trap '' TERM INT HUP USR1; read -r word || kill -s KILL -- "-$1" """
# Begins only when it is watched, and is deaf to the signal with which a scheduler tells a
# whole job to stop.
_GUARDED_START_SCRIPT = """trap '' USR1; read -r word && exec "$@" </dev/null"""

_TERM_GRACE_S = 5.0
# a killed process ends at once unless it hangs in the kernel (a device, a network file system)
_KILL_GRACE_S = 10.0
_POLL_S = 0.05
_EXIT_DELAY_S = 0.5  # a process that is killed closes its connections a moment before it has ended
TAIL_LINES = 20
_ENDING_LINES = 3
HIDDEN_TOKEN = "********"
LOOPBACK = "127.0.0.1"


def wrap_for_reaper(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` only after its `ChildReaper` has given the signal
    to go.
    """
    return ["/bin/sh", "-c", _GUARDED_START_SCRIPT, "sh", *command]


class ChildReaper:
    """A shell that kills the process group of a child when this process ends. It costs a
    pipe and 1 MB.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        """Watch `child` and let it begin. `child` must be started with `wrap_for_reaper`, as leader
        of its process group and with a pipe as its standard input.
        """
        self._shell_process = subprocess.Popen(
            ["/bin/sh", "-c", _REAPER_SCRIPT, "sh", str(child.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _send_go_signal(child)

    def end_watch(self) -> None:
        """End the watching shell, after the child's process group has ended, whose number may soon
        belong to other processes. Safe to call twice.
        """
        _send_go_signal(self._shell_process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell_process.wait(1.0)


def _send_go_signal(process: subprocess.Popen[bytes]) -> None:
    """Write the line that the shell script waits for, and close its standard input; ignore a
    process that has ended or got the line before.
    """
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or heard it before
        process.stdin.write(b"go\n")
        process.stdin.close()


StartProgress = Callable[[str, float, str], None]
"""Called about once a second while a server starts: its name, seconds waited, the last
line of its log.
"""

logger = logging.getLogger(__name__)

_running_servers: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def make_throttled_progress(
    report_line: Callable[[str], None], check_stop: Callable[[], None], interval_s: float = 10.0
) -> StartProgress:
    """Return a progress callback that reports a line for each server every `interval_s` seconds. It
    calls `check_stop` each time; an error of `check_stop` ends the start.
    """
    said: dict[str, float] = {}

    def report_progress(name: str, seconds: float, line: str) -> None:
        """Report the line where the interval has passed for this server."""
        check_stop()
        if seconds - said.get(name, 0.0) >= interval_s:
            said[name] = seconds
            report_line(f"{name} starts ({seconds:.0f} s) {line[-100:]}")

    return report_progress


class ServerProcess:
    """A child in a process group of its own, which ends with this process; its output goes to the
    file `log`, which only this user can read.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        secret_token: str = "",
    ) -> None:
        """Start the command, with `env` added to this process's environment. `secret_token` is
        masked in the log texts that this object returns, since some servers log their arguments.
        """
        self.name = name
        self.log = log
        self._secret_token = secret_token
        log.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(
            os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab"
        ) as out:
            self._process = subprocess.Popen(
                wrap_for_reaper(command),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=make_import_environment({**remove_expandable_segments(os.environ), **env}),
                start_new_session=True,
            )
        self._reaper = ChildReaper(self._process)
        _running_servers.add(self)

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of the process group."""
        return self._process.pid

    def send_signal(self, signal_number: int) -> None:
        """Send the signal to the process group."""
        os.killpg(self.pid, signal_number)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def read_log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log, with the token masked."""
        return "\n".join(self.read_log().splitlines()[-num_lines:])

    def read_log(self, start_byte: int = 0) -> str:
        """Return the log from byte `start_byte` on, with the token masked; "" where it cannot be
        read.
        """
        try:
            text = self.log.read_bytes()[start_byte:].decode(errors="replace")
        except OSError:
            return ""
        return text.replace(self._secret_token, HIDDEN_TOKEN) if self._secret_token else text

    def hide_token_in_log(self) -> None:
        """Overwrite the token with asterisks in the log file, as far as it is written. The server
        only appends.
        """
        if self._secret_token:
            with contextlib.suppress(OSError), self.log.open("r+b") as file:
                data = file.read()
                token = self._secret_token.encode()
                at = -1
                while (at := data.find(token, at + 1)) >= 0:
                    os.pwrite(file.fileno(), b"*" * len(token), at)

    def request_stop(self) -> None:
        """Send SIGTERM to the process group and return at once."""
        if self not in _running_servers:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)  # a stopped process would not see it

    def stop(self) -> None:
        """Send SIGTERM to the process group, wait a few seconds for its end, and kill what is left.
        Safe to call twice.
        """
        if self not in _running_servers:
            return  # its number may belong to somebody else by now
        self.request_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process group and wait for its end, logging an error where it does
        not come. Safe to call twice.
        """
        if self not in _running_servers:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            logger.error(
                "%s (process %d) was killed %g s ago and has not ended",
                self.name,
                self.pid,
                _KILL_GRACE_S,
            )
        self._reaper.end_watch()
        _running_servers.discard(self)

    def archive_log(self) -> None:
        """Rename the log to a numbered name; the next process of this name begins a new log."""
        archive_log(self.log)


class ServerProcessHandle(Protocol):
    """A server, on this machine (`ServerProcess`) or another."""

    name: str

    @property
    def log(self) -> Path:
        """Return the path of the log, on the server's machine."""

    @property
    def pid(self) -> int:
        """Return the process id, on the machine of the server."""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while the server runs."""

    def read_log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log."""

    def send_signal(self, signal_number: int) -> None:
        """Send the signal to the process group."""

    def request_stop(self) -> None:
        """Ask the server to stop, and return at once."""

    def stop(self) -> None:
        """Stop the server and wait for its end. Safe to call twice."""

    def kill(self) -> None:
        """Kill the server at once. Safe to call twice."""

    def archive_log(self) -> None:
        """Rename the log to a numbered name."""


def stop_processes(processes: Iterable[ServerProcessHandle]) -> None:
    """Stop all processes; their grace periods run at the same time."""
    processes = list(processes)
    for process in processes:
        process.request_stop()
    for process in processes:
        process.stop()


@atexit.register
def _stop_running_servers() -> None:
    """Stop all servers of this process that still run, at its exit."""
    stop_processes(_running_servers)


@dataclass(frozen=True)
class ServerSeat:
    """The machine and devices of a server, where somebody else than
    `EngineServers` chooses them.
    """

    # of its machine, as the trainer reaches it; another one than the trainer's unless loopback
    address: str = LOOPBACK
    env: Mapping[str, str] = field(default_factory=dict)  # its devices


class ServerLaunch(Protocol):
    """A server that can be started and awaited. Before its start it can be pickled, and started in
    another process.
    """

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def transfer_dir(self) -> Path:
        """Return the directory through which the server gets its weights."""

    @property
    def process(self) -> ServerProcessHandle | None:
        """Return the process; None before `start`."""

    # of a part of a server that spans machines: what the first part said that
    # it `get_rendezvous_address`
    rendezvous_address: str

    def take_seat(self, seat: ServerSeat) -> None:
        """Set the machine and the devices of the server, before `start`. Raise EngineError where
        the server cannot run there.
        """

    def get_rendezvous_address(self) -> str:
        """Return, after `start`, the HOST:PORT at which other parts of this server find it; ""
        where it has none.
        """

    def start(self) -> None:
        """Start a new process with a new token and a new port, and return without waiting."""

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Wait until the server is healthy, at most until `deadline` of time.monotonic(), and
        return its address. Raise EngineError.
        """


LaunchPlacement = Callable[[ServerLaunch], ServerLaunch]
"""Given how a server is started in this process, how it is started where it shall run."""


def launch_here(launch: ServerLaunch) -> ServerLaunch:
    """Return the launch unchanged, so that the server starts on this machine as a child of this
    process: the plainest `LaunchPlacement`.
    """
    return launch


class EngineServers:
    """Servers that were started together. A context manager that stops them at its end.
    Thread-safe. `num_start_restarts` counts the servers that were killed while they started, and
    were started again.
    """

    def __init__(
        self,
        launches: Sequence[ServerLaunch],
        startup_timeout_s: float,
        progress: StartProgress | None = None,
        max_restarts: int = 0,
    ) -> None:
        """Start all servers and wait until they are healthy. A server that is killed while it
        starts is started again, `max_restarts` times at most over all servers. Raise EngineError
        where one fails; no server is left running then.
        """
        self.num_start_restarts = 0
        self._launch_by_name = {launch.name: launch for launch in launches}
        self._address_by_name: dict[str, EngineAddress] = {}
        self._startup_timeout_s = startup_timeout_s
        self._lock = threading.Lock()
        self._is_stopped = False
        deadline = time.monotonic() + startup_timeout_s
        try:
            for launch in launches:
                launch.start()
            for launch in launches:
                self._address_by_name[launch.name] = self._wait_with_restarts(
                    launch, deadline, progress, max_restarts
                )
        except BaseException:
            self.stop()
            raise

    def _wait_with_restarts(
        self,
        launch: ServerLaunch,
        deadline: float,
        progress: StartProgress | None,
        max_restarts: int,
    ) -> EngineAddress:
        """Wait until a server that was started is healthy, and return its address. Start the server
        again, with a new deadline, as often as it is killed meanwhile and `max_restarts` allows.
        """
        while True:
            try:
                return launch.wait_until_healthy(deadline, progress)
            except EngineKilledError as error:
                if self.num_start_restarts >= max_restarts:
                    raise EngineError(
                        f"{error}\nIt is not started again: rollout.max_engine_restarts"
                        f" ({max_restarts}) is used up. Find out what killed it (`dmesg` names what"
                        " the kernel ended because memory ran out), or allow more restarts."
                    ) from error
                self.num_start_restarts += 1
                logger.warning(
                    "%s was killed while it started, and is started again (%d of %d): %s",
                    *(launch.name, self.num_start_restarts, max_restarts, error),
                )
            self._start_again(launch)
            deadline = time.monotonic() + self._startup_timeout_s

    def _start_again(self, launch: ServerLaunch) -> None:
        """Kill what is left of a server, keep its log under a number, and start the server again,
        without waiting. Raise EngineError where the servers are being stopped.
        """
        old_process = self.get_process(launch.name)
        old_process.kill()
        old_process.archive_log()
        with self._lock:
            if self._is_stopped:
                raise EngineError(
                    f"{launch.name} is not started again: the servers of the run are being stopped."
                )
            launch.start()

    @property
    def processes(self) -> tuple[ServerProcessHandle, ...]:
        """Return the current process of each server; a restart replaces it."""
        return tuple(
            launch.process for launch in self._launch_by_name.values() if launch.process is not None
        )

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        """Return the current address of each server; a restart replaces it."""
        return tuple(self._address_by_name.values())

    def __enter__(self) -> EngineServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all servers for good; they are not restarted afterwards. Safe to call twice."""
        with self._lock:
            self._is_stopped = True
        stop_processes(self.processes)

    def get_process(self, name: str) -> ServerProcessHandle:
        """Return the current process of the server of this name."""
        process = self._launch_by_name[name].process
        assert process is not None, f"{name} was never started"
        return process

    def describe_exit(self, name: str) -> str | None:
        """Return how the server of this name ended, with the end of its log; None while it runs."""
        process = self.get_process(name)
        if process.exit_code is None:
            return None
        return (
            f"it exited with code {process.exit_code}; the end of"
            f" {process.log}:\n{process.read_log_tail(_ENDING_LINES)}"
        )

    def kill_server(self, name: str) -> None:
        """Kill the server of this name at once, with its whole process group."""
        self.get_process(name).kill()

    def restart_server(self, name: str) -> EngineAddress:
        """Kill what is left of the server of this name, start it again with another port and token,
        wait until it is healthy, and return its new address. The old log is kept under a number.

        Raise EngineError where it does not start or the servers are being stopped; it does not run
        then.
        """
        launch = self._launch_by_name[name]
        self._start_again(launch)
        try:
            self._address_by_name[name] = launch.wait_until_healthy(
                time.monotonic() + self._startup_timeout_s, None
            )
        except BaseException:
            self.get_process(name).kill()
            raise
        return self._address_by_name[name]


def archive_log(log: Path) -> None:
    """Rename engine0.log to engine0.1.log, or the next free number; do nothing where there is no
    log.
    """
    free = next(
        path for n in itertools.count(1) if not (path := log.with_suffix(f".{n}.log")).exists()
    )
    with contextlib.suppress(FileNotFoundError):
        log.rename(free)


def await_server_ready(
    server_process: ServerProcess,
    is_ready: Callable[[], bool],
    deadline: float,
    progress: StartProgress | None = None,
) -> None:
    """Poll `is_ready` until it is true, and report progress about once a second. `deadline` is a
    time of time.monotonic().

    Raise EngineError with the end of the server's log when it exits, EngineKilledError when it is
    killed by a signal, EngineTimeoutError at the deadline.
    """
    start = reported = time.monotonic()
    while not is_ready():
        now = time.monotonic()
        if server_process.exit_code is not None:
            raise _make_exit_error(server_process)
        if now > deadline:
            raise EngineTimeoutError(
                f"{server_process.name} was not ready after {now - start:.0f} s"
                " (rollout.startup_timeout_s); the end of"
                f" {server_process.log}:\n{server_process.read_log_tail()}"
            )
        if progress is not None and now - reported >= 1.0:
            reported = now
            progress(server_process.name, now - start, server_process.read_log_tail(1))
        time.sleep(_POLL_S)


def _make_exit_error(server_process: ServerProcess) -> EngineError:
    """Return the error for a server that has ended before it was ready: EngineKilledError where a
    signal ended it.
    """
    code = server_process.exit_code
    is_killed = code is not None and code < 0
    text = (
        f"{server_process.name} exited with code {code}{' (a signal)' if is_killed else ''} before"
        f" it was ready; the end of {server_process.log}:\n{server_process.read_log_tail()}"
    )
    return EngineKilledError(text) if is_killed else EngineError(text)


@contextlib.contextmanager
def translate_error_of_killed_server(server_process: ServerProcess) -> Iterator[None]:
    """Raise EngineKilledError in place of an EngineError of the block, where the server's process
    was killed meanwhile: a request to the server then fails for that reason alone.
    """
    try:
        yield
    except EngineError as error:
        deadline = time.monotonic() + _EXIT_DELAY_S
        while server_process.exit_code is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if server_process.exit_code is not None and server_process.exit_code < 0:
            raise _make_exit_error(server_process) from error
        raise


def write_token_file(path: Path) -> str:
    """Write a new random token to a file that only this user can read, and return the token."""
    # letters and digits: one that begins with - would be taken for an option
    token = secrets.token_hex(32)
    write_private_file(path, token)
    return token


def write_private_file(path: Path, text: str) -> Path:
    """Write the text to a new file that only this user can read, in place of any old one, and
    return its path. Raise OSError that names the file.
    """
    with explain_write_errors(path):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
    return path
