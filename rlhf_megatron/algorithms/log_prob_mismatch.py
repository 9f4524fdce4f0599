"""How far the engine's log-probs are from the trainer's on the tokens that were sampled.
A histogram counts how many tokens differ by how much, over logarithmic bins. All
functions are pure.
"""
# T packed tokens, N response tokens, K worst tokens

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.advantage_estimator import find_true_positions
from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO

BLOCK_TOKENS = 65536  # tokens

FIRST_DECADE = -8
LAST_DECADE = 1
BINS_A_DECADE = 4
# Nats, to 4 digits. Below the first decade float32 has no digits left; the last bin is
# open to the right.
HISTOGRAM_EDGES: tuple[float, ...] = (
    0.0,
    *(
        float(f"{10 ** (FIRST_DECADE + i / BINS_A_DECADE):.4g}")
        for i in range((LAST_DECADE - FIRST_DECADE) * BINS_A_DECADE + 1)
    ),
)


def compute_mismatch_statistics(
    rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor
) -> dict[str, float]:
    """Return the metrics training/rollout_* under the names of `metric_names`, over the tokens of
    `response_mask_T`; all 0 where there are none.

    `training/rollout_kl` is the mean over tokens of r - 1 - log r, r = exp(old_log_probs -
    rollout_log_probs) with the logarithm clamped to +-20: Schulman's k3
    (http://joschu.net/blog/kl-approx.html), an estimate of KL(engine || trainer), as the engine
    drew the tokens. Percentiles are nearest-rank. A difference that is not a number counts as
    infinite, so that no threshold lets it pass.
    """
    found = _sum_differences(rollout_log_probs_T, old_log_probs_T, response_mask_T)
    count = found.diff_N.numel()
    mean = _sum_in_blocks(found.diff_N) / max(count, 1)
    p50, p99, p100 = compute_percentiles(found.diff_N, (0.5, 0.99, 1.0), may_reorder=True)
    return {
        "training/rollout_log_probs_diff_max": p100,
        "training/rollout_log_probs_diff_p50": p50,
        "training/rollout_log_probs_diff_p99": p99,
        "training/rollout_log_probs_diff_mean": mean,
        "training/rollout_kl": found.kl_sum / max(count, 1),
        "training/rollout_probs_diff_valid": float(count > 0),
        "training/rollout_probs_diff_max": found.probs_diff_max,
        "training/rollout_probs_diff_mean": found.probs_diff_mean,
        "training/rollout_probs_diff_std": math.sqrt(found.probs_diff_squares / (count - 1))
        if count > 1
        else 0.0,
    }


@dataclass(frozen=True)
class _MismatchSums:
    # [N] in the type of the columns, of log-probs, absolute; infinite where that is not a number
    diff_N: Tensor
    kl_sum: float  # of k3
    probs_diff_max: float  # of probabilities, absolute
    probs_diff_mean: float
    probs_diff_squares: float  # sum of the squared distances from the mean


