"""Programs in sandboxes of this machine. A guardian process makes them ahead; each is used for one
program, and ended.

The guardian's clock says when a run is over its limit (`program_clock`): time that a busy machine
keeps the program waiting for a processor does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec

from rlhf_megatron.import_folders import find_user_site
from rlhf_megatron.rewards.sandbox.long_integers import write_long_json
from rlhf_megatron.rewards.sandbox.program_clock import MAX_WALL_LIMITS
from rlhf_megatron.rewards.sandbox.sandbox_layers import (
    LANDLOCK,
    LAYERS,
    NAMESPACES,
    SECCOMP,
    SandboxLimits,
)
from rlhf_megatron.rewards.sandbox.sandbox_protocol import (
    Ending,
    ProgramResult,
    SandboxProgram,
    SandboxUnavailableError,
)

ROOT = Path(__file__).parents[3]
# `-s`: the guardian imports nothing from below HOME but what `import_folders` names
GUARDIAN_FLAGS = ("-s",)
# The package's folder is on sys.path while the guardian is imported, and not while programs run;
# the working directory, which is "" there, never is.
BOOT = (
    "import sys; folders = [folder for folder in sys.path if folder];"
    " sys.path[:] = [{root!r}, *folders];"
    " from rlhf_megatron.rewards.sandbox.guardian import main;"
    " sys.path[:] = folders; main()"
)
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
MESSAGE_BYTES = 1 << 16
START_S = 120.0
MAX_OPEN_TRIES = 3  # to get a sandbox that starts
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/nonexistent",  # until the guardian has made a folder that is its own
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # programs read and write integers of any number of digits; the limit of time ends those that
    # take too long
    "PYTHONINTMAXSTRDIGITS": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

OPEN_WITHOUT: dict[str, tuple[str, ...]] = {
    NAMESPACES: (
        "many small files and processes are ended at a look every 20 ms, not refused",
        "the names of files and folders outside can be asked for (stat), not opened",
    ),
    LANDLOCK: (
        "the files that the user can read and write",
        "signals and /proc of the user's other processes",
    ),
    SECCOMP: (
        "the kernel's rarely used calls (io_uring, keyctl, new namespaces)",
        "memory in memfd and SysV segments",
    ),
}


@dataclass(frozen=True)
class SandboxSettings:
    """The settings of a local sandbox."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    python: str | None = None  # interpreter of the programs; None: this one
    readable: tuple[str, ...] = ()  # further files and folders that programs may read
    preload: tuple[str, ...] = ()  # modules that are imported before programs are started
    num_warm: int = 1  # sandboxes that wait
    layers: tuple[str, ...] = LAYERS
    allow_open: bool = False  # also where the kernel gives too few layers


def list_unprotected_accesses(active_layers: tuple[str, ...]) -> list[str]:
    """Return texts on what a program can reach because layers are not in `active_layers`."""
    if NAMESPACES in active_layers:
        missing = [SECCOMP] if SECCOMP not in active_layers else []
        return [text for name in missing for text in OPEN_WITHOUT[name][:1]]
    network = [] if SECCOMP in active_layers else ["the network"]
    return [
        text for name in LAYERS if name not in active_layers for text in OPEN_WITHOUT[name]
    ] + network


