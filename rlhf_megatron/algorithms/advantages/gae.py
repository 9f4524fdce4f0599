"""Generalized advantage estimation: a critic's values as the baseline of each token.

"High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438,
equation 16). With the response tokens of a sample numbered 0 .. n - 1, and nothing after the last
one (V_n = 0, A_n = 0):

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    return  = A_t + V_t                         made before whitening

A token inside a response that the policy did not sample (a tool's output, mask False) is no time
step: V and A pass it unchanged, and a reward on it does not count.

A sample of masked status trains nothing: its advantages are 0 and its returns are its values. That
makes its value loss 0 only until the critic's first optimizer step, so **the caller must give its
tokens a value-loss weight of 0**.

The step's samples are worked on in parts that stay in a cache; memory is where the time goes. The
columns are the controller's, on the CPU.
"""

# B samples, T packed tokens, N response tokens of valid samples (of a part)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    find_true_positions,
)
from rlhf_megatron.algorithms.advantages.response_tokens import (
    WHITEN_EPSILON,
    RunningMoments,
    compute_discounted_sums_,
)
from rlhf_megatron.lazy import Tensor, torch

PART_TOKENS = 131072  # tokens of a part, about


@dataclass(frozen=True)
class GAEParams:
    gamma: float = 1.0  # discount of the next token's value
    lam: float = 1.0  # weight of longer returns: 0 trusts the critic, 1 the rewards
    whiten: bool = True  # advantages of a step to mean 0 and variance 1

    def __post_init__(self) -> None:
        """Raise ValueError for a gamma or lam outside of [0, 1]."""
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ValueError(
                    f"{name} ({value}) must be at least 0 and at most 1; 1.0 is usual."
                )


@dataclass(frozen=True)
class _GAEBlock:
    """A block of consecutive whole samples."""

    tokens: slice
    trained_positions_N: Tensor | None  # int64, which of the part's tokens train; None: all
    lengths_B: Tensor  # tokens that train, of each sample
    has_invalid: bool

    @property
    def num_trained(self) -> int:
        """Return the number of tokens of the block that train."""
        return (
            self.tokens.stop - self.tokens.start
            if self.trained_positions_N is None
            else self.trained_positions_N.numel()
        )

    def gather_trained(self, column_T: Tensor) -> Tensor:
        """Return the entries of a step's column at the tokens of the block that train, [N]."""
        column = column_T[self.tokens]
        return (
            column
            if self.trained_positions_N is None
            else column.index_select(0, self.trained_positions_N)
        )

    def scatter_trained(self, column_T: Tensor, column_N: Tensor) -> None:
        """Write entries into a step's column at the tokens of the block that train."""
        if self.trained_positions_N is None:
            column_T[self.tokens] = column_N
        else:
            column_T[self.tokens].scatter_(0, self.trained_positions_N, column_N.to(column_T.dtype))


@ADV_ESTIMATORS.register("gae", GAEParams, needs=("token_rewards", "values"), scope="sample")
def gae(inputs: AdvantageInputs, params: GAEParams) -> AdvantageOutputs:
    """Return advantages (whitened over the step where `params.whiten`) and returns, both 0 outside
    of the response mask. A sample of masked status has its values as returns.

    Metric critic/vf_explained_var = 1 - Var(returns - values) / Var(returns) over the response
    tokens of valid samples; left out where the returns do not vary.
    """
    assert inputs.token_rewards_T is not None and inputs.values_T is not None, (
        "gae needs token_rewards and values"
    )
    values_T = inputs.values_T
    returns_T, advantages_T = (
        torch.zeros(values_T.shape, device=values_T.device) for _ in range(2)
    )
    sums = torch.empty(values_T.numel() + 1, dtype=torch.float64, device=values_T.device)
    of_advantages = RunningMoments()
    of_returns = RunningMoments()
    num_done = 0
    for part in _iterate_sample_blocks(inputs):
        if part.has_invalid:
            masked_T = ~inputs.response_mask_T[part.tokens]
            returns_T[part.tokens] = values_T[part.tokens].float().masked_fill_(masked_T, 0.0)
        values_N = part.gather_trained(values_T).double()
        sums_N1 = sums[num_done : num_done + part.num_trained + 1]
        advantages_N = sums_N1[:-1]
        advantages_N.copy_(part.gather_trained(inputs.token_rewards_T))
        _subtract_values_(advantages_N, values_N, part.lengths_B, params.gamma)
        compute_discounted_sums_(sums_N1, part.lengths_B, params.gamma * params.lam)
        of_advantages = of_advantages.merge_entries(advantages_N)
        returns_N = values_N.add_(advantages_N)
        of_returns = of_returns.merge_entries(returns_N)
        part.scatter_trained(returns_T, returns_N)
        if params.whiten:
            num_done += part.num_trained
        else:
            part.scatter_trained(advantages_T, advantages_N)
    if params.whiten:
        _write_whitened_advantages(advantages_T, sums, of_advantages, inputs)
    return AdvantageOutputs(
        advantages_T, returns_T, _compute_explained_variance(of_advantages, of_returns)
    )


