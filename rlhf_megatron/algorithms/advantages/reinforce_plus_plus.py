"""REINFORCE++: the discounted rewards to go, whitened over the step. No critic, no groups.

"REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization" (arXiv 2501.03262):

    A_t = whiten(G_t)        G_t = r_t + gamma G_{t+1}        over the response tokens of the step

With KL in the reward (the paper's setting) r_t has the KL term of token t; without, only the last token has a reward.
`reinforce_plus_plus_baseline` takes the mean of the group as baseline: rewards centered by group, then whitened.
"""
# T packed tokens, N response tokens of valid samples
# B samples

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.base import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    response_lengths,
    sample_rewards,
    spread,
)
from rlhf_megatron.algorithms.advantages.tokens import ResponseTokens, whiten_, whitened_samples
from rlhf_megatron.algorithms.groups import Groups, group_advantages


@dataclass(frozen=True)
class ReinforcePlusPlusParams:
    gamma: float = 1.0  # discount of the next token's reward

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma ({self.gamma}) must be at least 0 and at most 1; 1.0 is usual.")


@ADV_ESTIMATORS.register("reinforce_plus_plus", ReinforcePlusPlusParams, needs=("token_rewards",), scope="step")
def reinforce_plus_plus(inputs: AdvantageInputs, params: ReinforcePlusPlusParams) -> AdvantageOutputs:
    """One advantage a token. A token inside a response that the policy did not sample is no time step."""
    assert inputs.token_rewards_T is not None, "reinforce_plus_plus needs token_rewards"
    tokens = ResponseTokens.of(inputs)
    return AdvantageOutputs(tokens.put(whiten_(tokens.sums_to_go(inputs.token_rewards_T, params.gamma))))


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline", needs=("rewards", "group_ids"), scope="group")
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
