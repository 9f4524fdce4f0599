"""What is done to a step's samples around the estimators: drawn again, punished for length,
filtered by group.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from rlhf_megatron.algorithms.prompt_groups import mark_informative_samples
from rlhf_megatron.algorithms.resampling import (
    ResamplingParams,
    compute_resampling_weights,
    draw_resampled_indices,
)
from rlhf_megatron.rewards.scorers import REWARDS, RewardSample

ALL = [ResamplingParams("pow"), ResamplingParams("max_min"), ResamplingParams("max_random")]


def weights(rewards: list[float], params: ResamplingParams) -> list[float]:
    found = compute_resampling_weights(torch.tensor(rewards), params)
    return (found / found.sum()).tolist()


def test_weights_by_hand() -> None:
    rewards = [3.0, -1.0, 0.0, 3.0, 1.0]
    # |r|^2: 9, 1, 0, 9, 1 of 20; the ends are 3 and -1; 0.4 twice and 0.1 three times
    assert weights(rewards, ResamplingParams("pow")) == pytest.approx([0.45, 0.05, 0, 0.45, 0.05])
    assert weights(rewards, ResamplingParams("pow", 1.0)) == pytest.approx(
        [3 / 8, 1 / 8, 0, 3 / 8, 1 / 8]
    )
    assert weights(rewards, ResamplingParams("max_min")) == pytest.approx(
        [1 / 3, 1 / 3, 0, 1 / 3, 0]
    )
    assert weights(rewards, ResamplingParams("max_random")) == pytest.approx(
        [4 / 11, 1 / 11, 1 / 11, 4 / 11, 1 / 11]
    )


def test_powers_do_not_overflow() -> None:
    assert weights([1e30, 5e29, 0.0], ResamplingParams("pow", 100.0)) == pytest.approx(
        [1, 2.0**-100, 0]
    )


@pytest.mark.parametrize("params", ALL)
@pytest.mark.parametrize("reward", [0.0, -2.0, 0.1])
def test_equal_rewards_are_drawn_alike(params: ResamplingParams, reward: float) -> None:
    assert weights([reward] * 4, params) == [0.25] * 4
    assert weights([reward], params) == [1.0]


@pytest.mark.parametrize("params", ALL)
def test_masked_samples_are_never_drawn(params: ResamplingParams) -> None:
    """Their rewards are not read either; all places get a sample."""
    rewards = torch.tensor([math.nan, 1.0, 99.0, 0.5, -math.inf, 2.0] * 50)
    is_valid = torch.tensor([False, True, False, True, False, True] * 50)
    drawn = draw_resampled_indices(rewards, is_valid, params, seed=0)
    assert drawn.shape == (300,) and drawn.dtype == torch.int64 and is_valid[drawn].all()
    assert draw_resampled_indices(
        rewards, torch.zeros(300, dtype=torch.bool), params, seed=0
    ).tolist() == list(range(300))
    assert draw_resampled_indices(
        torch.zeros(0), torch.zeros(0, dtype=torch.bool), params, seed=0
    ).shape == (0,)


@pytest.mark.parametrize("params", ALL)
def test_what_is_drawn_has_the_shares_of_the_weights(params: ResamplingParams) -> None:
    """40000 draws: within 5 standard deviations of each share, and nothing of weight 0.
    The seed decides.
    """
    rewards = [0.0, 1.0, -3.0, 2.0, 0.0]
    count = 40000
    many = torch.tensor(rewards * (count // 5))
    is_valid = torch.ones(count, dtype=torch.bool)
    drawn = draw_resampled_indices(many, is_valid, params, seed=7)
    shares = (drawn % 5).bincount(minlength=5) / count
    for found, share in zip(shares.tolist(), weights(rewards, params), strict=True):
        assert abs(found - share) <= 5 * math.sqrt(share * (1 - share) / count)
        assert share > 0 or found == 0
    assert torch.equal(drawn, draw_resampled_indices(many, is_valid, params, seed=7))
    assert not torch.equal(drawn, draw_resampled_indices(many, is_valid, params, seed=8))


def test_one_place_is_drawn_many_times() -> None:
    drawn = draw_resampled_indices(
        torch.tensor([0.0, 1.0, 0.0, 0.0]),
        torch.ones(4, dtype=torch.bool),
        ResamplingParams("pow"),
        0,
    )
    assert drawn.tolist() == [1, 1, 1, 1]


def test_wrong_parameters_of_resampling() -> None:
    with pytest.raises(
        ValueError, match="unknown reweight_method 'min'; known: pow, max_min, max_random"
    ):
        ResamplingParams("min")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight_pow \(-1.0\) must be at least 0"):
        ResamplingParams(weight_pow=-1.0)


def test_overlong_by_hand() -> None:
    # max 10, buffer 4: from 6 tokens on, a quarter a token
    entry = REWARDS.get("overlong")
    lengths = [0, 6, 7, 8, 10, 11, 99]
    params = entry.params(max_len=10, buffer=4)
    scores = [entry.build(RewardSample("", "", "", "", "stop", n), params).score for n in lengths]
    assert scores == [0, 0, -0.25, -0.5, -1, -1, -1]
    for buffer in (0, 11):
        with pytest.raises(
            ValueError, match=rf"buffer \({buffer} tokens\) must be from 1 to max_len \(10\)"
        ):
            entry.params(max_len=10, buffer=buffer)


def test_workers_of_rewards_need_no_torch_for_it() -> None:
    code = "import sys, rlhf_megatron.rewards.scorers.overlong; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_groups_that_teach() -> None:
    metric = torch.tensor([1, 0, 1, 1, 0, 0, 1, 5, math.nan])
    groups = torch.tensor([4, 4, 9, 9, -1, -1, -1, 2, 9])
    is_valid = torch.tensor([True, True, True, True, True, True, False, True, False])
    # 4 has both; 9 agrees, its masked one is not read; -1 agrees but for a masked one; 2 is alone
    assert mark_informative_samples(metric, groups, is_valid).tolist() == [True, True] + [False] * 7
    is_valid[6] = True
    assert mark_informative_samples(metric, groups, is_valid).tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_masked_sample_goes_with_its_group() -> None:
    found = mark_informative_samples(
        torch.tensor([1.0, 0, 7]), torch.tensor([0, 0, 0]), torch.tensor([True, True, False])
    )
    assert found.tolist() == [True, True, True]
    assert (
        mark_informative_samples(
            torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
        ).tolist()
        == []
    )
