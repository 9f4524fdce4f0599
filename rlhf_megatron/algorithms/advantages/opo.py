"""On-policy optimisation with the optimal baseline: rewards against a mean weighted by
response length.

"On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585). The baseline of least variance
weighs a reward by the squared norm of its sample's gradient, which is taken to grow with the length
n of the response:

    A = r - (sum over group g of n r) / (sum over group g of n)
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    count_response_tokens,
    register_group_estimator,
)
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor


@register_group_estimator("opo")
def opo(rewards_B: Tensor, groups: PromptGroups, inputs: AdvantageInputs, params: None) -> Tensor:
    """Return the advantages [B]: a sample's reward minus its group's mean weighted by response
    length. They are exactly 0 for a sample of masked status, in a group with one valid sample, and
    in a group of equal rewards.
    """
    lengths_B = count_response_tokens(inputs.response_mask_T, inputs.offsets)
    # no digits are lost where rewards are far from 0
    centered_B = groups.compute_advantages(rewards_B)
    baseline_G = groups.sum_by_group(lengths_B * centered_B) / groups.sum_by_group(lengths_B).clamp(
        min=1
    )
    return (centered_B - baseline_G[groups.index_B]).masked_fill(~inputs.is_valid_B, 0.0)
