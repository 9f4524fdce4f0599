"""How many tokens differ how much between engine and trainer: counts over logarithmic bins. Pure."""

# T packed tokens, N response tokens

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.mismatch import log_ratio, percentile

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