def _sum_differences(
    rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor
) -> _MismatchSums:
    """Return the differences of the response tokens and their sums, computed block by block: memory
    that stays in a cache is several times faster, and only one column is kept whole.
    """
    found = old_log_probs_T.new_empty(int(response_mask_T.count_nonzero()))
    first = 0
    kl_sum = 0.0
    mean = 0.0
    squares = 0.0
    top = torch.zeros((), dtype=torch.float64)
    for start in range(0, response_mask_T.numel(), BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        places_N = find_true_positions(response_mask_T[block])
        last = first + places_N.numel()
        if last == first:
            continue
        rollout_N = rollout_log_probs_T[block].index_select(0, places_N).to(torch.float64)
        trainer_N = old_log_probs_T[block].index_select(0, places_N).to(torch.float64)
        log_ratio_N = compute_log_ratio(rollout_N, trainer_N)
        found[first:last] = log_ratio_N.abs()
        log_ratio_N.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl_sum += log_ratio_N.expm1().sub_(log_ratio_N).sum().item()
        probs_diff_N = trainer_N.exp_().sub_(rollout_N.exp_()).abs_()
        top = torch.maximum(top, probs_diff_N.max())  # Python's max would lose what is not a number
        num_here = last - first
        mean_here = probs_diff_N.mean().item()
        apart = mean_here - mean
        squares += (
            probs_diff_N.sub_(mean_here).square_().sum().item()
            + apart * apart * first * num_here / last
        )
        mean += apart * num_here / last  # of two parts: Chan et al., 1979
        first = last
    return _MismatchSums(found, kl_sum, top.item(), mean, squares)


def find_worst_tokens(
    rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor, num_tokens: int
) -> Tensor:
    """Return the positions, [K] int64 in [0, T), of the at most `num_tokens` response tokens whose
    log-probs differ most, the worst first.
    """
    worst_K = torch.empty(0, dtype=torch.float64)
    places_K = torch.empty(0, dtype=torch.int64)
    for start in range(0, response_mask_T.numel(), BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        places_N = find_true_positions(response_mask_T[block])
        diff_N = compute_differences(
            rollout_log_probs_T[block][places_N], old_log_probs_T[block][places_N]
        )
        if len(worst_K) == num_tokens and not bool((diff_N > worst_K[-1]).any()):
            continue
        both = torch.cat([worst_K, diff_N]).topk(min(num_tokens, len(worst_K) + len(diff_N)))
        worst_K = both.values
        places_K = torch.cat([places_K, places_N + start])[both.indices]
    return places_K


def compute_log_ratio(rollout_log_probs: Tensor, trainer_log_probs: Tensor) -> Tensor:
    """Return trainer's - engine's log-prob; infinite where the difference is not a number."""
    return (trainer_log_probs - rollout_log_probs).nan_to_num(
        nan=math.inf, posinf=math.inf, neginf=-math.inf
    )


def compute_percentile(sorted_N: Tensor, share: float) -> float:
    """Return the percentile of sorted entries by nearest rank: the smallest entry that at least
    `share` of all entries do not exceed. 0 without entries.
    """
    count = sorted_N.numel()
    return sorted_N[max(math.ceil(share * count), 1) - 1].item() if count else 0.0


def compute_percentiles(
    column_N: Tensor, shares: Sequence[float], may_reorder: bool = False
) -> list[float]:
    """Return the percentile of each share, as `compute_percentile` does, of a column in any order;
    the column is partitioned, not sorted. `may_reorder`: the column may be reordered in place.
    """
    count = column_N.numel()
    if not count:
        return [0.0 for _ in shares]
    ranks = [max(math.ceil(share * count), 1) - 1 for share in shares]
    rest = (column_N if may_reorder else column_N.clone()).cpu().numpy()
    num_below = 0
    found = {}
    # one at a time, each in what is above the one before: numpy's fast way
    for rank in sorted(set(ranks)):
        place = rank - num_below
        if place == len(rest) - 1:
            found[rank] = float(rest.max())
            continue
        rest.partition(place)
        found[rank] = float(rest[place])
        rest = rest[place:]
        num_below = rank
    return [found[rank] for rank in ranks]


@dataclass(frozen=True)
class DifferenceHistogram:
    """The distribution of |trainer log-prob - engine log-prob| over some tokens, nats; infinite
    where one is not a number.
    """

    # one a bin between HISTOGRAM_EDGES: [edge i, edge i + 1); the last bin is open to the right
    counts: tuple[int, ...]
    num_tokens: int
    mean: float
    p99: float  # nearest rank
    max: float


def compute_differences(rollout_log_probs_T: Tensor, old_log_probs_T: Tensor) -> Tensor:
    """Return |trainer's - engine's log-prob| in nats, [T] float64; infinite where one of them is
    not a number.
    """
    return compute_log_ratio(
        rollout_log_probs_T.to(torch.float64), old_log_probs_T.to(torch.float64)
    ).abs()


def compute_response_differences(
    rollout_log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    response_mask_T: Tensor,
    runs: Sequence[slice] | None = None,
) -> Tensor:
    """Return `compute_differences` of the response tokens in `runs` (None: all tokens), [N], in the
    type of the columns. It is computed block by block, so that only one column is kept.
    """
    runs = [slice(0, response_mask_T.numel())] if runs is None else runs
    found = old_log_probs_T.new_empty(sum(run.stop - run.start for run in runs))
    count = 0
    for start, stop in (
        (start, min(start + BLOCK_TOKENS, run.stop))
        for run in runs
        for start in range(run.start, run.stop, BLOCK_TOKENS)
    ):
        places_N = find_true_positions(response_mask_T[start:stop])
        found[count : count + places_N.numel()] = compute_differences(
            rollout_log_probs_T[start:stop].index_select(0, places_N),
            old_log_probs_T[start:stop].index_select(0, places_N),
        )
        count += places_N.numel()
    return found[:count]


def make_difference_histogram(differences_N: Tensor) -> DifferenceHistogram:
    """Return the histogram of at least one difference. Changes the order of `differences_N` in
    place.
    """
    count = differences_N.numel()
    assert count, "a spread is of at least one token"
    inner = torch.tensor(HISTOGRAM_EDGES[1:-1], dtype=torch.float64)
    counts = torch.zeros(len(HISTOGRAM_EDGES) - 1, dtype=torch.int64)
    for block_N in differences_N.split(BLOCK_TOKENS):
        counts += torch.bincount(
            torch.bucketize(block_N.to(torch.float64), inner, right=True), minlength=len(counts)
        )
    mean = _sum_in_blocks(differences_N) / count
    p99, largest = compute_percentiles(differences_N, (0.99, 1.0), may_reorder=True)
    return DifferenceHistogram(tuple(counts.tolist()), count, mean, p99, largest)


def _sum_in_blocks(column_N: Tensor) -> float:
    """Return the sum of a column, added up in float64 block by block."""
    return sum(
        (block_N.sum(dtype=torch.float64).item() for block_N in column_N.split(BLOCK_TOKENS)), 0.0
    )
