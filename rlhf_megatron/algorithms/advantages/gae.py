"""Generalized advantage estimation: a critic's values as the baseline of each token.

"High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438, equation 16). With the
response tokens of a sample numbered 0 .. n - 1, and nothing after the last one (V_n = 0, A_n = 0):

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    return  = A_t + V_t                         made before whitening

A token inside a response that the policy did not sample (a tool's output, mask False) is no time step: V and A pass it
unchanged, and a reward on it does not count.

A sample of masked status trains nothing: its advantages are 0 and its returns are its values. That makes its value
loss 0 only until the critic's first optimizer step, so **the caller must give its tokens a value-loss weight of 0**.
"""

# B samples, T packed tokens, N response tokens of valid samples

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import ADV_ESTIMATORS, AdvantageInputs, AdvantageOutputs

WHITEN_EPSILON = 1e-8  # added to the variance; the field's


@dataclass(frozen=True)
class GAEParams:
    gamma: float = 1.0  # discount of the next token's value
    lam: float = 1.0  # weight of longer returns: 0 trusts the critic, 1 the rewards
    whiten: bool = True  # advantages of a step to mean 0 and variance 1

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} ({value}) must be at least 0 and at most 1; 1.0 is usual.")


@ADV_ESTIMATORS.register("gae", GAEParams, needs=("token_rewards", "values"))
def gae(inputs: AdvantageInputs, params: GAEParams) -> AdvantageOutputs:
    """Advantages (whitened over the step where `params.whiten`) and returns, both 0 outside of the response mask.

    Metric critic/vf_explained_var = 1 - Var(returns - values) / Var(returns) over the response tokens of valid
    samples; left out where the returns do not vary.
    """
    assert inputs.token_rewards_T is not None and inputs.values_T is not None, "gae needs token_rewards and values"
    mask_T, values_T = inputs.response_mask_T, inputs.values_T.float()
    trains_T = mask_T & inputs.is_valid_B.repeat_interleave(inputs.offsets.diff())
    num_after_N = _num_after(trains_T, inputs.offsets)
    values_N = values_T[trains_T].double()
    next_values_N = values_N.roll(-1).masked_fill(num_after_N == 0, 0.0)
    deltas_N = inputs.token_rewards_T[trains_T].double() + params.gamma * next_values_N - values_N
    advantages_N = discounted_sums(deltas_N, num_after_N, params.gamma * params.lam)

    returns_T = values_T.masked_fill(~mask_T, 0.0)
    returns_T[trains_T] = (advantages_N + values_N).float()
    advantages_T = torch.zeros_like(values_T)
    advantages_T[trains_T] = (whitened(advantages_N) if params.whiten else advantages_N).float()
    return AdvantageOutputs(advantages_T, returns_T, _explained_variance(advantages_N, values_N))


def discounted_sums(terms_N: Tensor, num_after_N: Tensor, decay: float) -> Tensor:
    """y_n = terms_n + decay * y_{n + 1} within each segment; `num_after_N`: entries of the segment after each.

    By doubling: when each entry sums the first k terms from it on, adding decay^k times the entry k further makes them
    2k. log2 of the longest segment rounds over the whole column, whatever the number of segments.
    """
    sums_N = terms_N.clone()
    longest = int(num_after_N.max()) + 1 if num_after_N.numel() else 0
    reach, factor = 1, decay
    while reach < longest and factor != 0.0:
        further_N = factor * sums_N[reach:]
        sums_N[:-reach] += further_N.masked_fill_(num_after_N[:-reach] < reach, 0.0)
        reach, factor = 2 * reach, factor * factor
    return sums_N


def whitened(column_N: Tensor) -> Tensor:
    """Mean 0 and (unbiased) variance 1; as it is where there are fewer than 2 entries, which have no variance."""
    if column_N.numel() < 2:
        return column_N
    variance, mean = torch.var_mean(column_N, correction=1)
    return (column_N - mean) * (variance + WHITEN_EPSILON).rsqrt()


def _num_after(trains_T: Tensor, offsets: Tensor) -> Tensor:
    """[N] int64: how many of the True tokens of its sample follow each True token."""
    counts_T = trains_T.cumsum(0)  # True tokens up to and with this one
    before = torch.cat([counts_T.new_zeros(1), counts_T])  # before each position, and of all
    at_end_B = before[offsets[1:]]
    return (at_end_B.repeat_interleave(offsets.diff()) - counts_T)[trains_T]


def _explained_variance(advantages_N: Tensor, values_N: Tensor) -> dict[str, float]:
    if values_N.numel() < 2:
        return {}
    variance = (advantages_N + values_N).var().item()
    return {"critic/vf_explained_var": 1.0 - advantages_N.var().item() / variance} if variance > 0 else {}
