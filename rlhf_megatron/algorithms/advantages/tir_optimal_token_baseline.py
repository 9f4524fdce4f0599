"""The optimal token baseline for tool-integrated reasoning: positions count only tokens that the policy sampled.

"The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (arXiv 2602.07078); the formula is that of
`optimal_token_baseline`. Outputs of tools are of any length: without them, position t of each sample has t tokens of
the policy before it, and so samples of a group are compared at the same amount of gradient.
"""

# B samples, N response tokens of valid samples

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import ADV_ESTIMATORS, AdvantageInputs, AdvantageOutputs
from rlhf_megatron.algorithms.advantages.optimal_token_baseline import (
    NEEDS,
    OptimalTokenBaselineParams,
    by_groups,
    token_advantages,
)
from rlhf_megatron.algorithms.advantages.response_tokens import ResponseTokens


@ADV_ESTIMATORS.register("tir_optimal_token_baseline", OptimalTokenBaselineParams, needs=NEEDS)
def tir_optimal_token_baseline(inputs: AdvantageInputs, params: OptimalTokenBaselineParams) -> AdvantageOutputs:
    """One advantage a token. 0 in a group with less than two valid samples that have response tokens."""
    return by_groups(inputs, lambda part: _of_part(part, params))


def _of_part(inputs: AdvantageInputs, params: OptimalTokenBaselineParams) -> Tensor:
    tokens = ResponseTokens.of(inputs)
    before_B = tokens.lengths_B.cumsum(0) - tokens.lengths_B
    positions_N = torch.arange(tokens.places_N.numel(), device=tokens.places_N.device) - tokens.spread(before_B)
    return token_advantages(inputs, params, tokens, positions_N, tokens.lengths_B)
