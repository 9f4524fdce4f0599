"""Runs that are killed and started again: one of each kind. The whole matrix is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_pool import DistPool

from benchmarks.chaos import relayout, schedules
from benchmarks.chaos.cases import Case, matrix
from benchmarks.chaos.matrix import run_case, undisturbed
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


def test_a_run_killed_before_a_commit_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    assert disturbed(CASES["inline/kill/ckpt.before_commit"], tmp_path) == []


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