class LocalSandbox:
    """A `ProgramSandbox` of this machine. The thread that uses it starts it."""

    def __init__(self, settings: SandboxSettings, timeout_s: float) -> None:
        """Keep the settings; nothing starts yet. `timeout_s` limits one run."""
        self.settings = settings
        self.timeout_s = timeout_s
        self.active_layers: tuple[str, ...] = ()
        self.layers_note = ""  # which layers are in force, which not and why, what is open
        self.peak_mib = 0  # of the last program
        self.counted_s = 0.0  # of the last run that was ended, as its clock counted
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start_guardian(self) -> None:
        """Start the guardian process and learn from it which layers are in force. Raise ValueError
        where it does not start, or the layers are too few.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = self.settings.python or sys.executable
        with theirs:
            self._process = subprocess.Popen(
                [
                    python,
                    *GUARDIAN_FLAGS,
                    "-c",
                    BOOT.format(root=str(ROOT)),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
                env=ENVIRONMENT,
            )
        places = (*SYSTEM, sys.prefix, sys.base_prefix, *self.settings.readable)
        if self.settings.python is not None:
            places = (*places, str(Path(self.settings.python).absolute().parents[1]))
        # what `pip install --user` has installed is for this version of Python
        user_site = find_user_site() if self.settings.python is None else None
        places = (*places, *filter(None, [user_site]))
        message = {
            "limits": asdict(self.settings.limits),
            "readable": [os.path.abspath(place) for place in places],
            "preload": self.settings.preload,
            "user_site": user_site,
            "num_warm": self.settings.num_warm,
            "layers": self.settings.layers,
        }
        self._control.settimeout(START_S)
        try:
            self._control.send(json.dumps(message).encode())
            told = json.loads(self._control.recv(MESSAGE_BYTES) or b'{"error": "it ended"}')
        except OSError as error:
            told = {"error": str(error)}
        if "error" in told:
            self.close()
            raise ValueError(f"the sandbox cannot be started with {python}: {told['error']}.")
        self.active_layers = tuple(told["in_force"])
        self._check_layers(told["missing"])
        if not told["can_read_waits"]:
            self.layers_note += (
                "; this kernel does not say how long programs wait for a processor"
                " (/proc/PID/schedstat), so that the time limit counts all wall time"
            )

    def _check_layers(self, missing_layers: dict[str, str]) -> None:
        """Set `layers_note`. Where there are no namespaces and not both Landlock and seccomp, close
        the sandbox and raise ValueError, unless allow_open is set.
        """
        why = "; ".join(f"{name}: {reason}" for name, reason in missing_layers.items())
        is_enough = NAMESPACES in self.active_layers or {LANDLOCK, SECCOMP} <= set(
            self.active_layers
        )
        still_open = list_unprotected_accesses(self.active_layers)
        if not is_enough and not self.settings.allow_open:
            self.close()
            raise ValueError(
                "this machine has too few layers for a sandbox (in force:"
                f" {', '.join(self.active_layers) or 'none'}; {why}). Open would be:"
                f" {'; '.join(still_open)}. Use a sandbox server (server), a machine whose kernel"
                " allows namespaces, or Landlock and seccomp; or say allow_open: true to run"
                " programs all the same."
            )
        self.layers_note = (
            f"sandbox: {', '.join(self.active_layers) or 'no layer'} and limits are in force"
        )
        self.layers_note += f"; not {why}" if why else ""
        self.layers_note += f"; open: {'; '.join(still_open)}" if still_open else ""

    @contextlib.contextmanager
    def open_session(self, program: SandboxProgram) -> Iterator[LocalSandboxSession]:
        """Yield a session of the program, and end its sandbox afterwards. Start the guardian where
        it does not run; that may raise ValueError.
        """
        if self._control is None:
            self.start_guardian()
        session = LocalSandboxSession(self, program)
        try:
            yield session
        finally:
            session.end_lane()

    def take_lane(self) -> socket.socket:
        """Take a waiting sandbox from the guardian. Return a socket to it. Raise
        SandboxUnavailableError where the guardian has ended, or has no sandbox.
        """
        assert self._control is not None, "not started"
        try:
            self._control.send(b'{"take": true}')
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
        except OSError as error:
            data = str(error).encode()
            descriptors = []
        if not descriptors and data.startswith(b"{"):
            raise SandboxUnavailableError(f"a sandbox could not be made: {data.decode()}.")
        if not descriptors:
            self.close()
            raise SandboxUnavailableError(
                f"the process that guards sandboxes has ended {data.decode()!r}."
            )
        return socket.socket(fileno=descriptors[0])

    def start_clock(self) -> None:
        """Start the guardian's clock of a run in the sandbox that was taken. Raise
        SandboxUnavailableError where the guardian has ended.
        """
        run = {"started_at": time.monotonic(), "limit_s": self.timeout_s}
        self._send_to_guardian({"run": run})

    def finish_run(self, took_s: float, cpu_s: float) -> RunVerdict:
        """Tell the guardian how long a run took as its sandbox says, and return the guardian's
        verdict. Raise SandboxUnavailableError where the guardian has ended.
        """
        times = {"took_s": took_s, "cpu_s": cpu_s}
        return msgspec.convert(self._ask_guardian({"finish": times}), RunVerdict)

    def end_lane(self) -> str | None:
        """End the sandbox that was taken, and record its peak memory and its clock. Return why the
        guardian had ended it before ("timeout", "memory", "processes", "files"), or None. Raise
        SandboxUnavailableError where the guardian has ended.
        """
        answer = self._ask_guardian({"end": True})
        self.peak_mib = answer["peak_mib"]
        self.counted_s = answer["counted_s"]
        return str(answer["why"]) if answer["why"] else None

    def _ask_guardian(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send the message to the guardian and return its answer. Raise SandboxUnavailableError
        where the guardian has ended.
        """
        self._send_to_guardian(message)
        assert self._control is not None
        try:
            answer: dict[str, Any] = json.loads(self._control.recv(MESSAGE_BYTES))
        except (OSError, ValueError) as error:
            self._fail_without_guardian(error)
        return answer

    def _send_to_guardian(self, message: dict[str, Any]) -> None:
        """Send the message to the guardian. Raise SandboxUnavailableError where the guardian has
        ended.
        """
        assert self._control is not None, "not started"
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            self._fail_without_guardian(error)

    def _fail_without_guardian(self, error: Exception) -> NoReturn:
        """Close this sandbox, and raise SandboxUnavailableError."""
        self.close()
        raise SandboxUnavailableError(
            f"the process that guards sandboxes has ended ({error})."
        ) from error

    def close(self) -> None:
        """End the guardian and all its sandboxes. Safe to call twice."""
        control = self._control
        process = self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(START_S / 10)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
            process.wait()


