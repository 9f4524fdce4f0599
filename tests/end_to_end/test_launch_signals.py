"""Real runs that are told to stop, or lose a process: how they end, and that nothing
of them is left.
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import greedy_score, processes_with
from launch_tools import TORCHRUN, Started

from rlhf_megatron import api
from rlhf_megatron.controller.recovery.stage_watchdog import HANG_REPORT
from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = [pytest.mark.dist, pytest.mark.chaos]
TP2 = {
    "trainer.n_gpus_per_node": 2,
    "tp": 2,
    "pp": 1,
    "warmup.max_steps": 0,
    "trainer.val_before_train": False,
}
ENDLESS = {"trainer.total_training_steps": 100_000, "trainer.save_freq": 2}
GONE_WITHIN_S = 15.0  # on a machine that is busy; 3 to 7 on a quiet one


class Run(Started):
    def pid(self, who: str) -> int:
        """ "agent", "controller", "engine", "rank0", "rank1"."""
        for pid in processes_with(self.marker):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = dict(
                    v.partition(b"=")[::2]
                    for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                )
                if who == self._role(words, variables):
                    return pid
        raise AssertionError(f"{who} has no process")

    @staticmethod
    def _role(words: list[bytes], variables: dict[bytes, bytes]) -> str:
        if b"rlhf_megatron.runtime.torchrun.agent" in words:
            return "agent"
        if b"rlhf_megatron.rollout.local.local_server" in words and not words[0].endswith(b"sh"):
            return "engine"
        if b"train" in words:
            return (
                "controller"
                if b"RLHF_MEGATRON_RUN_DIR" in variables
                else f"rank{variables[b'RANK'].decode()}"
            )
        return ""


@pytest.fixture
def start(launch: Any) -> Any:
    """start(settings, variable=value): launch/torchrun.sh on two ranks."""

    def begin(settings: dict[str, Any], **more: str) -> Run:
        return launch(Run, [str(TORCHRUN)], TP2 | settings, **{"NPROC_PER_NODE": "2", **more})

    return begin


def test_sigterm_to_rank_1_saves_and_the_same_command_goes_on(start) -> None:
    run = start(ENDLESS)
    run.wait_for_steps(3)
    os.kill(run.pid("rank1"), signal.SIGTERM)
    assert run.wait() == STOPPED_EXIT_CODE, run.console()
    run.seconds_until_gone(GONE_WITHIN_S)
    assert "SIGTERM to [actor dp0 pp0 tp1]" in run.console() and "Traceback" not in run.console()
    done = run.steps()
    assert (run.run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{done[-1]:06d}"
    again = start(ENDLESS | {"trainer.total_training_steps": done[-1] + 1})
    assert again.wait() == 0, again.console()
    assert again.steps() == list(range(1, done[-1] + 2)), "each step once"


@pytest.mark.parametrize("victim", ["agent", "controller", "rank0", "rank1"])
def test_nothing_is_left_when_a_process_is_killed(start, victim: str) -> None:
    """Two ranks, the controller, an engine with its shell, and the agent."""
    run = start(ENDLESS)
    run.wait_for_steps(1)
    assert run.pid("engine")
    os.kill(run.pid(victim), signal.SIGKILL)
    seconds = run.seconds_until_gone(GONE_WITHIN_S)
    assert run.wait() != 0
    print(f"{victim}: all gone after {seconds:.1f} s")


@pytest.mark.parametrize("victim", ["engine", "rank0"])
def test_nothing_is_left_when_a_process_is_stopped_and_then_the_controller_killed(
    start, victim: str
) -> None:
    """The agent ends a stopped rank, 30 seconds after the first rank has ended."""
    run = start(ENDLESS)
    run.wait_for_steps(1)
    os.kill(run.pid(victim), signal.SIGSTOP)
    os.kill(run.pid("controller"), signal.SIGKILL)
    run.seconds_until_gone(30 + GONE_WITHIN_S)
    assert run.wait() != 0


def test_a_stopped_rank_is_named_by_the_stage_it_holds_up(start) -> None:
    run = start(ENDLESS | {"trainer.stage_timeout_s": 12})
    run.wait_for_steps(1)
    rank1 = run.pid("rank1")
    os.kill(rank1, signal.SIGSTOP)
    assert run.wait() == 1, run.console()
    run.seconds_until_gone(GONE_WITHIN_S)
    report = (run.run_dir / HANG_REPORT).read_text()
    assert (
        f"[actor dp0 pp0 tp1] does not answer: process {rank1} is stopped (SIGSTOP, or a debugger)"
        in report
    )
    assert "Look first at [actor dp0 pp0 tp1]" in report
    assert "The last calls to engines:" in report and "engine0 generate" in report
    assert report.partition("\n")[2] in run.console()


def test_a_run_that_crashes_goes_on_by_itself(start, tmp_path: Path) -> None:
    """Two ranks are killed, in steps 2 and 3; three starts make one run of four steps."""
    faults = (
        "kill@actor.before_optimizer_step:who=rank1,nth=2;"
        " kill@actor.after_optimizer_step:who=rank0,nth=2"
    )
    plan = {"RLHF_MEGATRON_FAULTS": faults, "RLHF_MEGATRON_FAULTS_DIR": str(tmp_path / "faults")}
    run = start(
        {"trainer.total_training_steps": 4, "trainer.save_freq": 1}, MAX_RESTARTS="3", **plan
    )
    assert run.wait() == 0, run.console()
    assert run.steps() == [1, 2, 3, 4]
    assert len(list((tmp_path / "faults").iterdir())) == 2, "both have acted"
    console = run.console()
    assert "the run is started again (2 of 3)" in console and "(3 of 3)" not in console, console
    run.seconds_until_gone(GONE_WITHIN_S)


SCORED = {"trainer.test_freq": 2, "warmup.max_steps": 3}


def score_after(run: Run, step: int) -> float:
    rows = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    return next(
        row["val/accuracy"] for row in rows if (row["kind"], row["step"]) == ("evaluation", step)
    )


def test_a_run_that_was_stopped_is_exported_with_its_score(start, tmp_path: Path) -> None:
    """Without save_freq: what is kept is the state at the stop. The run is started again for its
    evaluation only.
    """
    run = start(ENDLESS | SCORED | {"trainer.save_freq": 0})
    run.wait_for_steps(3)
    os.kill(run.pid("rank1"), signal.SIGTERM)
    assert run.wait() == STOPPED_EXIT_CODE, run.console()
    run.seconds_until_gone(GONE_WITHIN_S)
    (step,) = api.Run(run.run_dir).checkpoints()
    assert f"the state after step {step} is saved" in run.console()
    out = api.Run(run.run_dir).export(tmp_path / "model")
    again = start(ENDLESS | SCORED | {"trainer.save_freq": 0, "trainer.total_training_steps": step})
    assert again.wait() == 0, again.console()
    assert greedy_score(out, tmp_path / "val.jsonl") == score_after(run, step)


def test_a_run_that_was_killed_is_exported_with_its_score(start, tmp_path: Path) -> None:
    run = start(ENDLESS | SCORED)
    run.wait_for_steps(5)
    os.kill(run.pid("controller"), signal.SIGKILL)
    assert run.wait() != 0
    run.seconds_until_gone(GONE_WITHIN_S)
    out = api.Run(run.run_dir).export(tmp_path / "model", step=4)
    assert greedy_score(out, tmp_path / "val.jsonl") == score_after(run, 4)
