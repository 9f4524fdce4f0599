"""Seeds as pure functions of what they are for, so that nothing random depends on the
history of a process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """Return a seed in [0, 2^31) made from integers such as (run seed, step, group, sample). The
    same integers give the same seed.
    """
    return _mix_parts(parts)


def _mix_parts(parts: Sequence[int]) -> int:
    """Return SplitMix64 over the parts, cut to [0, 2^31)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 33


def seed_process(*parts: int) -> None:
    """Seed the global generators of this process, Python's and numpy's, by `parts`."""
    random.seed(_mix_parts((*parts, 0)))
    np.random.seed(_mix_parts((*parts, 1)))
