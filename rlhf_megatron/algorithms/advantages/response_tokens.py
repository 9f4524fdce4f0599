"""Estimators of single tokens work on the tokens that train: ResponseTokens picks them, in
packed columns.

They are the response tokens of valid samples, one after the other. A token inside a response that
the policy did not sample (a tool's output) is no time step, and a reward on it does not count.
Whitening brings a step's advantages to mean 0 and (unbiased) variance 1; scans are discounted sums
from the back of a segment: y_n = x_n + decay y_{n + 1}.
"""
# B samples, T packed tokens, N response tokens of valid samples; S segments, R rows, C
# entries of a row

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    find_true_positions,
    repeat_per_sample_length,
)
from rlhf_megatron.lazy import Tensor, torch

WHITEN_EPSILON = 1e-8  # added to the variance; the field's

MAX_ROW_ENTRIES = 8192  # entries of a row at most
# entries of the rows that are worked on at once: their column and their indices stay in a cache
MAX_BATCH_ENTRIES = 32768
# below it counts as 0: beside an entry, float64 sees nothing of one 1e14 times as large
SMALLEST_DECAY = 1e-30
# powers of the decay stay within e^-300 .. e^300: float64 has room for entries up to e^400
MAX_EXPONENT = 300.0


@dataclass(frozen=True)
class ResponseTokens:
    positions_N: Tensor  # int64, in [0, T), rising
    lengths_B: Tensor  # int64, of each sample; 0 for one of masked status
    num_tokens: int  # T

    @staticmethod
    def from_inputs(inputs: AdvantageInputs) -> ResponseTokens:
        """Find the response tokens of the valid samples."""
        trains_T = inputs.response_mask_T
        if not bool(inputs.is_valid_B.all()):
            trains_T = trains_T & repeat_per_sample_length(inputs.is_valid_B, inputs.offsets.diff())
        places_N = find_true_positions(trains_T)
        return ResponseTokens(
            places_N, torch.searchsorted(places_N, inputs.offsets).diff(), trains_T.numel()
        )

    def gather_tokens(self, column_T: Tensor) -> Tensor:
        """Return the column's entries at these tokens, [N] float64."""
        return column_T.index_select(0, self.positions_N).double()

    def scatter_tokens(self, column_N: Tensor) -> Tensor:
        """Return the entries put back at their tokens, [T] float32, 0 elsewhere."""
        column_T = torch.zeros(self.num_tokens, device=column_N.device)
        return column_T.scatter_(0, self.positions_N, column_N.float())

    def repeat_per_token(self, column_B: Tensor) -> Tensor:
        """Return each sample's entry on each of its tokens: [B] -> [N]."""
        return repeat_per_sample_length(column_B, self.lengths_B)

    def compute_sums_to_go(self, column_T: Tensor, gamma: float = 1.0) -> Tensor:
        """Return the discounted sums y_n = x_n + gamma y_{n + 1} within each sample, [N]
        float64.
        """
        return self._sum_within_samples(self.gather_tokens(column_T), self.lengths_B, gamma)

    def compute_sums_so_far(self, column_N: Tensor) -> Tensor:
        """Return the sums y_n = x_n + y_{n - 1} within each sample, [N] float64. They are as exact
        at the front as the sums there are small.
        """
        return self._sum_within_samples(column_N.flip(0), self.lengths_B.flip(0), 1.0).flip(0)

    def _sum_within_samples(self, column_N: Tensor, lengths: Tensor, gamma: float) -> Tensor:
        """Return the sums y_n = x_n + gamma y_{n + 1} within segments of these lengths, [N]
        float64.
        """
        sums = torch.empty(column_N.numel() + 1, dtype=torch.float64, device=column_N.device)
        sums[:-1] = column_N
        compute_discounted_sums_(sums, lengths, gamma)
        return sums[:-1]


@dataclass(frozen=True)
class RunningMoments:
    """Mean and variance of numbers that come in parts.
    Equal numbers have a variance of exactly 0.
    """

    count: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0  # of the distances from the mean

    @property
    def variance(self) -> float:
        """Return the unbiased variance; 0 of fewer than two numbers."""
        return self.sum_squares / (self.count - 1) if self.count > 1 else 0.0

    def merge_entries(self, column_N: Tensor) -> RunningMoments:
        """Return the moments with the entries of `column_N`, float64, added (Chan, Golub and
        LeVeque, "Updating formulae", 1979).
        """
        if not column_N.numel():
            return self
        # From an entry on: equal numbers are exactly 0 there, and no other entry is so far that
        # digits are lost.
        count = column_N.numel()
        shifted_N = column_N - column_N[0]
        total = float(shifted_N.sum())
        sum_squares = max(float(shifted_N.dot(shifted_N)) - total * total / count, 0.0)
        step = float(column_N[0]) + total / count - self.mean
        share = count / (self.count + count)
        return RunningMoments(
            self.count + count,
            self.mean + step * share,
            self.sum_squares + sum_squares + step * step * self.count * share,
        )


def whiten_advantages_(advantages_N: Tensor) -> Tensor:
    """Whiten the float64 entries in place to mean 0 and variance 1, and return them. Fewer than two
    stay as they are.
    """
    moments = RunningMoments().merge_entries(advantages_N)
    if moments.count < 2:
        return advantages_N
    return advantages_N.sub_(moments.mean).mul_((moments.variance + WHITEN_EPSILON) ** -0.5)


