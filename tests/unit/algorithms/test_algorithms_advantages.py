"""Group-relative advantages against numbers worked out by hand."""

import math

import pytest
import torch

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs
from rlhf_megatron.algorithms.advantages.grpo import GRPOParams, grpo
from rlhf_megatron.algorithms.prompt_groups import compute_group_advantages


def advantages(
    rewards: list[float], groups: list[int], valid: list[bool] | None = None, use_std: bool = True
) -> list[float]:
    """One token a sample, so that the token column is the sample column."""
    count = len(rewards)
    inputs = AdvantageInputs(
        rewards_B=torch.tensor(rewards),
        group_ids_B=torch.tensor(groups, dtype=torch.int64),
        is_valid_B=torch.tensor([True] * count if valid is None else valid, dtype=torch.bool),
        response_mask_T=torch.ones(count, dtype=torch.bool),
        offsets=torch.arange(count + 1),
    )
    outputs = grpo(inputs, GRPOParams(norm_adv_by_std_in_grpo=use_std))
    assert outputs.advantages_T.dtype == torch.float32
    assert outputs.returns_T is None
    return outputs.advantages_T.tolist()


def test_centered_by_group_in_any_order() -> None:
    # group 7: 1, 0, 1, 0 (mean 0.5); group -2: 3, 0 (mean 1.5)
    found = advantages([1, 3, 0, 1, 0, 0], [7, -2, 7, 7, -2, 7], use_std=False)
    assert found == [0.5, 1.5, -0.5, 0.5, -1.5, -0.5]


def test_divided_by_the_unbiased_standard_deviation() -> None:
    # 1, 0, 0, 0: mean 1/4, sum of squares 3/4, unbiased variance 1/4, standard deviation 1/2
    found = advantages([1, 0, 0, 0], [5, 5, 5, 5])
    assert found == pytest.approx([0.75 / (0.5 + 1e-6)] + [-0.25 / (0.5 + 1e-6)] * 3, rel=1e-7)


def test_epsilon_is_added_to_the_deviation_and_not_under_the_root() -> None:
    # 0, 2e-6: mean 1e-6, deviation sqrt(2) * 1e-6
    found = compute_group_advantages(
        torch.tensor([0, 2e-6], dtype=torch.float64),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2).bool(),
        1e-6,
    )
    assert found.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])


@pytest.mark.parametrize("use_std", [True, False])
def test_equal_rewards_give_exactly_zero(use_std: bool) -> None:
    # The sum of seven times 0.1, divided by seven, is not the 0.1 of the samples.
    assert advantages([0.1] * 7 + [1e6 + 0.3] * 3, [0] * 7 + [1] * 3, use_std=use_std) == [0.0] * 10


@pytest.mark.parametrize("use_std", [True, False])
def test_masked_samples_are_out_of_the_statistics(use_std: bool) -> None:
    rewards = [1.0, 0.0, math.nan, 1.0, math.inf]
    with_masked = advantages(rewards, [0] * 5, [True, True, False, True, False], use_std)
    without = advantages([1.0, 0.0, 1.0], [0] * 3, use_std=use_std)
    assert with_masked == [without[0], without[1], 0.0, without[2], 0.0]
    assert without[0] > 0 > without[1]


@pytest.mark.parametrize("use_std", [True, False])
def test_single_survivors_and_groups_without_any_get_zero(use_std: bool) -> None:
    assert advantages([5.0, 1.0, 9.0], [0, 0, 1], [True, False, True], use_std) == [0.0] * 3
    assert advantages([5.0, 1.0], [0, 0], [False, False], use_std) == [0.0, 0.0]
    assert advantages([], [], use_std=use_std) == []


def test_a_sample_s_advantage_stands_on_its_response_tokens_only() -> None:
    inputs = AdvantageInputs(
        rewards_B=torch.tensor([2.0, 0.0]),
        group_ids_B=torch.tensor([3, 3]),
        is_valid_B=torch.tensor([True, True]),
        response_mask_T=torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool),
        offsets=torch.tensor([0, 3, 6]),
    )
    outputs = grpo(inputs, GRPOParams(norm_adv_by_std_in_grpo=False))
    assert outputs.advantages_T.tolist() == [0, 1, 1, 0, 0, -1]


def test_registered_with_its_parameters_and_needs() -> None:
    entry = ADV_ESTIMATORS.get("grpo")
    assert (
        entry.build is grpo
        and entry.params is GRPOParams
        and set(entry.needs) == {"rewards", "group_ids"}
    )
    with pytest.raises(ValueError, match=r"advantage estimator 'grop'.*'grpo'"):
        ADV_ESTIMATORS.get("grop")
    with pytest.raises(ValueError, match="epsilon"):
        GRPOParams(epsilon=-1.0)
