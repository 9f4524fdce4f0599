"""Group-relative advantages: a sample's reward against the other samples of its prompt.

GRPO, "DeepSeekMath" (arXiv 2402.03300, section 4.1.2): A = (r - mean_g) / (std_g + eps). Without
the division it is Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv 2503.20783). The standard
deviation is the unbiased one, as in the field's implementations; the paper does not say.
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
class GRPOParams:
    # divide by the group's standard deviation; false: Dr. GRPO
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        """Raise ValueError for a negative epsilon."""
        if self.epsilon < 0:
            raise ValueError(f"epsilon ({self.epsilon}) must not be negative; 1e-6 is usual.")


@register_group_estimator("grpo", GRPOParams)
def grpo(
    rewards_B: Tensor, groups: PromptGroups, inputs: AdvantageInputs, params: GRPOParams
) -> Tensor:
    """Return the advantages [B]: a sample's distance from its group's mean, over the standard
    deviation where the parameters say so. They are exactly 0 for a sample of masked status, in a
    group with one valid sample, and in a group of equal rewards.
    """
    return groups.compute_advantages(
        rewards_B, params.epsilon if params.norm_adv_by_std_in_grpo else None
    )
