"""Which of several weighted sources a position of the stream takes its prompt from. No chance is involved.

After any number n of prompts a source of share w has given w n of them, less than one prompt away (the windows of
Baruah et al. 1996, "proportionate progress", served earliest deadline first).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import gcd

MAX_PERIOD = 65_536


@dataclass(frozen=True)
class Mixture:
    """A pattern of sources that repeats. A period has `counts[s]` prompts of source s."""

    counts: tuple[int, ...]
    sources: tuple[int, ...]  # of each position of the period
    ranks: tuple[int, ...]  # how many earlier positions of the period have the same source

    def draw(self, position: int) -> tuple[int, int]:
        """(source, number of earlier draws from it) of a position of the stream, which counts from 0."""
        period, index = divmod(position, len(self.sources))
        source = self.sources[index]
        return source, period * self.counts[source] + self.ranks[index]


def make_mixture(weights: Sequence[float]) -> Mixture:
    """Shares are those of `weights` (positive); exact where they have a common denominator of at most 65536."""
    counts = period_counts(weights)
    sources = _interleave(counts)
    ranks, seen = [], [0] * len(counts)
    for source in sources:
        ranks.append(seen[source])
        seen[source] += 1
    return Mixture(tuple(counts), tuple(sources), tuple(ranks))


def period_counts(weights: Sequence[float]) -> list[int]:
    """Prompts of each source in the shortest period of exact shares, or in one of 65536 by largest remainder."""
    fractions = [Fraction(str(weight)) for weight in weights]  # 0.1 is a tenth
    assert fractions and min(fractions) > 0, "weights must be positive"
    scale = reduce(lambda a, b: a * b // gcd(a, b), (f.denominator for f in fractions))
    whole = [int(f * scale) for f in fractions]
    divisor = reduce(gcd, whole)
    counts = [count // divisor for count in whole]
    if sum(counts) <= MAX_PERIOD:
        return counts
    total = sum(counts)
    shares = [Fraction(count * MAX_PERIOD, total) for count in counts]
    rounded = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: rounded[s] - shares[s])
    for s in by_remainder[: max(0, MAX_PERIOD - sum(rounded))]:
        rounded[s] += 1
    return rounded


def _interleave(counts: Sequence[int]) -> list[int]:
    """The j-th prompt (from 0) of source s belongs into the window [floor(j n / c), ceil((j + 1) n / c))."""
    length = sum(counts)
    later = [(0, s, 0) for s in range(len(counts))]  # (first position of the window, source, j)
    ready: list[tuple[int, int, int]] = []  # (end of the window, source, j)
    order = []
    for position in range(length):
        while later and later[0][0] <= position:
            _, s, j = heapq.heappop(later)
            heapq.heappush(ready, (-(-(j + 1) * length // counts[s]), s, j))
        _, s, j = heapq.heappop(ready)
        order.append(s)
        if j + 1 < counts[s]:
            heapq.heappush(later, ((j + 1) * length // counts[s], s, j + 1))
    return order