@dataclass(frozen=True)
class HarnessAnswer:
    """A sandbox's answer about a run."""

    code: int
    stdout: str
    stderr: str
    value: str | None
    took_s: float = 0.0  # wall time
    cpu_s: float = 0.0


@dataclass(frozen=True)
class RunVerdict:
    """What the guardian says of a run whose answer has come."""

    why: Ending | None  # the limit that the run was over
    is_gone: bool  # the sandbox, with or without a fault of the run


class LocalSandboxSession:
    """A `SandboxSession` of a `LocalSandbox`. A sandbox that had to be ended is replaced for the
    next run.
    """

    def __init__(self, sandbox: LocalSandbox, program: SandboxProgram) -> None:
        """Keep the program; the first run takes a sandbox."""
        self.sandbox = sandbox
        self.program = program
        self._connection: socket.socket | None = None
        self._unread_bytes = b""

    def run_program(self, stdin: str = "", arguments: tuple[Any, ...] = ()) -> ProgramResult:
        """Run the program once and return how the run ended; see `SandboxSession.run_program`. Take
        a new sandbox where there is none, and end the sandbox after a run that did not end by
        itself.
        """
        if self._connection is None:
            self._open_lane()
        run_input = (
            {"arguments": arguments} if self.program.function is not None else {"stdin": stdin}
        )
        self.sandbox.start_clock()
        line = self._exchange_line(run_input)
        answer = None if line is None else read_harness_answer(line)
        if answer is None:
            why = self.end_lane()
            ending = why if why in get_args(Ending) else "died"
            return ProgramResult(ending)  # type: ignore[arg-type]
        verdict = self.sandbox.finish_run(answer.took_s, answer.cpu_s)
        if verdict.is_gone:
            self.end_lane()
        if verdict.why is not None:
            return ProgramResult(verdict.why)
        return ProgramResult("exit", answer.code, answer.stdout, answer.stderr, answer.value)

    def _open_lane(self) -> None:
        """Take a sandbox and send it the program. Raise SandboxUnavailableError where no sandbox
        could be made in MAX_OPEN_TRIES: the program before may have used up what one needs.
        """
        for _ in range(MAX_OPEN_TRIES):
            self._connection = self.sandbox.take_lane()
            self._unread_bytes = b""
            line = self._exchange_line(None)
            answer = {"error": "it ended"} if line is None else json.loads(line)
            if "error" not in answer:
                program = {"code": self.program.code, "function": self.program.function}
                self._send_message(program)
                return
            self.end_lane()
        raise SandboxUnavailableError(f"a sandbox could not be made: {answer['error']}.")

    def _send_message(self, message: Any) -> bool:
        """Send the message as a line of JSON. Return whether that worked."""
        assert self._connection is not None
        self._connection.settimeout(self.sandbox.timeout_s + START_S)
        try:
            self._connection.sendall(write_long_json(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _exchange_line(self, message: Any) -> bytes | None:
        """Send the message (None: only wait) and return the line that answers; None where the
        sandbox ended, as the guardian ends it where a run is over a limit. Raise
        SandboxUnavailableError where the guardian lets the sandbox go on for too long.
        """
        if message is not None and not self._send_message(message):
            return None
        assert self._connection is not None
        most = 20 * self.sandbox.settings.limits.output_bytes  # three texts, escaped
        deadline = time.monotonic() + MAX_WALL_LIMITS * self.sandbox.timeout_s + START_S
        while b"\n" not in self._unread_bytes:
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], wait_s)[0]:
                self.end_lane()
                raise SandboxUnavailableError(
                    f"a sandbox was not ended {START_S:.0f} s after {MAX_WALL_LIMITS} times its"
                    " limit."
                )
            try:
                data = self._connection.recv(1 << 20)
            except OSError:
                data = b""
            if not data or len(self._unread_bytes) > most:
                return None
            self._unread_bytes += data
        line, _, self._unread_bytes = self._unread_bytes.partition(b"\n")
        return line

    def end_lane(self) -> str | None:
        """End the session's sandbox, if there is one. Return why the guardian had ended it before,
        or None.
        """
        if self._connection is None:
            return None
        self._connection.close()
        self._connection = None
        return self.sandbox.end_lane()


def read_harness_answer(line: bytes) -> HarnessAnswer | None:
    """Return the answer in a line, or None where something else than the harness wrote it."""
    try:
        return msgspec.convert(json.loads(line), HarnessAnswer)
    except (ValueError, RecursionError):
        return None
