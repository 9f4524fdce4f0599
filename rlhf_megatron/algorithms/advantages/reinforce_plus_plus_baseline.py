"""REINFORCE++ with the mean of the group as baseline: rewards centered by group, then whitened over the step.

"REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization" (arXiv 2501.03262):

    A = whiten(r - mean_g)        over the response tokens of the step

Nothing is divided by a group's own standard deviation, which the paper finds biased.
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.base import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    response_lengths,
    sample_rewards,
    spread,
)
from rlhf_megatron.algorithms.advantages.whitening import whitened_samples
from rlhf_megatron.algorithms.groups import Groups, group_advantages


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline", needs=("rewards", "group_ids"))
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, params: None) -> AdvantageOutputs:
    """One advantage a sample, on all its response tokens.

    A group with one valid sample is in no statistic, and 0. One of equal rewards is in them: it is the whitening's
    mean that it gets, which is 0 where all responses are of one length.
    """
    centered_B = group_advantages(sample_rewards(inputs), inputs.group_ids_B, inputs.is_valid_B, epsilon=None)
    groups = Groups.of(inputs.group_ids_B, inputs.is_valid_B)
    is_kept_B = inputs.is_valid_B & (groups.counts() > 1)[groups.index_B]
    lengths_B = response_lengths(inputs.response_mask_T, inputs.offsets)
    advantages_B = whitened_samples(centered_B, lengths_B, is_kept_B)
    return AdvantageOutputs(spread(advantages_B, inputs.response_mask_T, inputs.offsets))