def _iterate_sample_blocks(inputs: AdvantageInputs) -> Iterator[_GAEBlock]:
    """Yield consecutive blocks of whole samples, of about PART_TOKENS tokens each (at least one
    sample), with the positions of the tokens that train.
    """
    offsets = inputs.offsets
    num_samples = inputs.offsets.numel() - 1
    has_invalid = not bool(inputs.is_valid_B.all())
    first = 0
    while first < num_samples:
        start = int(offsets[first])
        last = max(first + 1, int(torch.searchsorted(offsets, start + PART_TOKENS, right=True)) - 1)
        tokens = slice(start, int(offsets[last]))
        borders = offsets[first : last + 1] - start
        trains_T = inputs.response_mask_T[tokens]
        if has_invalid:
            trains_T = trains_T & inputs.is_valid_B[first:last].repeat_interleave(borders.diff())
        kept_N = find_true_positions(trains_T)
        if kept_N.numel() == trains_T.numel():
            yield _GAEBlock(tokens, None, borders.diff(), has_invalid)
        else:
            yield _GAEBlock(tokens, kept_N, torch.searchsorted(kept_N, borders).diff(), has_invalid)
        first = last


def _subtract_values_(rewards_N: Tensor, values_N: Tensor, lengths_B: Tensor, gamma: float) -> None:
    """Turn the rewards of the trained tokens into GAE's deltas, in place: r_t + gamma V_{t+1} -
    V_t, with nothing behind the last token of each sample.
    """
    if not rewards_N.numel():
        return
    last_S = lengths_B[lengths_B > 0].cumsum(0) - 1
    rewards_N -= values_N
    deltas_S = rewards_N.index_select(0, last_S)
    rewards_N[:-1].add_(values_N[1:], alpha=gamma)
    rewards_N.scatter_(0, last_S, deltas_S)


def _write_whitened_advantages(
    advantages_T: Tensor, sums: Tensor, moments: RunningMoments, inputs: AdvantageInputs
) -> None:
    """Write the advantages `sums` into `advantages_T`, whitened to mean 0 and (unbiased) variance
    1. Fewer than 2 entries have no variance and stay as they are.
    """
    mean = moments.mean
    scale = (moments.variance + WHITEN_EPSILON) ** -0.5
    num_done = 0
    for part in _iterate_sample_blocks(inputs):
        column_N = sums[num_done : num_done + part.num_trained]
        if moments.count > 1:
            column_N.sub_(mean).mul_(scale)
        part.scatter_trained(advantages_T, column_N)
        num_done += part.num_trained


def _compute_explained_variance(
    advantage_moments: RunningMoments, return_moments: RunningMoments
) -> dict[str, float]:
    """Return the metric critic/vf_explained_var, or {} where the returns do not vary."""
    if return_moments.count < 2 or not return_moments.variance > 0:
        return {}
    return {"critic/vf_explained_var": 1.0 - advantage_moments.variance / return_moments.variance}
