"""One launch of `rlhf-megatron train`: its processes by role, its end,
and what it leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT
from rlhf_megatron.jobs.train_job import CONTROLLER_ENV

MARKER = "RLHF_MEGATRON_CHAOS"  # stands in the environment of every process of a launch
POLL_S = 0.05
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "MASTER_", "SLURM_", "RLHF_MEGATRON_")
_LAUNCHER_NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NNODES",
    "NODE_RANK",
}


@dataclass(frozen=True)
class Process:
    """A living process of a job. `role`: agent, controller, rank0, rank1 ..., engine0 ..., driver0
    ..., or other.
    """

    pid: int
    role: str
    command: str
    num_files: int  # open file descriptors


class Launch:
    """A started program. Its processes are found by a marker in their environment, wherever
    they have gone.
    """

    def __init__(
        self, arguments: Sequence[str], directory: Path, console: Path, env: Mapping[str, str]
    ) -> None:
        self.console = console
        self._marker = uuid.uuid4().hex
        self._start = time.monotonic()
        with console.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_megatron", "train", *arguments],
                cwd=directory,
                env={**clean_environment(), MARKER: self._marker, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        return self._process.poll()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def processes(self) -> list[Process]:
        """Those alive; zombies left out."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    process = _read_process(entry, self._marker)
                    found += [process] if process else []
        return found

    def find(self, role: str) -> Process | None:
        """The process of a role. In a run of one process that is the controller
        and rank 0 alike.
        """
        living = self.processes()
        for process in living:
            if process.role == role:
                return process
        is_inline = not any(process.role in ("agent", "controller") for process in living)
        if is_inline and role in ("controller", "agent", "rank0"):
            return next((process for process in living if process.role == "inline"), None)
        return None

    def wait(self, timeout_s: float, watch: Callable[[], None] | None = None) -> int | None:
        """The exit code; None when it still runs after `timeout_s`. `watch` is called
        again and again.
        """
        deadline = time.monotonic() + timeout_s
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            if watch is not None:
                watch()
            time.sleep(POLL_S)
        return code

    def left_over(self, within_s: float) -> list[Process]:
        """Processes that still live `within_s` after the program itself has ended."""
        deadline = time.monotonic() + within_s
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def kill(self) -> None:
        """SIGKILL to all that is left."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def clean_environment() -> dict[str, str]:
    """Of this process, without what a launcher or a test around it has set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # a fork has no command line of its own
    return {**kept, **fixed, "PYTHONPATH": str(ROOT), "RLHF_MEGATRON_FORKS": "0"}


def _read_process(entry: Path, marker: str) -> Process | None:
    """Raises OSError when it has gone."""
    environment = (entry / "environ").read_bytes()
    if f"{MARKER}={marker}".encode() not in environment.split(b"\0"):
        return None
    if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
        return None
    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    values = dict(
        pair.split("=", 1)
        for pair in environment.decode(errors="replace").split("\0")
        if "=" in pair
    )
    return Process(
        int(entry.name), role_of(words, values), " ".join(words), len(os.listdir(entry / "fd"))
    )


def role_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a process is in its job, by command line and environment."""
    if "rlhf_megatron.runtime.torchrun.agent" in words:
        return "agent"
    if (driver := "rlhf_megatron.rollout.drivers.driver_process") in words:
        return f"driver{words[words.index(driver) + 2]}"
    if "--ready-file" in words:
        return Path(words[words.index("--ready-file") + 1]).name.split(".")[0]
    if "rlhf_megatron" in words and "train" in words:
        if CONTROLLER_ENV in environment:
            return "controller"
        return f"rank{environment['RANK']}" if "RANK" in environment else "inline"
    return "other"
