"""How far the engine's log-probs are from the trainer's on the tokens that were sampled."""

# T packed tokens, N response tokens, K worst tokens

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses.kl import MAX_LOG_RATIO


def mismatch_statistics(
    rollout_log_probs_T: Tensor, old_log_probs_T: Tensor, response_mask_T: Tensor
) -> dict[str, float]:
    """Metrics under the names of `metric_names`, over the tokens of `response_mask_T`; all 0 where there are none.

    `training/rollout_kl` is the mean over tokens of r - 1 - log r, r = exp(old_log_probs - rollout_log_probs) with the
    logarithm clamped to +-20: Schulman's k3 (http://joschu.net/blog/kl-approx.html), an estimate of KL(engine ||
    trainer), as the engine drew the tokens. Percentiles are nearest-rank. A difference that is not a number counts as
    infinite, so that no threshold lets it pass.
    """
    rollout_N = rollout_log_probs_T[response_mask_T].to(torch.float64)
    trainer_N = old_log_probs_T[response_mask_T].to(torch.float64)
    log_ratio_N = log_ratio(rollout_N, trainer_N)
    diff_N = log_ratio_N.abs()
    probs_diff_N = (trainer_N.exp() - rollout_N.exp()).abs()
    clamped_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    has_tokens = diff_N.numel() > 0
    p50, p99, p100 = percentiles(diff_N, (0.5, 0.99, 1.0))
    return {
        "training/rollout_log_probs_diff_max": p100,
        "training/rollout_log_probs_diff_p50": p50,
        "training/rollout_log_probs_diff_p99": p99,
        "training/rollout_log_probs_diff_mean": diff_N.mean().item() if has_tokens else 0.0,
        "training/rollout_kl": (clamped_N.expm1() - clamped_N).mean().item() if has_tokens else 0.0,
        "training/rollout_probs_diff_valid": float(has_tokens),
        "training/rollout_probs_diff_max": probs_diff_N.max().item() if has_tokens else 0.0,
        "training/rollout_probs_diff_mean": probs_diff_N.mean().item() if has_tokens else 0.0,
        "training/rollout_probs_diff_std": probs_diff_N.std().item() if probs_diff_N.numel() > 1 else 0.0,
    }


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
    divided = np.partition(column_N.cpu().numpy(), sorted(set(ranks)))
    return [float(divided[rank]) for rank in ranks]
