"""Runs that are killed and started again: one of each kind. The whole matrix is `make chaos`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dist_pool import DistPool

from benchmarks.chaos import relayout, schedules
from benchmarks.chaos.cases import Case, matrix
from benchmarks.chaos.leaks import temporary_entries
from benchmarks.chaos.matrix import run_case, undisturbed
from benchmarks.chaos.program import clean_environment
from benchmarks.chaos.task import write_task

pytestmark = pytest.mark.dist
CASES = {case.name: case for case in matrix()}
CHOSEN = (
    "tp2/kill_controller/sync.after_begin",
    "tp2/kill_rank1/ckpt.mid_data",
    "tp2/kill_engine/rollout.mid_generate",
    "tp2/stop_rank1/actor.before_optimizer_step",
    "tp2/term_rank1/actor.before_optimizer_step",
    "tp2/kill_agent/rollout.mid_generate",
)


def disturbed(case: Case, directory: Path) -> list[str]:
    config = write_task(directory)
    reference = undisturbed(config, case.layout, directory / "undisturbed", {})
    return run_case(case, config, reference, directory / "case").problems


@pytest.mark.chaos
def test_a_run_killed_before_a_commit_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    assert disturbed(CASES["inline/kill/ckpt.before_commit"], tmp_path) == []


def test_the_launcher_leaves_no_directory_behind(tmp_path: Path) -> None:
    """Also not the one of a launcher that was killed before."""
    (tmp_path / "rlhf-megatron-killed").mkdir()
    (tmp_path / "rlhf-megatron-killed" / "owner.lock").touch()
    agent = [
        sys.executable,
        "-m",
        "rlhf_megatron.runtime.torchrun.agent",
        "--standalone",
        "--nproc-per-node",
        "1",
    ]
    environment = {**clean_environment(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*agent, "-m", "platform"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "Linux" in done.stdout, done.stderr
    assert temporary_entries(tmp_path) == []


@pytest.mark.chaos
@pytest.mark.parametrize("name", CHOSEN)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    assert disturbed(CASES[name], tmp_path) == []


@pytest.mark.chaos
@pytest.mark.parametrize("move", relayout.MOVES, ids=lambda move: move.name)
def test_another_layout(dist_pool: DistPool, move: relayout.Move, tmp_path: Path) -> None:
    figures = relayout.run_move(dist_pool, move, tmp_path / "checkpoint")
    assert all(figure.is_ok for figure in figures), figures


@pytest.mark.chaos
def test_random_faults_between_fleet_and_engines(tmp_path: Path) -> None:
    tally, fired = schedules.run(10, 1, tmp_path)
    assert tally.problems == [] and tally.num_samples > 100 and sum(fired.values()) > 10
