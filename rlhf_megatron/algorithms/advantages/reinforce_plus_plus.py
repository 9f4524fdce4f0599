"""REINFORCE++: the discounted rewards to go, whitened over the step. No critic, no groups.

"REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization"
(arXiv 2501.03262):

    A_t = whiten(G_t)        G_t = r_t + gamma G_{t+1}        over the response tokens of the step

With KL in the reward (the paper's setting) r_t has the KL term of token t; without, only the last
token has a reward.

    reinforce_plus_plus_baseline  REINFORCE++ with groups: rewards minus the mean of their group,
                                  whitened over the step
"""
# B samples, T packed tokens, N response tokens of valid samples

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    count_response_tokens,
    register_group_estimator,
)
from rlhf_megatron.algorithms.advantages.response_tokens import (
    ResponseTokens,
    whiten_advantages_,
    whiten_sample_advantages,
)
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor


@dataclass(frozen=True)
class ReinforcePlusPlusParams:
    gamma: float = 1.0  # discount of the next token's reward

    def __post_init__(self) -> None:
        """Raise ValueError for a gamma outside of [0, 1]."""
        if not 0 <= self.gamma <= 1:
            raise ValueError(
                f"gamma ({self.gamma}) must be at least 0 and at most 1; 1.0 is usual."
            )


@ADV_ESTIMATORS.register(
    "reinforce_plus_plus", ReinforcePlusPlusParams, needs=("token_rewards",), scope="step"
)
def reinforce_plus_plus(
    inputs: AdvantageInputs, params: ReinforcePlusPlusParams
) -> AdvantageOutputs:
    """Return one advantage for each response token: the discounted rewards to go, whitened over the
    step. A token inside a response that the policy did not sample is no time step.
    """
    assert inputs.token_rewards_T is not None, "reinforce_plus_plus needs token_rewards"
    tokens = ResponseTokens.from_inputs(inputs)
    return AdvantageOutputs(
        tokens.scatter_tokens(
            whiten_advantages_(tokens.compute_sums_to_go(inputs.token_rewards_T, params.gamma))
        )
    )


@register_group_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    rewards_B: Tensor, groups: PromptGroups, inputs: AdvantageInputs, params: None
) -> Tensor:
    """Return the advantages [B]: rewards minus the mean of their group, whitened over the step's
    response tokens. A group with one valid sample is in no statistic and gets 0. A group of equal
    rewards counts in the statistics: it gets the whitened value of 0, which is 0 where all
    responses are of one length.
    """
    is_kept_B = inputs.is_valid_B & (groups.count_valid_samples() > 1)[groups.index_B]
    lengths_B = count_response_tokens(inputs.response_mask_T, inputs.offsets)
    return whiten_sample_advantages(groups.compute_advantages(rewards_B), lengths_B, is_kept_B)
