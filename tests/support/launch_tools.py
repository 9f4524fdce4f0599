"""Runs that are started as a user starts them, on several nodes too, on this one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from end_to_end_tools import MARKER, overrides, processes_with, wait_for_the_end
from places import ROOT

TIMEOUT_S = 400.0  # of one run; it takes 10 to 20 s where nothing else does
# When the tests end, killed or not, so do processes with the mark: the pipe to this shell
# is closed then.
WATCH = """trap '' TERM INT HUP
read -r word && exit
for again in 1 2 3; do
    for file in /proc/[0-9]*/environ; do
        pid=${file#/proc/}
        tr '\\0' '\\n' <"$file" 2>/dev/null | grep -qx "$1" && kill -KILL "${pid%/environ}"
    done
done 2>/dev/null
"""
TORCHRUN = ROOT / "launch" / "torchrun.sh"
NODE_0 = "127.0.0.2"  # not 127.0.0.1: what only listens or looks there is found out


def environment(marker: str, **more: str) -> dict[str, str]:
    """Of a started script: nothing of a launcher that runs the tests, and the mark by which to find
    its processes.
    """
    strange = ("TORCHELASTIC_", "MASTER_", "NNODES", "NODE_RANK", "SLURM_", "GLOO_")
    given = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    mine = {
        MARKER: marker,
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    return {**given, **mine, **more}


@dataclass
class Started:
    """One attempt of the run of `directory`. See the fixture `launch`."""

    directory: Path
    process: subprocess.Popen[bytes]
    marker: str  # in the environment of all its processes

    @property
    def run_dir(self) -> Path:
        return self.directory / "runs" / "tiny"

    def console(self) -> str:
        """What this attempt and those before it said."""
        return (self.directory / "console").read_text()

    def steps(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            rows = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
            return [row["step"] for row in rows if row["kind"] == "step"]
        return []

    def wait_for_steps(self, number: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.steps()) < number:
            assert self.process.poll() is None and time.monotonic() < deadline, self.console()
            time.sleep(0.1)

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def seconds_until_gone(self, within_s: float) -> float:
        began = time.monotonic()
        while left := processes_with(self.marker):
            if time.monotonic() > began + within_s:
                names = [
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left
                ]
                raise AssertionError(f"{names} are left after {within_s} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> None:
        for pid in {self.process.pid, *processes_with(self.marker)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Nodes:
    """The agents of one run; index: node rank."""

    directory: Path
    processes: list[subprocess.Popen[bytes]]
    marker: str

    def __post_init__(self) -> None:
        self.watch = subprocess.Popen(
            ["/bin/sh", "-c", WATCH, "watch", f"{MARKER}={self.marker}"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def console(self, node: int) -> str:
        return (self.directory / f"console{node}").read_text()

    def wait(self) -> list[int]:
        deadline = time.monotonic() + TIMEOUT_S
        return [process.wait(deadline - time.monotonic()) for process in self.processes]

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not what():
            ended = [
                self.console(n)
                for n, process in enumerate(self.processes)
                if process.poll() is not None
            ]
            assert not ended and time.monotonic() < deadline, ended
            time.sleep(0.1)

    def host_of(self, rank: int) -> int:
        """Process id of the host of a rank."""
        for pid in processes_with(f"{MARKER}={self.marker}"):
            with contextlib.suppress(OSError):
                is_rank = f"RANK={rank}".encode() in Path(
                    f"/proc/{pid}/environ"
                ).read_bytes().split(b"\0")
                if is_rank and b"rlhf_megatron\0train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError(f"rank {rank} has no process")

    def left_over(self, within_s: float = 20.0) -> list[int]:
        """Processes of this run that still live."""
        return wait_for_the_end(f"{MARKER}={self.marker}", within_s)

    def end(self) -> None:
        for pid in {process.pid for process in self.processes} | set(
            processes_with(f"{MARKER}={self.marker}")
        ):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self.watch.poll() is None:
            self.watch.communicate(b"go\n")


def agent_command(words: Sequence[str], directory: Path, variables: dict[str, str]) -> list[str]:
    """The command that launch/torchrun.sh becomes: it runs with an "interpreter" that prints what
    it is given. That command can be forked (warm.py); an interpreter that a shell starts imports
    everything anew.
    """
    printer = directory / "print_words"
    printer.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    printer.chmod(0o700)
    script = [str(TORCHRUN), *words]
    printed = subprocess.check_output(
        script, cwd=directory, env=variables | {"PYTHON": str(printer)}, text=True
    )
    return [sys.executable, *printed.split("\0")[:-1]]


def start_nodes(
    config: Path,
    settings: dict[str, Any],
    port: int,
    only_on: Sequence[dict[str, Any]] = ({}, {}),
    **more: str,
) -> Nodes:
    """What launch/torchrun.sh starts, one rank on each of two nodes. `only_on`: settings of
    one node alone.
    """
    directory = config.parent
    marker = uuid.uuid4().hex
    base = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": NODE_0, "MASTER_PORT": str(port)}
    processes = []
    for node, extra in enumerate(only_on):
        variables = environment(marker, **base, NODE_RANK=str(node), **more)
        with (directory / f"console{node}").open("wb") as console:
            processes.append(
                subprocess.Popen(
                    agent_command(
                        [str(config), *overrides(settings | extra)], directory, variables
                    ),
                    cwd=directory,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return Nodes(directory, processes, marker)
