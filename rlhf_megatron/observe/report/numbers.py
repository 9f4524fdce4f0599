"""Intervals, and long curves made short without losing their peaks. Pure, without numpy: the program starts at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rlhf_megatron.evaluation.intervals import Z95, t95


def sample_interval(mean: float, std: float, count: float) -> tuple[float, float]:
    """95 % interval of a mean over `count` independent samples with standard deviation `std` (normal)."""
    half = Z95 * std / math.sqrt(count)
    return mean - half, mean + half


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean over few runs (Student's t). None for a single one."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def significant(value: float | None, digits: int = 6) -> float | None:
    """Rounded to so many digits, to keep the page small; None for what JSON has no number for."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def thin(values: Sequence[float | None], max_points: int) -> list[int]:
    """Which points of a curve to keep, in order: of each of max_points / 2 buckets the lowest and the highest.

    All where there are no more than `max_points`. First and last point always stay; None counts as no extreme.
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    num_buckets = max(1, (max_points - 2) // 2)
    kept = {0, count - 1}
    for bucket in range(num_buckets):
        begin, end = bucket * count // num_buckets, (bucket + 1) * count // num_buckets
        found = [(value, i) for i in range(begin, end) if (value := values[i]) is not None]
        kept |= {min(found)[1], max(found)[1]} if found else {begin}
    return sorted(kept)


def spread_evenly(count: int, max_count: int) -> list[int]:
    """At most `max_count` indices of 0 .. count - 1, evenly spaced, the first and the last among them."""
    if count <= max_count:
        return list(range(count))
    if max_count < 2:
        return [count - 1][:max_count]
    return sorted({round(i * (count - 1) / (max_count - 1)) for i in range(max_count)})
