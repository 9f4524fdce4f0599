"""Sampling from softmax(logits / temperature) with random numbers that are a pure function of
(seed, token position).

One uniform number a token and the inverse of the cumulative distribution: what a sample draws does
not depend on its neighbours in the batch. What top-k, top-p and min-p leave out, in which order,
and of what distribution the returned log-probs are, is as in SGLang's `pytorch` sampling backend
(sglang/srt/layers/sampler.py, 0.5.21): log(softmax(logits / temperature)) of all tokens, -inf added
to stop tokens before min_new_tokens.

Legend: N rows, V vocabulary, K blocks, W block width, S stop tokens, T most likely tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_BLOCK_WIDTH = 256
_TOP_K_OFF = 1 << 62  # top_k of a row without
_NUM_TOP_TOKENS = 1024  # most likely tokens among which cuts are looked for first


def _mix_bits(values_N: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of each int64 (arithmetic modulo 2^64, logical shifts)."""
    values_N = (values_N ^ (values_N >> 30 & (1 << 34) - 1)) * _MIX1
    values_N = (values_N ^ (values_N >> 27 & (1 << 37) - 1)) * _MIX2
    return values_N ^ (values_N >> 31 & (1 << 33) - 1)


def draw_uniforms(seeds_N: Tensor, positions_N: Tensor) -> Tensor:
    """Return random numbers [N] float64 in [0, 1), a pure function of seed and position (both
    int64): SplitMix64 (Steele et al. 2014), one stream for each seed.
    """
    bits_N = _mix_bits(_mix_bits(seeds_N * _GOLDEN + _MIX1) + (positions_N + 1) * _GOLDEN)
    return (bits_N >> 11 & (1 << 53) - 1).to(torch.float64) * 2.0**-53


def _invert_cumulative(cumulative_NM: Tensor, target_N1: Tensor) -> Tensor:
    """Return [N, 1]: the first index at which the cumulative sum exceeds the target, never an index
    of zero weight.
    """
    last = cumulative_NM[:, -1:]
    index = (cumulative_NM <= target_N1).sum(-1, keepdim=True)
    return torch.minimum(index, (cumulative_NM < last).sum(-1, keepdim=True))


