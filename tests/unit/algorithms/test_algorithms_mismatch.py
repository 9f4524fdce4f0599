"""Statistics of engine against trainer: numbers by hand, nothing slips through."""

import math

import pytest
import torch

from rlhf_megatron.algorithms import log_prob_mismatch
from rlhf_megatron.algorithms.log_prob_mismatch import (
    BLOCK_TOKENS,
    compute_mismatch_statistics,
    compute_percentile,
    compute_percentiles,
    compute_response_differences,
    find_worst_tokens,
)
from rlhf_megatron.algorithms.metric_names import METRICS

NAME = "training/rollout_log_probs_diff"


def test_by_hand() -> None:
    engine = torch.tensor([9.0, math.log(0.5), math.log(0.25), math.log(0.8)], dtype=torch.float64)
    trainer = torch.tensor(
        [0.0, math.log(0.25), math.log(0.25), math.log(0.4)], dtype=torch.float64
    )
    mask = torch.tensor([False, True, True, True])
    found = compute_mismatch_statistics(engine, trainer, mask)
    d = math.log(2)
    k3 = 0.5 - 1 + d  # ratio trainer / engine is 1/2 on two tokens, 1 on one
    probs = torch.tensor([0.25, 0.0, 0.4], dtype=torch.float64)
    expected = {
        f"{NAME}_max": d,
        f"{NAME}_p50": d,
        f"{NAME}_p99": d,
        f"{NAME}_mean": 2 * d / 3,
        "training/rollout_kl": 2 * k3 / 3,
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": 0.4,
        "training/rollout_probs_diff_mean": 0.65 / 3,
        "training/rollout_probs_diff_std": probs.std().item(),
    }
    assert found == pytest.approx(expected, rel=1e-12)
    assert set(found) <= set(METRICS)


def test_kl_is_that_of_the_engine_to_the_trainer() -> None:
    """Tokens in the engine's proportions: the mean is KL(engine || trainer),
    not its mirror image.
    """
    engine = torch.tensor([0.75, 0.25], dtype=torch.float64)
    trainer = torch.tensor([0.5, 0.5], dtype=torch.float64)
    index = torch.tensor([0, 0, 0, 1])
    found = compute_mismatch_statistics(
        engine.log()[index], trainer.log()[index], torch.ones(4, dtype=torch.bool)
    )
    assert found["training/rollout_kl"] == pytest.approx(
        (engine * (engine / trainer).log()).sum().item()
    )


def test_percentiles_are_nearest_rank() -> None:
    differences = torch.arange(1, 201, dtype=torch.float64)[torch.randperm(200)] / 1000
    found = compute_mismatch_statistics(
        torch.zeros(200).double(), -differences, torch.ones(200, dtype=torch.bool)
    )
    assert found[f"{NAME}_p50"] == pytest.approx(0.100)
    assert found[f"{NAME}_p99"] == pytest.approx(0.198)
    assert found[f"{NAME}_max"] == pytest.approx(0.200)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_infinitely_wrong(bad: float) -> None:
    trainer = torch.tensor([-1.0, bad, -1.0])
    found = compute_mismatch_statistics(
        torch.full((3,), -1.0), trainer, torch.ones(3, dtype=torch.bool)
    )
    assert found[f"{NAME}_max"] == math.inf
    assert found["training/rollout_kl"] > 1.0
    assert found[f"{NAME}_p50"] == 0.0
    assert find_worst_tokens(
        torch.full((3,), -1.0), trainer, torch.ones(3, dtype=torch.bool), 1
    ).tolist() == [1]


@pytest.mark.parametrize(
    ("bad", "largest"), [(math.nan, math.nan), (math.inf, math.inf), (500.0, math.exp(500.0))]
)
def test_a_probability_that_is_none_shows_whichever_block_it_is_in(
    bad: float, largest: float
) -> None:
    for place in (0, BLOCK_TOKENS + 1):
        trainer = torch.full((2 * BLOCK_TOKENS,), -1.0)
        trainer[place] = bad
        found = compute_mismatch_statistics(
            torch.full_like(trainer, -1.0), trainer, torch.ones(2 * BLOCK_TOKENS, dtype=torch.bool)
        )
        assert found["training/rollout_probs_diff_max"] == pytest.approx(largest, nan_ok=True)


def test_no_tokens() -> None:
    found = compute_mismatch_statistics(
        torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool)
    )
    assert set(found.values()) == {0.0}
    assert (
        find_worst_tokens(
            torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool), 5
        ).tolist()
        == []
    )


def test_worst_tokens_are_response_tokens_in_order() -> None:
    engine = torch.zeros(5)
    trainer = torch.tensor([9.0, -0.5, 0.1, 2.0, -1.0])
    mask = torch.tensor([False, True, True, True, True])
    assert find_worst_tokens(engine, trainer, mask, 3).tolist() == [3, 4, 1]
    assert find_worst_tokens(engine, trainer, mask, 99).tolist() == [3, 4, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 99, 100, 101, 1000])
def test_percentiles_without_sorting_are_those_of_the_sorted_column(count: int) -> None:
    column = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    if count > 2:
        column[1] = float("inf")
    shares = (0.5, 0.99, 1.0)
    expected = [compute_percentile(column.sort().values, share) for share in shares]
    before = column.clone()
    assert compute_percentiles(column, shares) == expected and torch.equal(column, before)
    assert compute_percentiles(column, shares, may_reorder=True) == expected


def test_differences_of_runs_are_those_of_their_response_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_prob_mismatch, "BLOCK_TOKENS", 2)
    engine = torch.tensor([0.0, -1, -2, -3, -4, -5, -6])
    trainer = torch.tensor([9.0, -1.5, 9, -1, float("nan"), -5, -9])
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert compute_response_differences(engine, trainer, mask).tolist() == [
        0.5,
        2,
        float("inf"),
        0,
        3,
    ]
    assert compute_response_differences(
        engine, trainer, mask, [slice(6, 7), slice(0, 4)]
    ).tolist() == [3, 0.5, 2]


def test_blocks_change_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against whole columns, as the docstring has the formulas."""
    generator = torch.Generator().manual_seed(1)
    engine = -torch.rand(1000, generator=generator)
    trainer = engine + 0.1 * torch.randn(1000, generator=generator)
    mask = torch.rand(1000, generator=generator) > 0.3
    monkeypatch.setattr(log_prob_mismatch, "BLOCK_TOKENS", 64)
    found = compute_mismatch_statistics(engine, trainer, mask)
    log_ratio = trainer[mask].double() - engine[mask].double()
    probs = (trainer[mask].double().exp() - engine[mask].double().exp()).abs()
    ordered = log_ratio.abs().sort().values
    exact = {
        f"{NAME}_max": ordered[-1].item(),
        f"{NAME}_p50": ordered[math.ceil(0.5 * len(ordered)) - 1].item(),
        f"{NAME}_p99": ordered[math.ceil(0.99 * len(ordered)) - 1].item(),
        f"{NAME}_mean": log_ratio.abs().mean().item(),
        "training/rollout_kl": (log_ratio.expm1() - log_ratio).mean().item(),
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": probs.max().item(),
        "training/rollout_probs_diff_mean": probs.mean().item(),
        "training/rollout_probs_diff_std": probs.std().item(),
    }
    assert found == pytest.approx(exact, rel=1e-12, abs=0.0)
    apart_T = (trainer.double() - engine.double()).abs().masked_fill(~mask, -1.0)
    assert (
        find_worst_tokens(engine, trainer, mask, 70).tolist() == apart_T.topk(70).indices.tolist()
    )
