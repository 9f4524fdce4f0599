"""A small set of cells in which every two values that can go together do so at least once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Cell = dict[str, Any]  # axis -> value
Pair = tuple[str, Any, str, Any]  # axis, value, other axis, value; axes in the order of the cell


def pairs_of(cell: Mapping[str, Any], apart: Sequence[frozenset[str]] = ()) -> Iterator[Pair]:
    """The pairs that `cell` covers. `apart`: pairs of axes that are not looked at."""
    for (axis, value), (other, its) in combinations(cell.items(), 2):
        if frozenset((axis, other)) not in apart:
            yield axis, value, other, its


def pairwise(
    axes: Mapping[str, Sequence[Any]],
    is_allowed: Callable[[Cell], bool],
    cost: Callable[[Cell], float],
    apart: Sequence[frozenset[str]] = (),
) -> list[Cell]:
    """Cells that cover every pair of values that some allowed cell holds.

    Greedy: the cell that covers the most uncovered pairs comes next, of equals the cheapest, then
    the first in the order of `axes`. All allowed cells are tried, so `axes` must be few and short.
    The same input, the same cover.
    """
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return greedy(sorted((cell for cell in every if is_allowed(cell)), key=cost), apart)


def greedy(cells: Sequence[Cell], apart: Sequence[frozenset[str]] = ()) -> list[Cell]:
    """Of `cells` those that cover every pair which one of them holds; of equals the first."""
    bits: dict[Pair, int] = {}
    masks = []
    for cell in cells:
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs_of(cell, apart)))
    left = (1 << len(bits)) - 1
    cover = []
    while left:
        best = max(range(len(cells)), key=lambda i: ((masks[i] & left).bit_count(), -i))
        cover.append(cells[best])
        left &= ~masks[best]
    return cover