def draw_tokens(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Draw one token for each row: return [N] int64, the inverse of the cumulative distribution at
    `uniforms_N`.

    Sums run in float64, over blocks of the vocabulary first and then inside one block, so that rare
    tokens of a large vocabulary keep their probability. Rows need not sum to one exactly.
    """
    num_rows, vocab = probs_NV.shape
    uniforms_N1 = uniforms_N.unsqueeze(-1)
    if vocab <= _BLOCK_WIDTH:
        cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64)
        return _invert_cumulative(cumulative_NV, uniforms_N1 * cumulative_NV[:, -1:]).squeeze(-1)
    num_blocks = -(-vocab // _BLOCK_WIDTH)
    probs_NKW = F.pad(probs_NV, (0, num_blocks * _BLOCK_WIDTH - vocab)).view(
        num_rows, num_blocks, _BLOCK_WIDTH
    )
    before_NK = probs_NKW.sum(-1, dtype=torch.float64).cumsum(-1)
    target_N1 = uniforms_N1 * before_NK[:, -1:]
    block_N1 = _invert_cumulative(before_NK, target_N1)
    before_NK = F.pad(before_NK, (1, 0))
    target_N1 = target_N1 - before_NK.gather(1, block_N1)
    rows_N = torch.arange(num_rows, device=probs_NV.device)
    inside_NW = probs_NKW[rows_N, block_N1.squeeze(-1)].cumsum(-1, dtype=torch.float64)
    return (block_N1 * _BLOCK_WIDTH + _invert_cumulative(inside_NW, target_N1)).squeeze(-1)


@dataclass(frozen=True)
class ProbabilityCuts:
    """Top-k, top-p and min-p of the rows: they decide which tokens a row leaves out of the draw. A
    row without cuts keeps its probabilities to the bit.
    """

    top_k_N: Tensor  # int64; _OFF: off
    top_p_N: Tensor  # float64; inf: off, since a sum that ends a little above 1 must not cut
    min_p_N: Tensor  # float32; 0: off

    @property
    def is_off_N(self) -> Tensor:
        """Return for each row whether it leaves out no token."""
        return self.top_p_N.isinf() & (self.top_k_N == _TOP_K_OFF) & (self.min_p_N == 0)

    @staticmethod
    def has_no_cuts(params: SamplingParams) -> bool:
        """Return whether these parameters leave out no token."""
        return params.top_k == -1 and params.top_p == 1 and params.min_p == 0

    @staticmethod
    def from_params(params: Sequence[SamplingParams], device: torch.device) -> ProbabilityCuts:
        """Return the cuts of these parameters, one row each, as tensors on `device`."""
        top_k = [_TOP_K_OFF if p.top_k == -1 else min(p.top_k, _TOP_K_OFF) for p in params]
        top_p = [math.inf if p.top_p == 1 else p.top_p for p in params]
        return ProbabilityCuts(
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        )

    def __getitem__(self, rows: slice | Tensor) -> ProbabilityCuts:
        """Return the cuts of some of the rows."""
        return ProbabilityCuts(self.top_k_N[rows], self.top_p_N[rows], self.min_p_N[rows])

    def zero_cut_probs(self, probs_NV: Tensor) -> Tensor:
        """Return the probabilities with zeros where a token is left out; not rescaled.

        In order of probability (equal ones: the lower id first) a token stays when fewer than top_k
        tokens precede it, their sum over the whole vocabulary is at most top_p, and it has at least
        min_p times the largest probability. The most likely token always stays. SGLang sums in
        float32: sets may differ where a sum meets top_p to 1e-6, and a row without top-p loses its
        least likely tokens there when its sum is rounded to more than 1.
        """
        vocab = probs_NV.shape[-1]
        keep_NV, is_short_N = self._find_kept_tokens(probs_NV, min(_NUM_TOP_TOKENS, vocab))
        rows_M = is_short_N.nonzero().squeeze(-1)
        if len(rows_M) and vocab > _NUM_TOP_TOKENS:  # flat distributions
            keep_NV[rows_M] = self[rows_M]._find_kept_tokens(probs_NV[rows_M], vocab)[0]
        return probs_NV.masked_fill(~(keep_NV | self.is_off_N.unsqueeze(-1)), 0.0)

    def _find_kept_tokens(self, probs_NV: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
        """Return which tokens stay [N, V], found among the `num_top` most likely, and for which
        rows these are too few [N].

        All three conditions hold up to a rank and no further, and the probability at that rank is
        the threshold: topk of the largest values is enough, and no large vocabulary has to be
        sorted.
        """
        top_NT = probs_NV.topk(num_top).values
        before_NT = top_NT.cumsum(-1, dtype=torch.float64) - top_NT
        keep_NT = torch.arange(num_top, device=probs_NV.device) < self.top_k_N.unsqueeze(-1)
        keep_NT &= before_NT <= self.top_p_N.unsqueeze(-1)
        keep_NT &= top_NT >= top_NT[:, :1] * self.min_p_N.unsqueeze(-1)
        num_kept_N1 = keep_NT.sum(-1, keepdim=True)
        lowest_N1 = top_NT.gather(-1, (num_kept_N1 - 1).clamp(min=0))
        # for tokens as likely as the last kept
        room_N1 = num_kept_N1 - (top_NT > lowest_N1).sum(-1, keepdim=True)
        is_lowest_NV = probs_NV == lowest_N1
        keep_NV = (probs_NV > lowest_N1) | (
            is_lowest_NV & (is_lowest_NV.cumsum(-1, dtype=torch.int32) <= room_N1)
        )
        is_short_N = (
            (num_kept_N1.squeeze(-1) == num_top) & (self.top_k_N > num_top) & ~self.is_off_N
        )
        return keep_NV, is_short_N


def mask_stop_tokens(logits_NV: Tensor, stop_ids_NS: Tensor, is_early_N: Tensor) -> Tensor:
    """Return the logits with -inf at the stop tokens (-1: none) of the rows for which `is_early_N`
    is true, which may not end yet.
    """
    num_rows, vocab = logits_NV.shape
    index_NS = torch.where((stop_ids_NS < 0) | ~is_early_N.unsqueeze(-1), vocab, stop_ids_NS)
    is_out_NV = torch.zeros(num_rows, vocab + 1, dtype=torch.bool, device=logits_NV.device)
    return logits_NV.masked_fill(is_out_NV.scatter_(-1, index_NS, True)[:, :vocab], float("-inf"))


def sample_tokens(
    logits_NV: Tensor,
    temperatures_N: Tensor | None,
    greedy_N: Tensor | None,
    seeds_N: Tensor,
    positions_N: Tensor,
    cuts: ProbabilityCuts | None = None,
) -> tuple[Tensor, Tensor]:
    """Return one token for each row [N] int64 and its log-prob [N] float32 under softmax(logits /
    temperature) as a whole, whatever `cuts` leave out of the draw.

    `temperatures_N`: float32 above 0; None: all are 1. `greedy_N`: bool, rows that take the most
    likely token; None: no row does. Greedy rows have temperature 1 in `temperatures_N`. The random
    number of a row is a function of its seed and position.
    """
    scaled_NV = logits_NV.float()
    if temperatures_N is not None:
        scaled_NV = scaled_NV / temperatures_N.unsqueeze(-1)
    log_probs_NV = scaled_NV.log_softmax(-1)
    probs_NV = log_probs_NV.exp()
    if cuts is not None:
        probs_NV = cuts.zero_cut_probs(probs_NV)
    tokens_N = draw_tokens(probs_NV, draw_uniforms(seeds_N, positions_N))
    if greedy_N is not None:
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), tokens_N)
    return tokens_N, log_probs_NV.gather(1, tokens_N.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class RowSampling:
    """The sampling parameters of the running rows as tensors. A field is None where it would change
    nothing for any row.
    """

    temperatures_N: Tensor | None  # float32; 1 where greedy
    greedy_N: Tensor | None  # bool
    min_new_tokens_N: Tensor | None
    cuts: ProbabilityCuts | None

    @staticmethod
    def from_params(params: Sequence[SamplingParams], device: torch.device) -> RowSampling:
        """Return the sampling of these parameters, one row each, as tensors on `device`."""
        kinds = {id(p): p for p in params}.values()  # the samples of a request share theirs
        greedy = scaled = min_new_tokens = cuts = None
        if any(p.temperature == 0 for p in kinds):
            greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        if any(p.temperature not in (0, 1) for p in kinds):
            scaled = torch.tensor(
                [p.temperature or 1.0 for p in params], dtype=torch.float32, device=device
            )
        if any(p.min_new_tokens for p in kinds):
            min_new_tokens = torch.tensor([p.min_new_tokens for p in params], device=device)
        if any(not ProbabilityCuts.has_no_cuts(p) for p in kinds):
            cuts = ProbabilityCuts.from_params(params, device)
        return RowSampling(scaled, greedy, min_new_tokens, cuts)

    def sample_rows(
        self,
        rows: slice,
        logits_NV: Tensor,
        stop_ids_NS: Tensor,
        seeds_N: Tensor,
        positions_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draw the next token for the rows of the slice `rows`, whose other tensors are passed in.
        `positions_N` is the number of tokens that each row has drawn. Stop tokens are left out
        before min_new_tokens. Return the tokens and their log-probs, as `sample_tokens` does.
        """
        if self.min_new_tokens_N is not None:
            logits_NV = mask_stop_tokens(
                logits_NV, stop_ids_NS, positions_N < self.min_new_tokens_N[rows]
            )
        return sample_tokens(
            logits_NV,
            None if self.temperatures_N is None else self.temperatures_N[rows],
            None if self.greedy_N is None else self.greedy_N[rows],
            seeds_N,
            positions_N,
            None if self.cuts is None else self.cuts[rows],
        )


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError, with the value and the rule, for sampling parameters that the engine
    refuses.
    """
    if not 0 <= params.temperature < math.inf:
        raise ValueError(
            f"temperature ({params.temperature}) must be finite and 0 (greedy) or above."
        )
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p ({params.top_p}) must be above 0 and at most 1 (off).")
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k ({params.top_k}) must be at least 1, or -1 (off).")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p ({params.min_p}) must be from 0 (off) to 1.")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        raise ValueError(
            f"min_new_tokens ({params.min_new_tokens}) must be from 0 to"
            f" max_new_tokens ({params.max_new_tokens})."
        )
    stops = set(params.stop_token_ids)
    if unknown := sorted(stop for stop in stops if not 0 <= stop < vocab_size):
        raise ValueError(
            f"stop_token_ids ({unknown}) must be from 0 to {vocab_size - 1}: the"
            " model's vocabulary."
        )
    if params.min_new_tokens and len(stops) == vocab_size:
        raise ValueError("min_new_tokens leaves nothing to draw: every token is in stop_token_ids.")
