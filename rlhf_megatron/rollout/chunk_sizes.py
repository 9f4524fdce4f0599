"""How much work an engine is sent at once. Without torch, so that the simulator counts by
the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_CHUNK_SAMPLES = 512  # of one HTTP request, at most (a group is never cut)
# of a generate call per engine, so that its batch stays full while an answer travels
CHUNKS_IN_FLIGHT = 2
# A session fills an engine with so many times what it decodes at once. Of groups in flight only
# some samples still run:
# with 8 samples of geometric lengths 1 / (1 + 1/2 + ... + 1/8) = 0.37.
OVERFILL_FACTOR = 3


def divide_groups_into_chunks(
    group_sizes: Sequence[int], num_engines: int, is_isolated: bool = False
) -> list[range]:
    """Divide a list of groups with these numbers of samples into ranges of neighbouring groups, and
    return the ranges of group indexes, one for each request to an engine: one for a single engine,
    about two for each of several engines, and none above `MAX_CHUNK_SAMPLES` samples unless one
    group alone is larger.

    `num_engines`: as configured, also when fewer engines live. `is_isolated`: an engine decodes
    each chunk by itself; then one engine gets about two chunks as well, so that a failure does not
    lose everything.
    """
    pieces = 1 if num_engines == 1 and not is_isolated else CHUNKS_IN_FLIGHT * num_engines
    target = min(MAX_CHUNK_SAMPLES, -(-sum(group_sizes) // pieces))
    borders = [0]
    size = 0
    for index, count in enumerate(group_sizes):
        if size and size + count > target:
            borders.append(index)
            size = 0
        size += count
    return (
        [range(start, end) for start, end in pairwise([*borders, len(group_sizes)])]
        if group_sizes
        else []
    )
