"""The comparison of two runs: each bar, what is over it,
and an agreement that would mean nothing.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_megatron.planning.check.run_comparison import (
    LOSS_TOLERANCE,
    NATS_TOLERANCE,
    NORM_TOLERANCE,
    UPDATE_TOLERANCE,
    VALUES_TOLERANCE,
    ComparisonRow,
    compare_metrics,
    compare_weights,
    find_reasons_for_no_training,
    select_worst_rows,
)

STEP: dict[str, Any] = {
    "kind": "step",
    "step": 1,
    "seconds": 3.0,
    "actor/loss": 0.5,
    "actor/pg_clipfrac": 0.1,
    "actor/grad_norm": 2.0,
    "actor/entropy": 3.0,
    "actor/lr": 1e-3,
    "critic/rewards/mean": 0.25,
    "critic/load_balancing_loss": 1.25,
    "critic/advantages/max": 1.5,
    "critic/advantages/min": -2.0,
    "response_length/mean": 5.0,
    "rollout/num_samples": 10.0,
    "training/rollout_log_probs_diff_max": 2e-6,
    "timing_s/step": 3.0,
    "sync/seconds": 1.0,
}
START = {"norm": torch.ones(3), "matrix": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}


def rows_of(step: dict[str, Any], one_rank: dict[str, Any] = STEP) -> dict[str, ComparisonRow]:
    return {row.quantity: row for row in compare_metrics([step], [one_rank], 1e-4)}


def test_equal_runs_are_ok_and_times_are_not_compared() -> None:
    rows = rows_of({**STEP, "timing_s/step": 99.0, "sync/seconds": 5.0, "seconds": 8.0})
    assert all(row.is_ok and row.where == "step 1" for row in rows.values())
    assert rows.keys() == {
        *(
            name
            for name in STEP
            if name.split("/")[0] in ("actor", "critic", "response_length", "rollout")
        ),
        "engine_against_trainer",
    }


@pytest.mark.parametrize(
    ("name", "change", "bar"),
    [
        ("actor/loss", 2.0 * LOSS_TOLERANCE, 2.0 * LOSS_TOLERANCE),  # the largest |advantage| is 2
        ("actor/grad_norm", 2.0 * NORM_TOLERANCE, NORM_TOLERANCE),  # of 2.0
        ("actor/entropy", 3.0 * NATS_TOLERANCE, 3.0 * NATS_TOLERANCE),
        ("actor/pg_clipfrac", 2 / 50, 2 / 50),  # two of 5 x 10 tokens
        ("actor/lr", 0.0, 0.0),
        ("critic/rewards/mean", 0.0, 0.0),
        ("critic/load_balancing_loss", 1.25 * NATS_TOLERANCE, 1.25 * NATS_TOLERANCE),
    ],
)
def test_bars(name: str, change: float, bar: float) -> None:
    row = rows_of({**STEP, name: STEP[name] + 0.99 * change})[name]
    assert row.bar == pytest.approx(bar, rel=1e-12) and row.is_ok
    for step in ({**STEP, name: STEP[name] + 1.01 * change + 1e-9}, {**STEP, name: math.nan}):
        assert [r.quantity for r in rows_of(step).values() if not r.is_ok] == [name]


CRITIC_STEP: dict[str, Any] = {
    **STEP,
    "critic/values/mean": 0.5,
    "critic/returns/max": -3.0,
    "critic/vf_loss": 0.25,
    "critic/vf_clipfrac": 0.1,
    "critic/grad_norm": 4.0,
    "critic/lr": 1e-3,
}


@pytest.mark.parametrize(
    ("name", "change", "bar"),
    [
        ("critic/values/mean", VALUES_TOLERANCE, VALUES_TOLERANCE),
        ("critic/returns/max", 3.0 * VALUES_TOLERANCE, 3.0 * VALUES_TOLERANCE),
        ("critic/advantages/min", 2.0 * VALUES_TOLERANCE, 2.0 * VALUES_TOLERANCE),
        ("critic/vf_loss", NATS_TOLERANCE, NATS_TOLERANCE),
        ("critic/vf_clipfrac", 2 / 50, 2 / 50),
        ("critic/grad_norm", 4.0 * NORM_TOLERANCE, NORM_TOLERANCE),
        ("critic/lr", 0.0, 0.0),
        ("critic/rewards/mean", 0.0, 0.0),
    ],
)
def test_bars_of_a_critic(name: str, change: float, bar: float) -> None:
    row = rows_of({**CRITIC_STEP, name: CRITIC_STEP[name] + 0.99 * change}, CRITIC_STEP)[name]
    assert row.bar == pytest.approx(bar, rel=1e-12) and row.is_ok
    step = {**CRITIC_STEP, name: CRITIC_STEP[name] + 1.01 * change + 1e-9}
    assert [r.quantity for r in rows_of(step, CRITIC_STEP).values() if not r.is_ok] == [name]


def test_advantages_without_a_critic_do_not_depend_on_the_layout() -> None:
    assert not rows_of({**STEP, "critic/advantages/min": -2.0 - 1e-9})[
        "critic/advantages/min"
    ].is_ok


def test_a_critic_that_learns_nothing_is_told() -> None:
    idle = {**CRITIC_STEP, "critic/grad_norm": 0.0}
    assert list(find_reasons_for_no_training([idle], [])) == [
        "step 1 has the gradient norm 0.0 of the critic."
    ]


def test_the_engine_is_held_to_the_bound_of_the_run() -> None:
    name = "training/rollout_log_probs_diff_max"
    assert not rows_of({**STEP, name: 2e-4})["engine_against_trainer"].is_ok
    row = rows_of(STEP, {**STEP, name: 3e-4})["engine_against_trainer"]
    assert (row.value, row.one_rank, row.error, row.is_ok) == (2e-6, 3e-4, 3e-4, False)


def moved(scale: float) -> dict[str, Tensor]:
    return {
        name: value + scale * torch.arange(value.numel()).view_as(value)
        for name, value in START.items()
    }


def test_the_update_of_each_tensor_counts() -> None:
    """The matrix moves by 0.01 x (0, 1, 2, 3), of length 0.01 sqrt(14). One element off by 1e-5 is
    1e-3 / sqrt(14).
    """
    mine = moved(0.01)
    mine["matrix"][0, 0] += 1e-5
    norm, matrix = compare_weights(mine, moved(0.01), START.__getitem__)
    assert (norm.where, norm.error, norm.is_ok) == ("norm", 0.0, True)
    assert matrix.error == pytest.approx(1e-3 / math.sqrt(14), rel=2e-2) and matrix.is_ok
    mine["matrix"][0, 0] += 4e-5
    _, matrix = compare_weights(mine, moved(0.01), START.__getitem__)
    assert matrix.error > UPDATE_TOLERANCE and not matrix.is_ok


def test_tensors_that_did_not_move_and_missing_ones() -> None:
    still, _ = compare_weights(moved(0.0), moved(0.0), START.__getitem__)
    assert still.error == 0.0 and still.is_ok
    alone, _ = compare_weights(moved(0.1), moved(0.0), START.__getitem__)
    assert alone.error == math.inf and not alone.is_ok
    with pytest.raises(ValueError, match=r"only one of the runs has the tensors \['norm'\]"):
        compare_weights({"matrix": START["matrix"]}, moved(0.1), START.__getitem__)


def test_an_agreement_that_means_nothing_is_said() -> None:
    weights = compare_weights(moved(0.1), moved(0.1), START.__getitem__)
    assert list(find_reasons_for_no_training([STEP], weights)) == []
    unasked = ComparisonRow(
        "update", "model.layers.1.mlp.gate.e_score_correction_bias", 0.0, 0.0, 0.0, weights[0].bar
    )
    assert list(find_reasons_for_no_training([STEP], [*weights, unasked])) == [], (
        "a rate that is 0 unless set moves it"
    )
    idle = {
        **STEP,
        "critic/advantages/max": 0.0,
        "critic/advantages/min": 0.0,
        "actor/grad_norm": 0.0,
    }
    still = compare_weights(moved(0.0), moved(0.0), START.__getitem__)
    assert list(find_reasons_for_no_training([idle], still)) == [
        "step 1 has no advantages: all rewards of each group are equal.",
        "step 1 has the gradient norm 0.0 of the actor.",
        "2 tensors did not move, such as norm.",
    ]


def test_the_worst_of_each_quantity() -> None:
    rows = [
        ComparisonRow("update", name, 1.0, 1.0, error, 1e-3)
        for name, error in (("a", 1e-5), ("b", 5e-4), ("c", 1e-4))
    ]
    rows += [
        ComparisonRow("actor/lr", "step 1", 1.0, 1.0, 0.0, 0.0),
        ComparisonRow("update", "d", 1.0, 1.0, math.nan, 1e-3),
    ]
    assert [(row.quantity, row.where) for row in select_worst_rows(rows)] == [
        ("update", "d"),
        ("actor/lr", "step 1"),
    ]
    assert [row.where for row in select_worst_rows(rows[:3])] == ["b"]
