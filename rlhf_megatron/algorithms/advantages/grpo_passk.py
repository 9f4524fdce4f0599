"""Pass@k: only the best sample of a prompt is rewarded, by its lead over the second best.

"Optimizing Language Models for Inference Time Objectives using Reinforcement Learning" (arXiv 2503.19595), the
leave-one-out advantage of the objective E[max over the k samples of a group]:

    A = (r_best - r_second) / (std_g + eps)        the best sample of group g; all others 0

The paper has no division; the field's implementations divide as GRPO does, and switch it off the same way.
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.base import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    of_samples,
    sample_rewards,
)
from rlhf_megatron.algorithms.advantages.grpo import GRPOParams
from rlhf_megatron.algorithms.groups import Groups


@ADV_ESTIMATORS.register("grpo_passk", GRPOParams, needs=("rewards", "group_ids"), scope="group")
def grpo_passk(inputs: AdvantageInputs, params: GRPOParams) -> AdvantageOutputs:
    """One advantage a sample, on all its response tokens.

    Exactly 0 in a group with one valid sample, and where several samples are the best: none of them leads.
    """
    rewards_B = sample_rewards(inputs)
    groups = Groups.of(inputs.group_ids_B, inputs.is_valid_B)
    best_G, second_G = groups.top_two(rewards_B)
    has_lead_G = (groups.counts() > 1) & (best_G > second_G)
    lead_G = best_G - second_G
    if params.norm_adv_by_std_in_grpo:
        lead_G = lead_G / (groups.deviations(groups.centered(rewards_B)) + params.epsilon)
    leads_B = inputs.is_valid_B & has_lead_G[groups.index_B] & (rewards_B == best_G[groups.index_B])
    advantages_B = lead_G[groups.index_B].masked_fill(~leads_B, 0.0)
    return of_samples(advantages_B, inputs)
