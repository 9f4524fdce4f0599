"""Toy runs under torchrun (tests/runtime_toy.py), for tests: started, awaited, and nothing of them left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
TIMEOUT_S = 120.0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@dataclass
class Run:
    """A started toy run; `agent` is the torchrun process."""

    directory: Path
    agent: subprocess.Popen[bytes]

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
        pids = self.pids()
        assert len(pids) == num_processes, pids
        deadline = time.monotonic() + within_s
        while left := [name for name, pid in pids.items() if is_alive(pid)]:
            assert time.monotonic() < deadline, f"{left} still run after {within_s} s"
            time.sleep(0.05)


Start = Callable[[str, str], Run]


@contextlib.contextmanager
def toy_runs(directory: Path) -> Iterator[Start]:
    """start(scenario, pools) starts a run in `directory`; at the end all its processes are killed."""
    runs: list[Run] = []

    def start(scenario: str, pools: str) -> Run:
        command = [sys.executable, "-m", "runtime_toy", "launch", scenario, pools, str(directory)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(directory / "console", "wb") as console:
            agent = subprocess.Popen(command, cwd=TESTS, env=environment, stdout=console, stderr=subprocess.STDOUT)
        runs.append(Run(directory, agent))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            run.agent.kill()
            run.agent.wait()
            for pid in run.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
