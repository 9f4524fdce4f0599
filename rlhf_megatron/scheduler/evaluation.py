"""Held-out accuracy with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

Z95 = 1.959963984540054


@dataclass(frozen=True)
class EvaluationResult:
    """Of one evaluation. An item's score is the mean over its samples."""

    accuracy: float  # mean score
    low: float  # 95 % interval (Wilson) of the mean over items
    high: float
    num_items: int
    mean_response_length: float  # tokens
    examples: tuple[tuple[str, str, str, float], ...]  # prompt, response, label, score of a few items


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927). `count` independent items, `mean` in [0, 1]."""
    if count == 0:
        return 0.0, 1.0
    square = Z95 * Z95
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * sqrt(mean * (1 - mean) / count + square / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def summarize(
    item_scores: Sequence[float], response_lengths: Sequence[int], examples: Sequence[tuple[str, str, str, float]]
) -> EvaluationResult:
    """`item_scores`: one mean score in [0, 1] an item; `response_lengths`: tokens, one a sample."""
    count = len(item_scores)
    accuracy = sum(item_scores) / count
    low, high = wilson_interval(min(1.0, max(0.0, accuracy)), count)
    mean_length = sum(response_lengths) / max(1, len(response_lengths))
    return EvaluationResult(accuracy, low, high, count, mean_length, tuple(examples))
