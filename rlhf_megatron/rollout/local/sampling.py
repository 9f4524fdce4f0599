"""Sampling from softmax(logits / temperature) with random numbers that are a pure function of (seed, token position).

One uniform number a token and the inverse of the cumulative distribution: what a sample draws depends on its own seed,
never on its neighbours in the batch.

Legend: N rows, V vocabulary, K blocks, W block width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_BLOCK_WIDTH = 256


def _mix(values_N: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (arithmetic modulo 2^64, logical shifts)."""
    values_N = (values_N ^ (values_N >> 30 & (1 << 34) - 1)) * _MIX1
    values_N = (values_N ^ (values_N >> 27 & (1 << 37) - 1)) * _MIX2
    return values_N ^ (values_N >> 31 & (1 << 33) - 1)


def uniforms(seeds_N: Tensor, positions_N: Tensor) -> Tensor:
    """[N] float64 in [0, 1): SplitMix64 (Steele et al. 2014), a stream a seed, read at `positions_N` (both int64)."""
    bits_N = _mix(_mix(seeds_N * _GOLDEN + _MIX1) + (positions_N + 1) * _GOLDEN)
    return (bits_N >> 11 & (1 << 53) - 1).to(torch.float64) * 2.0**-53


def _invert(cumulative_NM: Tensor, target_N1: Tensor) -> Tensor:
    """[N, 1] first index whose cumulative sum is above the target; never one of zero weight."""
    last = cumulative_NM[:, -1:]
    index = (cumulative_NM <= target_N1).sum(-1, keepdim=True)
    return torch.minimum(index, (cumulative_NM < last).sum(-1, keepdim=True))


def draw(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """[N] int64: the inverse of the cumulative distribution at `uniforms_N`.

    Sums run in float64, over blocks of the vocabulary first and then inside of one, so that rare tokens of a large
    vocabulary keep their probability. Rows need not sum to one exactly.
    """
    num_rows, vocab = probs_NV.shape
    uniforms_N1 = uniforms_N.unsqueeze(-1)
    if vocab <= _BLOCK_WIDTH:
        cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64)
        return _invert(cumulative_NV, uniforms_N1 * cumulative_NV[:, -1:]).squeeze(-1)
    num_blocks = -(-vocab // _BLOCK_WIDTH)
    probs_NKW = F.pad(probs_NV, (0, num_blocks * _BLOCK_WIDTH - vocab)).view(num_rows, num_blocks, _BLOCK_WIDTH)
    before_NK = probs_NKW.sum(-1, dtype=torch.float64).cumsum(-1)
    target_N1 = uniforms_N1 * before_NK[:, -1:]
    block_N1 = _invert(before_NK, target_N1)
    before_NK = F.pad(before_NK, (1, 0))
    target_N1 = target_N1 - before_NK.gather(1, block_N1)
    rows_N = torch.arange(num_rows, device=probs_NV.device)
    inside_NW = probs_NKW[rows_N, block_N1.squeeze(-1)].cumsum(-1, dtype=torch.float64)
    return (block_N1 * _BLOCK_WIDTH + _invert(inside_NW, target_N1)).squeeze(-1)


def sample(
    logits_NV: Tensor, temperatures_N: Tensor | None, greedy_N: Tensor | None, seeds_N: Tensor, positions_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [N] int64 and their log-probs [N] float32 under softmax(logits / temperature).

    `temperatures_N`: float32 above 0; None: all are 1. `greedy_N`: bool, rows that take the most likely token; None:
    no row does. Greedy rows have temperature 1 in `temperatures_N`.
    """
    scaled_NV = logits_NV.float()
    if temperatures_N is not None:
        scaled_NV = scaled_NV / temperatures_N.unsqueeze(-1)
    log_probs_NV = scaled_NV.log_softmax(-1)
    tokens_N = draw(log_probs_NV.exp(), uniforms(seeds_N, positions_N))
    if greedy_N is not None:
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), tokens_N)
    return tokens_N, log_probs_NV.gather(1, tokens_N.unsqueeze(-1)).squeeze(-1)
