"""The processes of a run: their signals, their children, and where their output goes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# pid of the agent with which a rank ends, also where it is gone before the rank looks
AGENT_ENV = "RLHF_MEGATRON_AGENT"
# in the environment of a keeper of servers: the number of its machine
KEEPER_ENV = "RLHF_MEGATRON_KEEPER"
# pid of the process with which the agent stops (`cli.restarts`)
AGENTS_PARENT_ENV = "RLHF_MEGATRON_AGENTS_PARENT"


def read_machine_id() -> str:
    """Return a string that is equal for two processes exactly when they can signal each other by
    pid.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class _LossyLogFile(io.FileIO):
    """A log file that drops what the disk has no room for, so that the process goes on."""

    def write(self, data: Any, /) -> int:
        """Write the data, drop what the disk has no room for, and return the full length."""
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def redirect_output(log_path: Path) -> int:
    """Append this process's stdout and stderr to `log_path`, and make its directory. Return a file
    descriptor of the former stderr.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    console = os.dup(2)
    with open(log_path, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            _LossyLogFile(number, "w", closefd=False), errors="backslashreplace", write_through=True
        )
        for number in (1, 2)
    )
    return console


def handle_signals_in_thread(signals: Sequence[int], handle_signal: Callable[[int], None]) -> None:
    """Call `handle_signal(signal number)` in a thread whenever one of `signals` comes, even while
    the main thread cannot run Python (inside a collective). Must be called on the main thread.
    Unblocks the signals.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    # whoever started this process may have had them blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    wanted = set(signals)

    def read_signals() -> None:
        """Read signal numbers from the pipe without end, and handle the numbers in `signals`."""
        while True:
            number = os.read(read_end, 1)[0]
            if number in wanted:
                handle_signal(number)

    threading.Thread(target=read_signals, name="signals", daemon=True).start()


def read_process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process of this machine: "T" stopped, "D" waits
    for a device, "Z" ended and not waited for; "" where there is no process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@dataclass(frozen=True)
class ChildProcess:
    """A process of this machine, identified by its start time too, since a later process may get
    its pid.
    """

    pid: int
    start_ticks: str  # in the kernel's ticks since boot

    def kill(self) -> None:
        """Kill the process with SIGKILL, if it still exists. A later process with its pid is left
        alone.
        """
        if _read_start_ticks_and_parent(self.pid)[0] == self.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def find_children(parent_pid: int) -> list[ChildProcess]:
    """Return the children of a process of this machine, also children that have ended and that
    their parent has not waited for.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [(pid, *_read_start_ticks_and_parent(pid)) for pid in pids]
    return [
        ChildProcess(pid, begin) for pid, begin, its_parent in found if its_parent == parent_pid
    ]


def _read_start_ticks_and_parent(pid: int) -> tuple[str, int]:
    """Return the start time in ticks and the parent's pid of a process, or ("", 0) where the
    process is gone.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[19], int(words[1])


def find_children_with_variable(variable_name: str) -> list[int]:
    """Return the pids of this process's living children that were started with an environment
    variable of that name.
    """
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit():
                continue
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != os.getpid() or state == "Z":
                continue
            if any(
                e.startswith(f"{variable_name}=".encode())
                for e in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found
