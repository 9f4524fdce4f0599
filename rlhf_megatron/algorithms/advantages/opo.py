"""On-policy optimisation with the optimal baseline: rewards against a mean weighted by response length.

"On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585). The baseline of least variance weighs a
reward by the squared norm of its sample's gradient, which is taken to grow with the length n of the response:

    A = r - (sum over group g of n r) / (sum over group g of n)
"""

# B samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.base import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    of_samples,
    response_lengths,
    sample_rewards,
)
from rlhf_megatron.algorithms.groups import Groups, group_advantages


@ADV_ESTIMATORS.register("opo", needs=("rewards", "group_ids"), scope="group")
def opo(inputs: AdvantageInputs, params: None) -> AdvantageOutputs:
    """One advantage a sample, on all its response tokens.

    Exactly 0 for a sample of masked status, in a group with one valid sample, and in a group of equal rewards.
    """
    lengths_B = response_lengths(inputs.response_mask_T, inputs.offsets)
    groups = Groups.of(inputs.group_ids_B, inputs.is_valid_B)
    # The baseline of centered rewards: no digits are lost where rewards are far from 0.
    centered_B = group_advantages(sample_rewards(inputs), inputs.group_ids_B, inputs.is_valid_B, epsilon=None)
    baseline_G = groups.sums(lengths_B * centered_B) / groups.sums(lengths_B).clamp(min=1)
    advantages_B = (centered_B - baseline_G[groups.index_B]).masked_fill(~inputs.is_valid_B, 0.0)
    return of_samples(advantages_B, inputs)
