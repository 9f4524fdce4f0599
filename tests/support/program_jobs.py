"""Commands of the program that start engines, in a directory of their own: started, watched,
killed, ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from end_to_end_tools import MARKER, processes_with, wait_for_the_end
from places import ROOT

# in the commands of engines
LOCAL = "rlhf_megatron.rollout.local.local_server"
SGLANG = "sglang.launch_server"


class Job:
    """The program in a directory of its own."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.marker = f"{MARKER}={os.urandom(16).hex()}"
        name, _, value = self.marker.partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.console = directory / "console"
        with self.console.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_megatron", *words],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_words(self, words: str, within_s: float = 240) -> str:
        """The console, once the words stand in it."""
        deadline = time.monotonic() + within_s
        while words not in self.console.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.console.read_text()
            )
            time.sleep(0.02)
        return self.console.read_text()

    def wait_for_answers(self, path: Path, count: int) -> None:
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.console.read_text()
            )
            time.sleep(0.01)

    def engines(self, words: str = LOCAL) -> list[int]:
        found = []
        for pid in processes_with(self.marker):
            # a process may end between the two looks at it
            with suppress(psutil.NoSuchProcess):
                if words in " ".join(psutil.Process(pid).cmdline()):
                    found.append(pid)
        return found

    def end(self) -> int:
        try:
            return self.process.wait(180)
        finally:
            for pid in wait_for_the_end(self.marker, within_s=10):
                os.kill(pid, signal.SIGKILL)


def run(directory: Path, *words: str, code: int = 0) -> str:
    job = Job(directory, *words)
    assert job.end() == code, job.console.read_text()
    return job.console.read_text()
