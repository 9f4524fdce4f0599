"""Group-relative advantages: a sample's reward against the other samples of its prompt.

GRPO, "DeepSeekMath" (arXiv 2402.03300, section 4.1.2): A = (r - mean_g) / (std_g + eps). Without the division it is
Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv 2503.20783). The standard deviation is the unbiased one, as in
the field's implementations; the paper does not say.
"""

# B samples, G groups

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    sample_rewards,
    spread,
)


@dataclass(frozen=True)
class GRPOParams:
    norm_adv_by_std_in_grpo: bool = True  # divide by the group's standard deviation; false: Dr. GRPO
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ValueError(f"epsilon ({self.epsilon}) must not be negative; 1e-6 is usual.")


@ADV_ESTIMATORS.register("grpo", GRPOParams, needs=("rewards", "group_ids"))
def grpo(inputs: AdvantageInputs, params: GRPOParams) -> AdvantageOutputs:
    """One advantage a sample, on all its response tokens.

    Exactly 0 for a sample of masked status, in a group with one valid sample, and in a group of equal rewards.
    """
    advantages_B = group_advantages(
        sample_rewards(inputs),
        inputs.group_ids_B,
        inputs.is_valid_B,
        epsilon=params.epsilon if params.norm_adv_by_std_in_grpo else None,
    )
    return AdvantageOutputs(spread(advantages_B, inputs.response_mask_T, inputs.offsets))


def group_advantages(rewards_B: Tensor, group_ids_B: Tensor, is_valid_B: Tensor, epsilon: float | None) -> Tensor:
    """[B] float64: (r - mean_g) / (std_g + epsilon), or r - mean_g where `epsilon` is None, over valid samples."""
    rewards_B = rewards_B.to(torch.float64).masked_fill(~is_valid_B, 0.0)
    _, group_B = group_ids_B.unique(return_inverse=True)
    num_groups = int(group_B.max()) + 1 if group_B.numel() else 0

    def sum_G(column_B: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64, device=rewards_B.device).index_add_(0, group_B, column_B)

    count_G = sum_G(is_valid_B.to(torch.float64))
    mean_G = sum_G(rewards_B) / count_G.clamp(min=1)
    centered_B = (rewards_B - mean_G[group_B]).masked_fill(~is_valid_B, 0.0)
    advantages_B = centered_B
    if epsilon is not None:
        std_G = (sum_G(centered_B.square()) / (count_G - 1).clamp(min=1)).sqrt()
        advantages_B = centered_B / (std_G + epsilon)[group_B]
    return advantages_B.masked_fill(~_has_spread(rewards_B, group_B, is_valid_B, num_groups)[group_B], 0.0)


def _has_spread(rewards_B: Tensor, group_B: Tensor, is_valid_B: Tensor, num_groups: int) -> Tensor:
    """[G] bool: some valid rewards of the group differ. Compared, not computed: a mean of equal numbers is rounded."""
    bounds_G = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=rewards_B.device)
    low_G = bounds_G.scatter_reduce(0, group_B, rewards_B.masked_fill(~is_valid_B, torch.inf), "amin")
    high_G = (-bounds_G).scatter_reduce(0, group_B, rewards_B.masked_fill(~is_valid_B, -torch.inf), "amax")
    return high_G > low_G
