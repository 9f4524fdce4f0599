"""Pass@k: only the best sample of a prompt is rewarded, by its lead over the second best.

"Optimizing Language Models for Inference Time Objectives using Reinforcement Learning" (arXiv 2503.19595), the
leave-one-out advantage of the objective E[max over the k samples of a group]:

    A = (r_best - r_second) / (std_g + eps)        the best sample of group g; all others 0

The paper has no division; the field's implementations divide as GRPO does, and switch it off the same way.
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.base import AdvantageInputs, of_groups
from rlhf_megatron.algorithms.advantages.grpo import GRPOParams
from rlhf_megatron.algorithms.groups import Groups
from rlhf_megatron.lazy import Tensor


@of_groups("grpo_passk", GRPOParams)
def grpo_passk(rewards_B: Tensor, groups: Groups, inputs: AdvantageInputs, params: GRPOParams) -> Tensor:
    """Exactly 0 in a group with one valid sample, and where several samples are the best: none of them leads."""
    best_G, second_G = groups.top_two(rewards_B)
    has_lead_G = (groups.counts() > 1) & (best_G > second_G)
    lead_G = best_G - second_G
    if params.norm_adv_by_std_in_grpo:
        lead_G = lead_G / (groups.deviations(groups.centered(rewards_B)) + params.epsilon)
    leads_B = inputs.is_valid_B & has_lead_G[groups.index_B] & (rewards_B == best_G[groups.index_B])
    return lead_G[groups.index_B].masked_fill(~leads_B, 0.0)
