"""A baseline for each position of the response: rewards to go of the group, weighted by how much
gradient came before.

"The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (arXiv 2602.07078). With
G_t the rewards to go of a sample, pi the probabilities of the trainer's policy at the start of the
update, and w the paper's logit-gradient proxy of a token's squared gradient norm:

    A_t = G_t - B_t        B_t = (sum over the group of G_t W_t) / (sum over the group of W_t)
    W_t = sum over s <= t of rho_s^2 w_s        w = 1 - 2 pi(token) + sum over the
                                                vocabulary of pi^2

over the valid samples of the group that have a response token at position t. rho is 1, or the
importance weight of the trainer's policy against the engine's where a threshold truncates it.

Position t counts all tokens from the first of the response on, a tool's too.

    tir_optimal_token_baseline  the same for tool-integrated reasoning: only tokens that the
                                policy sampled count
"""
# B samples, T packed tokens, N response tokens of valid samples, G groups, C cells:
# positions of each group

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
)
from rlhf_megatron.algorithms.advantages.response_tokens import ResponseTokens
from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor, torch

PART_TOKENS = 131072  # tokens of a part, about
NEEDS = ("token_rewards", "group_ids", "log_probs", "sum_squares", "rollout_log_probs")


@dataclass(frozen=True)
class OptimalTokenBaselineParams:
    # no baseline where only the longest sample of a group has tokens; else A is 0 there
    handle_zero_tail: bool = True
    # truncation of rho, engine against trainer; null: rho is 1
    rollout_is_threshold: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a threshold that is not above 0."""
        if self.rollout_is_threshold is not None and not self.rollout_is_threshold > 0:
            raise ValueError(
                f"rollout_is_threshold ({self.rollout_is_threshold}) must be above 0: it is the"
                " largest importance weight; use 2.0, or null for no weights."
            )


@ADV_ESTIMATORS.register(
    "optimal_token_baseline", OptimalTokenBaselineParams, needs=NEEDS, scope="group"
)
def optimal_token_baseline(
    inputs: AdvantageInputs, params: OptimalTokenBaselineParams
) -> AdvantageOutputs:
    """Return one advantage for each response token: the rewards to go minus the baseline of the
    token's position in the response, tool tokens counted. It is 0 in a group with fewer than two
    valid samples that have response tokens.
    """
    return estimate_by_groups(inputs, lambda part: _compute_advantages_by_position(part, params))


def _compute_advantages_by_position(
    inputs: AdvantageInputs, params: OptimalTokenBaselineParams
) -> Tensor:
    """Return [T] advantages with positions that count all tokens from the first of the response
    on.
    """
    tokens = ResponseTokens.from_inputs(inputs)
    first_B, last_B = _find_end_positions(tokens)
    spans_B = (last_B - first_B + 1).masked_fill(tokens.lengths_B == 0, 0)
    return compute_token_baseline_advantages(
        inputs, params, tokens, tokens.positions_N - tokens.repeat_per_token(first_B), spans_B
    )


def estimate_by_groups(
    inputs: AdvantageInputs, estimate: Callable[[AdvantageInputs], Tensor]
) -> AdvantageOutputs:
    """Call `estimate`, which returns [T] advantages, on some whole groups at a time, and return the
    advantages of the whole step: memory that stays in a cache is several times faster.

    All samples are taken at once where the samples of a group are not adjacent.
    """
    advantages_T = torch.empty(inputs.response_mask_T.numel(), device=inputs.response_mask_T.device)
    for samples in _iterate_group_parts(inputs):
        tokens = slice(int(inputs.offsets[samples.start]), int(inputs.offsets[samples.stop]))
        advantages_T[tokens] = estimate(_slice_inputs(inputs, samples, tokens))
    return AdvantageOutputs(advantages_T)


def _iterate_group_parts(inputs: AdvantageInputs) -> Iterator[slice]:
    """Yield slices of samples that hold whole groups, each with at least PART_TOKENS tokens but the
    last; one slice of all samples where the samples of a group are not adjacent.
    """
    num_samples = inputs.group_ids_B.numel()
    ids_R, counts_R = inputs.group_ids_B.unique_consecutive(return_counts=True)
    if ids_R.unique().numel() < ids_R.numel():
        yield slice(0, num_samples)
        return
    first = 0
    tokens = inputs.offsets.tolist()
    for last in counts_R.cumsum(0).tolist():
        if tokens[last] - tokens[first] >= PART_TOKENS or last == num_samples:
            yield slice(first, last)
            first = last


def _slice_inputs(inputs: AdvantageInputs, samples: slice, tokens: slice) -> AdvantageInputs:
    """Return the inputs of some samples, with the columns that these estimators read."""

    def slice_column(column_T: Tensor | None) -> Tensor | None:
        """Return the part of a token column, or None."""
        return None if column_T is None else column_T[tokens]

    return AdvantageInputs(
        rewards_B=inputs.rewards_B[samples],
        group_ids_B=inputs.group_ids_B[samples],
        is_valid_B=inputs.is_valid_B[samples],
        response_mask_T=inputs.response_mask_T[tokens],
        offsets=inputs.offsets[samples.start : samples.stop + 1] - tokens.start,
        token_rewards_T=slice_column(inputs.token_rewards_T),
        log_probs_T=slice_column(inputs.log_probs_T),
        rollout_log_probs_T=slice_column(inputs.rollout_log_probs_T),
        sum_squares_T=slice_column(inputs.sum_squares_T),
    )


def compute_token_baseline_advantages(
    inputs: AdvantageInputs,
    params: OptimalTokenBaselineParams,
    tokens: ResponseTokens,
    positions_N: Tensor,
    spans_B: Tensor,
) -> Tensor:
    """Return [T] advantages, float32: rewards to go minus a baseline for each position.

    Args:
        positions_N: int64, of each token within its sample, from 0 on.
        spans_B: int64, one behind the last position of each sample; 0 for one without tokens.
    """
    assert inputs.token_rewards_T is not None, "optimal token baselines need token_rewards"
    groups = PromptGroups.from_ids(inputs.group_ids_B, inputs.is_valid_B & (tokens.lengths_B > 0))
    longest_G, second_G = groups.find_top_two(spans_B)
    widths_G = longest_G.clamp(min=0).long()
    cell_N = tokens.repeat_per_token((widths_G.cumsum(0) - widths_G)[groups.index_B]).add_(
        positions_N
    )
    to_go_N = tokens.compute_sums_to_go(inputs.token_rewards_T)
    energy_N = tokens.compute_sums_so_far(
        _compute_gradient_norms(inputs, tokens, params.rollout_is_threshold)
    )
    advantages_N = to_go_N - _compute_cell_baselines(to_go_N, energy_N, cell_N, int(widths_G.sum()))
    if params.handle_zero_tail:
        is_tail_N = positions_N >= tokens.repeat_per_token(
            second_G.clamp(min=0).long()[groups.index_B]
        )
        advantages_N = torch.where(is_tail_N, to_go_N, advantages_N)
    is_alone_N = tokens.repeat_per_token((groups.count_valid_samples() < 2)[groups.index_B])
    return tokens.scatter_tokens(advantages_N.masked_fill_(is_alone_N, 0.0))


def _compute_gradient_norms(
    inputs: AdvantageInputs, tokens: ResponseTokens, threshold: float | None
) -> Tensor:
    """Return rho^2 w of each response token, [N] float64, not negative; w is computed as (1 - pi)^2
    + the squared probabilities of the other tokens.
    """
    assert inputs.log_probs_T is not None, "optimal token baselines need log_probs"
    assert inputs.sum_squares_T is not None, "optimal token baselines need sum_squares"
    log_probs_N = tokens.gather_tokens(inputs.log_probs_T)
    others_N = (tokens.gather_tokens(inputs.sum_squares_T) - (2 * log_probs_N).exp()).clamp_(min=0)
    norms_N = log_probs_N.expm1().square_().add_(others_N)
    if threshold is not None:
        assert inputs.rollout_log_probs_T is not None, "importance weights need rollout_log_probs"
        log_ratio_N = log_probs_N - tokens.gather_tokens(inputs.rollout_log_probs_T)
        rho_N = log_ratio_N.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_().clamp_(max=threshold)
        norms_N *= rho_N.square_()
    return norms_N


def _compute_cell_baselines(
    to_go_N: Tensor, energy_N: Tensor, cell_N: Tensor, num_cells: int
) -> Tensor:
    """Return for each token the mean of `to_go_N` over its cell, weighted by `energy_N`, [N]
    float64. It is exactly the common entry where all entries of a cell are equal.

    It is a plain mean where all weights of a cell are 0, as where every token so far was certain.
    """
    low_C = torch.full((num_cells,), torch.inf, dtype=torch.float64, device=to_go_N.device)
    low_C.scatter_reduce_(0, cell_N, to_go_N, "amin")
    above_N = to_go_N - low_C.index_select(0, cell_N)
    total_C = torch.zeros_like(low_C).index_add_(0, cell_N, energy_N)
    if bool((total_C == 0).any()):
        energy_N = torch.where((total_C > 0).index_select(0, cell_N), energy_N, 1.0)
        total_C.zero_().index_add_(0, cell_N, energy_N)
    weighted_C = torch.zeros_like(low_C).index_add_(0, cell_N, above_N.mul_(energy_N))
    return weighted_C.div_(total_C).add_(low_C).index_select(0, cell_N)


def _find_end_positions(tokens: ResponseTokens) -> tuple[Tensor, Tensor]:
    """Return the positions of the first and the last response token of each sample, [B] int64 each;
    the entry of a sample without response tokens is arbitrary.
    """
    ends_B = tokens.lengths_B.cumsum(0)
    places = torch.cat([tokens.positions_N, tokens.positions_N.new_zeros(1)])
    return places[ends_B - tokens.lengths_B], places[ends_B - 1]


@ADV_ESTIMATORS.register(
    "tir_optimal_token_baseline", OptimalTokenBaselineParams, needs=NEEDS, scope="group"
)
def tir_optimal_token_baseline(
    inputs: AdvantageInputs, params: OptimalTokenBaselineParams
) -> AdvantageOutputs:
    """Return one advantage for each response token: the rewards to go minus the baseline of the
    token's position, counting only tokens that the policy sampled. It is 0 in a group with fewer
    than two valid samples that have response tokens.
    """
    return estimate_by_groups(
        inputs, lambda part: _compute_advantages_by_sampled_position(part, params)
    )


def _compute_advantages_by_sampled_position(
    inputs: AdvantageInputs, params: OptimalTokenBaselineParams
) -> Tensor:
    """Return [T] advantages with positions that count only the tokens that the policy sampled."""
    tokens = ResponseTokens.from_inputs(inputs)
    before_B = tokens.lengths_B.cumsum(0) - tokens.lengths_B
    positions_N = torch.arange(
        tokens.positions_N.numel(), device=tokens.positions_N.device
    ) - tokens.repeat_per_token(before_B)
    return compute_token_baseline_advantages(inputs, params, tokens, positions_N, tokens.lengths_B)
