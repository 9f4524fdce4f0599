"""ReMax: the rewards to go against the reward of a greedy response to the same prompt.

"ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language
Models" (arXiv 2310.10505, algorithm 1):

    A_t = (sum over s >= t of r_s) - r_greedy

The greedy sample trains nothing. Its reward is its score, also where KL is in the rewards of the
others: any number that does not depend on the sampled tokens is a baseline without bias.
"""

# B samples, T packed tokens, N response tokens of valid samples

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
)
from rlhf_megatron.algorithms.advantages.response_tokens import ResponseTokens


@ADV_ESTIMATORS.register("remax", needs=("token_rewards", "greedy_rewards"), scope="sample")
def remax(inputs: AdvantageInputs, params: None) -> AdvantageOutputs:
    """Return one advantage for each response token: the rewards to go minus the greedy sample's
    reward. It is 0 where the greedy sample of the prompt is of masked status: there is no baseline.
    """
    assert inputs.token_rewards_T is not None, "remax needs token_rewards"
    assert inputs.greedy_rewards_B is not None, "remax needs greedy_rewards"
    tokens = ResponseTokens.from_inputs(inputs)
    baseline_N = tokens.repeat_per_token(inputs.greedy_rewards_B.double())
    advantages_N = (tokens.compute_sums_to_go(inputs.token_rewards_T) - baseline_N).masked_fill_(
        baseline_N.isnan(), 0.0
    )
    return AdvantageOutputs(tokens.scatter_tokens(advantages_N))
