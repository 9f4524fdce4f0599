"""A student on Megatron (tp2) learns the quickstart's task from a teacher's distributions alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.student_curve import run_seed

pytestmark = pytest.mark.long


def test_a_student_learns_what_its_teacher_knows(tmp_path: Path) -> None:
    found = run_seed(11, tmp_path, ("trainer.total_training_steps=400", "trainer.save_freq=200"))
    first, last = found["divergence"]
    assert last < 0.1 * first
    assert found["held_out_loss"][400] < 0.2 * found["held_out_loss"][0]
    assert found["accuracy"][400]["mean"] > 0.3, "answers at random: 0.001"
