"""How far the engine's log-probs are from the trainer's on the tokens that were sampled.
A histogram counts how many tokens differ by how much, over logarithmic bins. All functions are pure.
"""
# T packed tokens, N response tokens, K worst tokens

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import places
from rlhf_megatron.algorithms.losses.kl import MAX_LOG_RATIO

BLOCK = 65536  # tokens


def mismatch_statistics(
    rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor
) -> dict[str, float]:
    """Metrics under the names of `metric_names`, over the tokens of `response_mask_T`; all 0 where there are none.

    `training/rollout_kl` is the mean over tokens of r - 1 - log r, r = exp(old_log_probs - rollout_log_probs) with the
    logarithm clamped to +-20: Schulman's k3 (http://joschu.net/blog/kl-approx.html), an estimate of KL(engine ||
    trainer), as the engine drew the tokens. Percentiles are nearest-rank. A difference that is not a number counts as
    infinite, so that no threshold lets it pass.
    """
    found = _differences(rollout_log_probs_T, old_log_probs_T, response_mask_T)
    has_tokens = found.diff_N.numel() > 0
    p50, p99, p100 = percentiles(found.diff_N, (0.5, 0.99, 1.0))
    return {
        "training/rollout_log_probs_diff_max": p100,
        "training/rollout_log_probs_diff_p50": p50,
        "training/rollout_log_probs_diff_p99": p99,
        "training/rollout_log_probs_diff_mean": found.diff_N.mean().item() if has_tokens else 0.0,
        "training/rollout_kl": found.kl_N.mean().item() if has_tokens else 0.0,
        "training/rollout_probs_diff_valid": float(has_tokens),
        "training/rollout_probs_diff_max": found.probs_diff_N.max().item() if has_tokens else 0.0,
        "training/rollout_probs_diff_mean": found.probs_diff_N.mean().item() if has_tokens else 0.0,
        "training/rollout_probs_diff_std": found.probs_diff_N.std().item() if found.probs_diff_N.numel() > 1 else 0.0,
    }


@dataclass(frozen=True)
class _Differences:
    """[N] float64 each."""

    diff_N: Tensor  # of log-probs, absolute; infinite where that is not a number
    kl_N: Tensor  # k3
    probs_diff_N: Tensor  # absolute


def _differences(rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor) -> _Differences:
    """Block by block: memory that stays in a cache is several times faster. Each number is by itself."""
    found = torch.empty(3, int(response_mask_T.count_nonzero()), dtype=torch.float64)
    first = 0
    for start in range(0, response_mask_T.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        places_N = places(response_mask_T[block])
        last = first + places_N.numel()
        diff_N, kl_N, probs_diff_N = found[:, first:last]
        rollout_N = rollout_log_probs_T[block].index_select(0, places_N).to(torch.float64)
        trainer_N = old_log_probs_T[block].index_select(0, places_N).to(torch.float64)
        log_ratio_N = log_ratio(rollout_N, trainer_N)
        torch.abs(log_ratio_N, out=diff_N)
        log_ratio_N.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        torch.expm1(log_ratio_N, out=kl_N)
        kl_N.sub_(log_ratio_N)
        torch.sub(trainer_N.exp_(), rollout_N.exp_(), out=probs_diff_N)
        probs_diff_N.abs_()
        first = last
    return _Differences(*found)


def worst_tokens(rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor, count: int) -> Tensor:
    """[K] int64 positions in [0, T) of the at most `count` response tokens that differ most, the worst first."""
    diff_T = log_ratio(rollout_log_probs_T.to(torch.float64), old_log_probs_T.to(torch.float64)).abs()
    diff_T = diff_T.masked_fill(~response_mask_T, -1.0)
    return diff_T.topk(min(count, int(response_mask_T.sum()))).indices


def log_ratio(rollout: Tensor, trainer: Tensor) -> Tensor:
    """trainer - rollout; infinite where that is not a number."""
    return (trainer - rollout).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def percentile(sorted_N: Tensor, share: float) -> float:
    """Nearest rank: the smallest entry that at least `share` of all entries do not exceed. 0 without entries."""
    count = sorted_N.numel()
    return sorted_N[max(math.ceil(share * count), 1) - 1].item() if count else 0.0


def percentiles(column_N: Tensor, shares: Sequence[float]) -> list[float]:
    """Nearest rank, as `percentile`, of a column in any order: it is divided at these ranks, not sorted."""
    count = column_N.numel()
    if not count:
        return [0.0 for _ in shares]
    ranks = [max(math.ceil(share * count), 1) - 1 for share in shares]
    rest, num_below, found = column_N.cpu().numpy(), 0, {}
    for rank in sorted(set(ranks)):  # one at a time, each in what is above the one before: numpy's fast way
        place = rank - num_below
        if place == len(rest) - 1:
            found[rank] = float(rest.max())
            continue
        rest = np.partition(rest, place)
        found[rank] = float(rest[place])
        rest, num_below = rest[place:], rank
    return [found[rank] for rank in ranks]


FIRST_DECADE, LAST_DECADE, BINS_A_DECADE = -8, 1, 4
# Nats, to 4 digits. Below the first decade float32 has no digits left; the last bin is open to the right.
EDGES: tuple[float, ...] = (
    0.0,
    *(
        float(f"{10 ** (FIRST_DECADE + i / BINS_A_DECADE):.4g}")
        for i in range((LAST_DECADE - FIRST_DECADE) * BINS_A_DECADE + 1)
    ),
)


@dataclass(frozen=True)
class Spread:
    """Of |trainer log-prob - engine log-prob| over some tokens, nats; infinite where one is not a number."""

    counts: tuple[int, ...]  # one a bin: [EDGES[i], EDGES[i + 1]), the last one [EDGES[-2], infinity]
    num_tokens: int
    mean: float
    p99: float  # nearest rank
    max: float


def differences(rollout_log_probs_T: Tensor, old_log_probs_T: Tensor) -> Tensor:
    """[T] float64, |trainer - engine| in nats; infinite where one of them is not a number."""
    return log_ratio(rollout_log_probs_T.to(torch.float64), old_log_probs_T.to(torch.float64)).abs()


def spread(differences_N: Tensor) -> Spread:
    """Of at least one difference."""
    count = differences_N.numel()
    assert count, "a spread is of at least one token"
    inner = torch.tensor(EDGES[1:-1], dtype=torch.float64)
    bins_N = torch.bucketize(differences_N, inner, right=True)
    sorted_N = differences_N.sort().values
    return Spread(
        counts=tuple(torch.bincount(bins_N, minlength=len(EDGES) - 1).tolist()),
        num_tokens=count,
        mean=differences_N.mean().item(),
        p99=percentile(sorted_N, 0.99),
        max=sorted_N[-1].item(),
    )
