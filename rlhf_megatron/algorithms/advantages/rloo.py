"""REINFORCE leave-one-out: a sample's reward against the mean of the other samples of its prompt.

"Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs" (arXiv
2402.14740), with n valid samples in group g:

    A = r - (sum_g - r) / (n - 1) = n / (n - 1) (r - mean_g)
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
from rlhf_megatron.algorithms.groups import Groups, group_advantages


@ADV_ESTIMATORS.register("rloo", needs=("rewards", "group_ids"), scope="group")
def rloo(inputs: AdvantageInputs, params: None) -> AdvantageOutputs:
    """One advantage a sample, on all its response tokens; 0 where no other sample of the group is valid."""
    centered_B = group_advantages(sample_rewards(inputs), inputs.group_ids_B, inputs.is_valid_B, epsilon=None)
    groups = Groups.of(inputs.group_ids_B, inputs.is_valid_B)
    count_G = groups.counts()
    factor_G = count_G / (count_G - 1).clamp(min=1)
    return of_samples(centered_B * factor_G[groups.index_B], inputs)
