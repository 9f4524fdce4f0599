"""Whole runs under Ray whose engine actors are killed: what goes on, what ends, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import MARKER, Finished, overrides, processes_with, write_config
from places import ROOT
from ray_leftovers import end, left_over, short_directory

from benchmarks.chaos.compare import differences

pytest.importorskip("ray")
pytestmark = [pytest.mark.dist, pytest.mark.long]
TIMEOUT_S = 400.0
SETTINGS = {
    "trainer.runtime": "ray",
    "trainer.n_gpus_per_node": 1,
    "tp": 1,
    "pp": 1,
    "trainer.deterministic": True,
    "trainer.save_hf": True,
    "rollout.num_engines": 2,
    "trainer.total_training_steps": 3,
}


class Running:
    """A run that goes on while a test looks at it."""

    def __init__(
        self, config: Path, settings: dict[str, Any], faults: str, temporary: Path
    ) -> None:
        self.temporary = temporary
        self.config = config
        self.marker = f"{MARKER}={uuid.uuid4().hex}"
        self.fired = config.parent / "faults"
        given = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "TORCHELASTIC_"))
        }
        plan = (
            {"RLHF_MEGATRON_FAULTS": faults, "RLHF_MEGATRON_FAULTS_DIR": str(self.fired)}
            if faults
            else {}
        )
        own = {
            MARKER: self.marker.partition("=")[2],
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **plan,
        }
        own["TMPDIR"] = str(temporary)
        with (config.parent / "console").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_megatron", "train", str(config), *overrides(settings)],
                cwd=config.parent,
                env={**given, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> Finished:
        code = self.process.wait(TIMEOUT_S)
        console = (self.config.parent / "console").read_text()
        return Finished(
            self.config.parent, self.config.parent / "runs" / "tiny", code, console, self.marker
        )

    def wait_for_fault(self, number: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.fired / f"fired{number}").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.wait().console
            time.sleep(0.05)

    def server_of(self, engine: str) -> int:
        """Its process, of all that this run has."""
        for pid in processes_with(self.marker):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "rlhf_megatron.rollout.local.local_server" in line and any(
                    f"/{engine}.token" in word for word in line
                ):
                    return pid
        raise AssertionError(f"{engine} has no process")

    def actor_of(self, engine: str) -> int:
        pid = int(
            Path(f"/proc/{self.server_of(engine)}/stat").read_text().rpartition(")")[2].split()[1]
        )
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::")
        return pid

    def left_over(self, within_s: float) -> list[str]:
        return left_over(self.marker, self.temporary, within_s)

    def end(self) -> None:
        end(self.marker, self.temporary)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    running: list[Running] = []

    def begin(name: str, faults: str = "", **settings: Any) -> Running:
        directory = tmp_path / name
        directory.mkdir()
        running.append(Running(write_config(directory), SETTINGS | settings, faults, temporary))
        return running[-1]

    with short_directory() as temporary:
        yield begin
        for run in running:
            run.end()


def test_an_engine_whose_actor_is_killed_while_it_generates_is_replaced(start) -> None:
    """Its samples are generated again with the same seeds: every number is that of a run that
    was left alone.
    """
    alone = start("undisturbed")
    undisturbed = alone.wait()
    assert undisturbed.exit_code == 0, undisturbed.console
    assert [row["step"] for row in undisturbed.rows("step")] == [1, 2, 3]
    # The server hangs from the begin of step 2 on, so that its requests are under way for certain.
    running = start("disturbed", "stop_engine@loop.step_begins:step=2")
    running.wait_for_fault(0)
    time.sleep(2.0)
    os.kill(running.actor_of("engine0"), signal.SIGKILL)
    run = running.wait()
    assert run.exit_code == 0, run.console
    assert differences(undisturbed.run_dir, run.run_dir, is_bitwise=True) == []
    restarts = [row.get("rollout/engine_restarts", 0) for row in run.rows("step")]
    assert sum(restarts) == 1, restarts
    assert (run.run_dir / "engines" / "engine0.1.log").exists(), (
        "the log of the engine that was lost is kept"
    )
    assert alone.left_over(30) == [] and running.left_over(30) == []


def test_more_losses_than_allowed_end_the_run_with_every_engines_words(start) -> None:
    settings = {"rollout.max_engine_restarts": 0, "rollout.num_engines": 1}
    running = start("limited", "stop_engine@loop.step_begins:step=1", **settings)
    running.wait_for_fault(0)
    os.kill(running.actor_of("engine0"), signal.SIGKILL)
    run = running.wait()
    assert run.exit_code == 1, run.console
    assert "no engine is left of 1: engine0 is lost: it exited with code -9" in run.console
    assert "its keeper has ended" in run.console
    assert running.left_over(30) == []


def test_nothing_is_left_of_a_run_whose_driver_is_killed(start) -> None:
    running = start("killed", "delay@loop.step_begins:step=1,seconds=600")
    running.wait_for_fault(0)
    assert running.server_of("engine1") != running.server_of("engine0")
    os.kill(running.process.pid, signal.SIGKILL)
    running.wait()
    assert running.left_over(60) == []


def test_an_exception_of_the_run_leaves_nothing(start) -> None:
    running = start("failed", "fail@rollout.after_generate:step=1")
    run = running.wait()
    assert run.exit_code == 1 and "injected at rollout.after_generate" in run.console
    assert running.left_over(30) == []
    assert json.loads((run.run_dir / "attempts.jsonl").read_text().splitlines()[-1])
