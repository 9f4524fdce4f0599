"""Pass@k: only the best sample of a prompt is rewarded, by its lead over the second best.

"Optimizing Language Models for Inference Time Objectives using Reinforcement Learning" (arXiv
2503.19595), the leave-one-out advantage of the objective E[max over the k samples of a group]:

    A = (r_best - r_second) / (std_g + eps)        the best sample of group g; all others 0

The paper has no division; the field's implementations divide as GRPO does, and switch it
off the same way.
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    register_group_estimator,
)
from rlhf_megatron.algorithms.advantages.grpo import GRPOParams
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor


@register_group_estimator("grpo_passk", GRPOParams)
def grpo_passk(
    rewards_B: Tensor, groups: PromptGroups, inputs: AdvantageInputs, params: GRPOParams
) -> Tensor:
    """Return the advantages [B]: the lead of the best sample of a group over the second best, and 0
    for all others. They are exactly 0 in a group with one valid sample, and where several samples
    are the best: none of them leads.
    """
    best_G, second_G = groups.find_top_two(rewards_B)
    has_lead_G = (groups.count_valid_samples() > 1) & (best_G > second_G)
    lead_G = best_G - second_G
    if params.norm_adv_by_std_in_grpo:
        lead_G = lead_G / (
            groups.compute_deviations(groups.center_by_group(rewards_B)) + params.epsilon
        )
    leads_B = inputs.is_valid_B & has_lead_G[groups.index_B] & (rewards_B == best_G[groups.index_B])
    return lead_G[groups.index_B].masked_fill(~leads_B, 0.0)