def whiten_sample_advantages(
    advantages_B: Tensor, lengths_B: Tensor, is_counted_B: Tensor
) -> Tensor:
    """Return, [B] float64, the advantages that `whiten_advantages_` would give if each sample's
    advantage stood on all its response tokens, without making the tokens.

    Args:
        lengths_B: response tokens of each sample, any type; a sample counts as often as
            it has tokens.
        is_counted_B: bool; the others are in no statistic, and 0.
    """
    weights_B = lengths_B.to(torch.float64).masked_fill(~is_counted_B, 0.0)
    count = float(weights_B.sum())
    kept = (weights_B > 0).nonzero().view(-1)
    if count < 2:
        return advantages_B.to(torch.float64).masked_fill(~is_counted_B, 0.0)
    # From an entry on: equal numbers are exactly 0 there.
    shifted_B = (advantages_B.to(torch.float64) - advantages_B[kept[0]]).masked_fill(
        ~is_counted_B, 0.0
    )
    centered_B = (shifted_B - weights_B.dot(shifted_B) / count).masked_fill(~is_counted_B, 0.0)
    variance = weights_B.dot(centered_B.square()) / (count - 1)
    return centered_B * (variance + WHITEN_EPSILON) ** -0.5


@dataclass(frozen=True)
class _ScanRows:
    """Rows in the order in which they can be worked on: a row comes after the one that it takes
    its carry from.
    """

    ends_R: Tensor  # int64, one behind the last entry
    widths_R: Tensor  # int64; falls within a round
    # rows of round k (k rows lie between them and the end of their segment): up to this
    round_ends: list[int]


def compute_discounted_sums_(column: Tensor, lengths_S: Tensor, decay: float) -> None:
    """Replace the entries x of each segment by the sums y_n = x_n + decay y_{n + 1}, in place.

    Args:
        column: [N + 1] float64, the segments one after the other, on any device; the last
            entry is scratch.
        lengths_S: int64, entries of each segment; 0 is fine. They add up to N.
        decay: at least 0 and at most 1.

    NaN and infinity stay within their segment, and behind no entry.
    """
    num_entries = column.numel() - 1
    assert column.dtype == torch.float64 and 0 <= decay <= 1
    if decay < SMALLEST_DECAY or num_entries < 1:
        return
    backwards_C, falling_C, rising_C = _compute_decay_powers(decay, column.device)
    rows = _split_into_rows(lengths_S, backwards_C.numel())
    for first, last, width, is_ragged, has_carry in _iterate_row_batches(rows):
        ends_R = rows.ends_R[first:last]
        places_RC = ends_R[:, None] - backwards_C[:width]
        if is_ragged:
            places_RC.masked_fill_(
                backwards_C[:width] > rows.widths_R[first:last, None], num_entries
            )
        places = places_RC.view(-1)
        sums_RC = column.index_select(0, places).view(places_RC.shape)
        if has_carry:
            sums_RC[:, 0].add_(column.index_select(0, ends_R), alpha=decay)
        if decay != 1.0:
            sums_RC.mul_(rising_C[:width])
        sums_RC.cumsum_(1)
        if decay != 1.0:
            sums_RC.mul_(falling_C[:width])
        column.scatter_(0, places, sums_RC.view(-1))


def _choose_row_length(decay: float) -> int:
    """Return the largest number of entries of a row for which the powers of the decay fit into
    float64.
    """
    exponent = -math.log(decay)
    return (
        MAX_ROW_ENTRIES
        if exponent * MAX_ROW_ENTRIES <= 2 * MAX_EXPONENT
        else max(1, int(2 * MAX_EXPONENT / exponent))
    )


@functools.lru_cache(maxsize=1)  # a step asks many times for the same
def _compute_decay_powers(decay: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return [C] each, as long as a row may be: j + 1, decay^(j - c) and its inverse, with c the
    middle of the row.
    """
    length = _choose_row_length(decay)
    exponents_C = torch.arange(length, dtype=torch.float64, device=device).sub_(length // 2)
    falling_C = torch.exp(exponents_C * math.log(decay))
    return torch.arange(1, length + 1, device=device), falling_C, 1.0 / falling_C


def _split_into_rows(lengths_S: Tensor, length: int) -> _ScanRows:
    """Split segments into rows of at most `length` entries, from the back of each segment, in the
    order in which they can be summed.
    """
    counts_S = (lengths_S + (length - 1)) // length
    num_rounds = int(counts_S.max()) if counts_S.numel() else 0
    ends_S = lengths_S.cumsum(0)
    if num_rounds == 1:
        round_R = torch.zeros_like(lengths_S)
        ends_R = ends_S
        widths_R = lengths_S
    else:
        before_S = counts_S.cumsum(0) - counts_S
        round_R = torch.arange(
            int(counts_S.sum()), device=lengths_S.device
        ) - before_S.repeat_interleave(counts_S)
        ends_R = ends_S.repeat_interleave(counts_S) - round_R * length
        widths_R = (lengths_S.repeat_interleave(counts_S) - round_R * length).clamp_(max=length)
    order_R = (round_R * (length + 1) + (length - widths_R)).argsort(stable=True)
    round_ends = round_R.bincount(minlength=num_rounds).cumsum(0).tolist()
    return _ScanRows(ends_R[order_R], widths_R[order_R], round_ends)


def _iterate_row_batches(rows: _ScanRows) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Yield (first row, one behind the last, width of the widest row, whether others are shorter,
    whether rows take a carry) of batches of rows that can be summed at once. Rows without entries
    are left out.
    """
    first = 0
    for this_round, round_end in enumerate(rows.round_ends):
        while first < round_end:
            width = int(rows.widths_R[first])
            if width == 0:
                first = round_end
                break
            last = min(round_end, first + max(1, MAX_BATCH_ENTRIES // width))
            yield first, last, width, int(rows.widths_R[last - 1]) < width, this_round > 0
            first = last
