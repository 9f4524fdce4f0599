"""Ranks and controller that are forks of the command (runtime/torchrun/forked_ranks.py): what a
user sees of them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from end_to_end_tools import (
    DP2,
    MARKER,
    TIMEOUT_S,
    overrides,
    processes_with,
    wait_for_the_end,
    write_config,
)

from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = pytest.mark.dist
SETTINGS = DP2 | {
    "warmup.max_steps": 0,
    "trainer.val_before_train": False,
    "trainer.total_training_steps": 100_000,
}


class Command:
    """`rlhf-megatron train` on two ranks, with an interpreter of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.marker = f"{MARKER}={uuid.uuid4().hex}"
        given = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC_", "MASTER_"))
        }
        name, _, value = self.marker.partition("=")
        given |= {name: value, "RLHF_MEGATRON_FORKS": "1", "OMP_NUM_THREADS": "1"}
        words = [
            sys.executable,
            "-m",
            "rlhf_megatron",
            "train",
            str(write_config(directory)),
            *overrides(SETTINGS),
        ]
        with (directory / "console").open("wb") as console, warm.cold():
            self.process = subprocess.Popen(
                words,
                cwd=directory,
                env=given,
                stdout=console,
                stderr=console,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a foreground group of its own, for Ctrl-C
            )

    def console(self) -> str:
        return (self.directory / "console").read_text()

    def await_steps(self) -> dict[str, int]:
        """Name -> process of its forks, when some steps are done."""
        deadline = time.monotonic() + TIMEOUT_S
        rows = self.directory / "runs" / "tiny" / "metrics.jsonl"
        while not rows.is_file() or rows.read_text().count('"kind": "step"') < 2:
            assert self.process.poll() is None and time.monotonic() < deadline, self.console()
            time.sleep(0.1)
        names = {
            Path(f"/proc/{pid}/comm").read_text().strip(): pid
            for pid in processes_with(self.marker)
        }
        return {name: names[name] for name in ("rank 0", "rank 1", "controller")}


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    for pid in {command.process.pid, *processes_with(command.marker)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.process.wait()


def test_the_command_forks_its_ranks_and_stops_with_its_state_saved(command: Command) -> None:
    forks = command.await_steps()
    words = {
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (command.process.pid, *forks.values())
    }
    assert len(words) == 1, "none began with an interpreter"
    parents = {
        name: int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])
        for name, pid in forks.items()
    }
    assert parents == {
        "rank 0": command.process.pid,
        "rank 1": command.process.pid,
        "controller": forks["rank 0"],
    }
    # a terminal sends Ctrl-C to every process of the command
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(TIMEOUT_S) == STOPPED_EXIT_CODE, command.console()
    assert command.console().count(": saving, then stopping, within 60 s") == 1
    assert "Traceback" not in command.console()
    assert not wait_for_the_end(command.marker, 20.0)
    assert list((command.directory / "runs" / "tiny" / "checkpoints").glob("step_*/manifest.json"))


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rank 1", "controller", "command"])
def test_all_end_with_the_one_that_is_killed(command: Command, victim: str) -> None:
    forks = command.await_steps()
    os.kill(forks.get(victim, command.process.pid), signal.SIGKILL)
    assert command.process.wait(TIMEOUT_S) != 0
    assert not wait_for_the_end(command.marker, 20.0), command.console()


def test_what_the_checks_find_is_told_once(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "rlhf_megatron",
        "train",
        str(write_config(tmp_path)),
        *overrides(DP2),
    ]
    environment = os.environ | {"RLHF_MEGATRON_FORKS": "1"}
    # a file: found by a check in the fork
    wrong = [f"trainer.default_local_dir={tmp_path / 'tiny.yaml'}"]
    done = subprocess.run(
        [*words, *wrong], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("tiny.yaml") and done.stderr.count("1 problem(s)") == 1, done.stderr
