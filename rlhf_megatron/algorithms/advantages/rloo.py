"""REINFORCE leave-one-out: a sample's reward against the mean of the other samples of its prompt.

"Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs"
(arXiv 2402.14740), with n valid samples in group g:

    A = r - (sum_g - r) / (n - 1) = n / (n - 1) (r - mean_g)
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    register_group_estimator,
)
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor


@register_group_estimator("rloo")
def rloo(rewards_B: Tensor, groups: PromptGroups, inputs: AdvantageInputs, params: None) -> Tensor:
    """Return the advantages [B]: a sample's reward minus the mean of the other valid samples of its
    group; 0 where there are none.
    """
    count_G = groups.count_valid_samples()
    factor_G = count_G / (count_G - 1).clamp(min=1)
    return groups.compute_advantages(rewards_B) * factor_G[groups.index_B]
