"""Discounted sums from the back, within each segment of a packed column: y_n = x_n + decay y_{n + 1}.

Two levels. A segment is cut into rows from its end on, and a row is read backwards, so that its sums run forwards. With
j counted from a row's end, and `carry` what the row behind it found at its front (0 behind a segment's last entry)

    y_j = decay^j (sum over i <= j of decay^-i x_i)        x_0 = its own + decay carry

which is one running sum between two multiplications with powers of the decay. Every step rounds relative to what the
plain recurrence has there, so the result is as exact as its own; rows are short enough that no power leaves the range
of float64. Rows of many segments go side by side as one matrix that fits into a cache. What a segment gets does not
depend on its neighbours, not in one bit.
"""

# N entries, S segments, R rows, C entries of a row

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.lazy import Tensor, torch

ROW = 8192  # entries of a row at most
GROUP = 32768  # entries of the rows that are worked on at once: their column and their indices stay in a cache
SMALLEST_DECAY = 1e-30  # below it counts as 0: beside an entry, float64 sees nothing of one 1e14 times as large
MAX_EXPONENT = 300.0  # powers of the decay stay within e^-300 .. e^300: float64 has room for entries up to e^400


@dataclass(frozen=True)
class _Rows:
    """Rows in the order in which they can be worked on: a row comes after the one that it takes its carry from."""

    ends_R: Tensor  # int64, one behind the last entry
    widths_R: Tensor  # int64; falls within a round
    round_ends: list[int]  # rows of round k (k rows lie between them and the end of their segment): up to this


def discounted_sums_(column: Tensor, lengths_S: Tensor, decay: float) -> None:
    """Replace x by y in place.

    Args:
        column: [N + 1] float64, the segments one after the other, on any device; the last entry is scratch.
        lengths_S: int64, entries of each segment; 0 is fine. They add up to N.
        decay: at least 0 and at most 1.

    NaN and infinity stay within their segment, and behind no entry.
    """
    num_entries = column.numel() - 1
    assert column.dtype == torch.float64 and 0 <= decay <= 1
    if decay < SMALLEST_DECAY or num_entries < 1:
        return
    backwards_C, falling_C, rising_C = _powers(decay, column.device)
    rows = _rows(lengths_S, backwards_C.numel())
    for first, last, width, is_ragged, has_carry in _groups(rows):
        ends_R = rows.ends_R[first:last]
        places_RC = ends_R[:, None] - backwards_C[:width]
        if is_ragged:
            places_RC.masked_fill_(backwards_C[:width] > rows.widths_R[first:last, None], num_entries)
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


def _row_length(decay: float) -> int:
    exponent = -math.log(decay)
    return ROW if exponent * ROW <= 2 * MAX_EXPONENT else max(1, int(2 * MAX_EXPONENT / exponent))


@functools.lru_cache(maxsize=1)  # a step asks many times for the same
def _powers(decay: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[C] each, as long as a row may be: j + 1, decay^(j - c) and its inverse, with c in the middle of the row."""
    length = _row_length(decay)
    exponents_C = torch.arange(length, dtype=torch.float64, device=device).sub_(length // 2)
    falling_C = torch.exp(exponents_C * math.log(decay))
    return torch.arange(1, length + 1, device=device), falling_C, 1.0 / falling_C


def _rows(lengths_S: Tensor, length: int) -> _Rows:
    counts_S = (lengths_S + (length - 1)) // length
    num_rounds = int(counts_S.max()) if counts_S.numel() else 0
    ends_S = lengths_S.cumsum(0)
    if num_rounds == 1:
        round_R, ends_R, widths_R = torch.zeros_like(lengths_S), ends_S, lengths_S
    else:
        before_S = counts_S.cumsum(0) - counts_S
        round_R = torch.arange(int(counts_S.sum()), device=lengths_S.device) - before_S.repeat_interleave(counts_S)
        ends_R = ends_S.repeat_interleave(counts_S) - round_R * length
        widths_R = (lengths_S.repeat_interleave(counts_S) - round_R * length).clamp_(max=length)
    order_R = (round_R * (length + 1) + (length - widths_R)).argsort(stable=True)
    round_ends = round_R.bincount(minlength=num_rounds).cumsum(0).tolist()
    return _Rows(ends_R[order_R], widths_R[order_R], round_ends)


def _groups(rows: _Rows) -> Iterator[tuple[int, int, int, bool, bool]]:
    """(first row, one behind the last, width of the widest, whether others are shorter, whether there is a carry)."""
    first = 0
    for this_round, round_end in enumerate(rows.round_ends):
        while first < round_end:
            width = int(rows.widths_R[first])
            if width == 0:
                first = round_end
                break
            last = min(round_end, first + max(1, GROUP // width))
            yield first, last, width, int(rows.widths_R[last - 1]) < width, this_round > 0
            first = last
