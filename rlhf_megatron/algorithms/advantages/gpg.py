"""Group policy gradient: centered rewards, scaled up for the groups that teach nothing.

"GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning" (arXiv 2504.02546):

    A = alpha (r - mean_g) / f_norm        alpha = N / (N - M)

of N valid samples of the step, M are in groups of equal rewards (all right or all wrong): their
gradient is 0, and without alpha they would shrink the mean over all of them.
"""

# B samples

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    register_group_estimator,
)
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor


@dataclass(frozen=True)
class GPGParams:
    f_norm: float = 1.0  # divides all advantages

    def __post_init__(self) -> None:
        """Raise ValueError unless f_norm is above 0 and finite."""
        if not 0 < self.f_norm < float("inf"):
            raise ValueError(
                f"f_norm ({self.f_norm}) must be above 0: it divides the advantages; 1.0 is usual."
            )


@register_group_estimator("gpg", GPGParams)
def gpg(
    rewards_B: Tensor, groups: PromptGroups, inputs: AdvantageInputs, params: GPGParams
) -> Tensor:
    """Return the advantages [B]: centered rewards, scaled up for the share of samples in groups of
    equal rewards. They are exactly 0 for a sample of masked status, in a group with one valid
    sample, and in a group of equal rewards.
    """
    teaches_B = inputs.is_valid_B & groups.have_differing_entries(rewards_B)[groups.index_B]
    alpha = inputs.is_valid_B.sum() / teaches_B.sum().clamp(min=1).to(rewards_B.dtype)
    return alpha * groups.compute_advantages(rewards_B) / params.f_norm
