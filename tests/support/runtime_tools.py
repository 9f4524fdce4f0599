"""Toy runs (runtime_toy.py) under torchrun or Ray, for tests: started, awaited, and
nothing of them left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from end_to_end_tools import MARKER, processes_with
from places import SUPPORT

TIMEOUT_S = 120.0


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@dataclass
class Run:
    """A started toy run; `agent` is the torchrun process, or Ray's driver."""

    directory: Path
    agent: subprocess.Popen[bytes]
    marker: str  # in the environment of every process of it

    def pids(self) -> dict[str, int]:
        return {path.stem: int(path.read_text() or 0) for path in self.directory.glob("*.pid")}

    def wait(self) -> int:
        return self.agent.wait(TIMEOUT_S)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.directory / name).exists():
            assert self.agent.poll() is None and time.monotonic() < deadline, self.console()
            time.sleep(0.05)

    def console(self) -> str:
        return (self.directory / "console").read_text()

    def log(self, rank: int) -> str:
        return (self.directory / "logs" / f"rank{rank}.log").read_text()

    def assert_no_orphans(self, num_processes: int, within_s: float = 10.0) -> None:
        """`num_processes`: hosts and the controller;
        what they have started is looked for as well.
        """
        assert len(self.pids()) == num_processes, self.pids()
        deadline = time.monotonic() + within_s
        while left := processes_with(self.marker):
            assert time.monotonic() < deadline, (
                f"{[command_of(pid) for pid in left]} still run after {within_s} s"
            )
            time.sleep(0.05)

    def kill(self) -> None:
        for pid in {self.agent.pid, *processes_with(self.marker)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()


Start = Callable[[str, str], Run]


@contextlib.contextmanager
def toy_runs(
    directory: Path, launcher: str = "launch", more: Mapping[str, str] | None = None
) -> Iterator[Start]:
    """start(scenario, pools) starts a run in `directory`; at the end all its processes are killed.
    `more`: environment variables of it.
    """
    runs: list[Run] = []

    def start(scenario: str, pools: str) -> Run:
        command = [sys.executable, "-m", "runtime_toy", launcher, scenario, pools, str(directory)]
        marker = uuid.uuid4().hex
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARKER: marker, **(more or {})}
        with open(directory / "console", "wb") as console:
            agent = subprocess.Popen(
                command, cwd=SUPPORT, env=environment, stdout=console, stderr=subprocess.STDOUT
            )
        runs.append(Run(directory, agent, f"{MARKER}={marker}"))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            run.kill()
