"""95 % intervals of a mean over items. An item is what counts: its samples are answers
to one question.

scipy is not used: its Wilson interval takes whole counts only, its bootstrap takes 4 to 10 times as
long as `sample_figures.bootstrap`, and the t quantile alone is not worth 140 MB and a
second of import.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

Z95 = 1.959963984540054
T95 = {1: 12.706204736432095, 2: 4.302652729911275, 3: 3.182446305284263, 4: 2.7764451051977987}


def compute_wilson_interval(mean: float, num_items: float, z: float = Z95) -> tuple[float, float]:
    """Return the score interval (low, high) of a proportion (Wilson 1927), 95 % by default.
    `num_items` independent items, `mean` in [0, 1]; (0, 1) for no items.
    """
    if num_items == 0:
        return 0.0, 1.0
    square = z * z
    centre = (mean + square / (2 * num_items)) / (1 + square / num_items)
    half = (
        z
        / (1 + square / num_items)
        * sqrt(mean * (1 - mean) / num_items + square / (4 * num_items * num_items))
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def compute_t95_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: exact up to 4 degrees of freedom, to 3e-4 above
    (Abramowitz & Stegun 26.7.5).
    """
    if degrees_of_freedom in T95:
        return T95[degrees_of_freedom]
    z = Z95
    n = degrees_of_freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def compute_item_interval(item_scores: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95 % interval (low, high) of the mean over items. `item_scores` holds the scores
    of each item's samples, at least one.

    With one 0/1 sample an item, or all samples right or all wrong: Wilson's interval. With several
    0/1 samples: Wilson's with Student's t in place of the normal and the effective number of
    independent answers, mean (1 - mean) / (variance of the mean over items), which lies between the
    number of items and the number of samples (Korn & Graubard 1998). With other scores: mean +- t *
    standard error over items. Return None where a single item has graded scores: it says nothing of
    other items.
    """
    count = len(item_scores)
    means = [sum(scores) / len(scores) for scores in item_scores]
    mean = sum(means) / count
    # of the mean
    variance = sum((m - mean) ** 2 for m in means) / (count - 1) / count if count > 1 else 0.0
    if any(score not in (0.0, 1.0) for scores in item_scores for score in scores):
        half = compute_t95_quantile(count - 1) * sqrt(variance) if count > 1 else 0.0
        return (mean - half, mean + half) if count > 1 else None
    num_samples = sum(map(len, item_scores))
    # all alike: nothing tells items from samples
    if num_samples == count or count == 1 or mean in (0.0, 1.0):
        return compute_wilson_interval(mean, count)
    effective = mean * (1 - mean) / variance if variance else num_samples
    return compute_wilson_interval(
        mean, min(max(effective, count), num_samples), compute_t95_quantile(count - 1)
    )
