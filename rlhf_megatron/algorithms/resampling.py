"""Policy filtration: a step's samples drawn again, those whose reward is reliable more often.

PF-PPO, "Policy Filtration for RLHF to Mitigate Noise in Reward Models" (arXiv 2409.06957): a reward
model is reliable where it is sure, at the ends of its scale. Weights of a draw with
replacement, r the reward:

    pow         |r|^weight_pow
    max_min     1 for the largest and the smallest reward, 0 for all others
    max_random  0.4 for the largest reward, 0.1 for all others

What is drawn are whole samples, tokens, log-probs and advantages alike: select the batch by the
indices once, after the advantages were made from what was sampled.
"""

# B samples, V valid samples

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

ReweightMethod = Literal["pow", "max_min", "max_random"]


@dataclass(frozen=True)
class ResamplingParams:
    reweight_method: ReweightMethod = "pow"  # pow, max_min or max_random
    weight_pow: float = 2.0  # of pow: the exponent of |reward|

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown method or an exponent out of range."""
        if self.reweight_method not in get_args(ReweightMethod):
            known = ", ".join(get_args(ReweightMethod))
            raise ValueError(f"unknown reweight_method {self.reweight_method!r}; known: {known}.")
        if not 0 <= self.weight_pow < float("inf"):
            raise ValueError(
                f"weight_pow ({self.weight_pow}) must be at least 0 and finite; 2.0 is usual."
            )


def draw_resampled_indices(
    rewards_B: Tensor, is_valid_B: Tensor, params: ResamplingParams, seed: int
) -> Tensor:
    """Draw as many samples as there are, with replacement, and return the index of the sample at
    each place, [B] int64.

    Samples of masked status are never drawn; where none is valid, all stay in their places. The
    draw is uniform over the valid samples where their rewards are equal. The same seed draws the
    same on any machine; derive `seed` from (run, step).
    """
    valid_V = is_valid_B.nonzero().view(-1)
    if not valid_V.numel():
        return torch.arange(rewards_B.numel())
    cumulative_V = compute_resampling_weights(rewards_B[valid_V], params).cumsum(0)
    generator = torch.Generator().manual_seed(seed)
    draws_B = (
        torch.rand(rewards_B.numel(), generator=generator, dtype=torch.float64) * cumulative_V[-1]
    )
    # The first entry above the draw: one with a weight above 0. A product that was rounded up to
    # the sum is above none.
    drawn_B = torch.searchsorted(cumulative_V, draws_B, right=True)
    last_with_weight = torch.searchsorted(cumulative_V, cumulative_V[-1])
    return valid_V[drawn_B.minimum(last_with_weight)]


def compute_resampling_weights(rewards_V: Tensor, params: ResamplingParams) -> Tensor:
    """Return the weights, [V] float64, not all 0, in proportion to which samples are drawn. There
    must be at least one reward, and all must be finite.
    """
    rewards_V = rewards_V.to(torch.float64)
    assert bool(rewards_V.isfinite().all()), "rewards of valid samples are numbers"
    high = rewards_V.max()
    low = rewards_V.min()
    if high == low:
        return torch.ones_like(rewards_V)
    if params.reweight_method == "max_min":
        return ((rewards_V == high) | (rewards_V == low)).to(torch.float64)
    if params.reweight_method == "max_random":
        return torch.where(rewards_V == high, 0.4, 0.1).to(torch.float64)
    # as a share: no power overflows
    return (rewards_V.abs() / rewards_V.abs().max()).pow(params.weight_pow)
