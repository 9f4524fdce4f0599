"""best@k, worst@k and maj@k of an evaluation set, with bootstrap intervals over items. Pure;
vectorised and seeded.

best and worst are expected values over all ways to take k of an item's n samples without
replacement, in closed form. maj is the score of the most common answer among k samples: the mean
over all subsets where these are at most NUM_DRAWS, else over so many that are drawn.
Answers that are equally common count as the mean of their scores. An answer is what stands in the
last \\boxed{...}, or after the last "####", or else the whole response.

An interval says how the figure would vary over other items: items are drawn with replacement,
NUM_RESAMPLES times.
"""

# I items, N samples of each, K figures, R resamples

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from rlhf_megatron.rewards.scorers.answer_params import find_last_boxed

SEED = 42
NUM_RESAMPLES = 1000
NUM_DRAWS = 100  # subsets of an item's samples
MAX_NUMBERS_IN_MEMORY = 1 << 22  # in memory at a time
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SampleFigure:
    """best@k, worst@k or maj@k: mean over the items that have k samples that count."""

    name: str  # "best" | "worst" | "maj"
    k: int
    value: float
    low: float | None  # 95 % interval; None for a single item
    high: float | None


def compute_sample_figures(
    scores: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]
) -> tuple[SampleFigure, ...]:
    """Return best@k, worst@k and maj@k with intervals, for k = 2, 4 ... `scores` and `answers` have
    an entry for each item, with its samples that count. Return () where no item has two samples.
    """
    generator = np.random.default_rng(SEED)
    sizes = list_subset_sizes(max((len(of_item) for of_item in scores), default=0))
    names = [(name, k) for k in sizes for name in ("best", "worst", "maj")]
    table = np.full((len(scores), len(names)), np.nan)
    for n in sorted({len(of_item) for of_item in scores} - {0, 1}):
        rows = [i for i, of_item in enumerate(scores) if len(of_item) == n]
        of_rows = np.array([scores[i] for i in rows], dtype=np.float64)
        codes = np.array([_encode_answers(answers[i]) for i in rows])
        for column, (name, k) in enumerate(names):
            if k <= n:
                found = (
                    compute_majority_score(of_rows, codes, k, generator)
                    if name == "maj"
                    else compute_expected_extreme(of_rows, k, name == "best")
                )
                table[rows, column] = found
    return tuple(
        SampleFigure(name, k, value, low, high)
        for (name, k), (value, low, high) in zip(
            names, bootstrap_intervals(table, generator), strict=True
        )
    )


def list_subset_sizes(num_samples: int) -> list[int]:
    """Return 2, 4, 8 ... and `num_samples` itself; [] for a single sample."""
    powers = {1 << e for e in range(1, num_samples.bit_length()) if 1 << e <= num_samples}
    return sorted(powers | ({num_samples} if num_samples > 1 else set()))


def extract_final_answer(response: str) -> str:
    """Return the answer of a response: the content of its last boxed expression, else the text
    after the last "####", else the whole response.
    """
    boxed = find_last_boxed(response)
    return boxed if boxed is not None else response.rpartition("####")[2].strip()


def compute_expected_extreme(scores_IN: Floats, k: int, is_best: bool) -> Floats:
    """Return [I]: the expected best, or worst, of k samples of each item, drawn without
    replacement.
    """
    n = scores_IN.shape[1]
    weights_N = np.array([comb(i, k - 1) / comb(n, k) for i in range(n)])
    return np.sort(scores_IN, axis=1) @ (weights_N if is_best else weights_N[::-1])


def compute_majority_score(
    scores_IN: Floats, codes_IN: NDArray[np.int64], k: int, generator: np.random.Generator
) -> Floats:
    """Return [I]: the expected score of the most common answer of k samples of each item, over all
    subsets or NUM_DRAWS random ones. `codes_IN`: equal answers of an item have the same code, below
    N.
    """
    num_items, n = scores_IN.shape
    if k == n:
        return _score_most_common_answer(scores_IN, codes_IN, n)
    found = np.empty(num_items)
    num_subsets = min(comb(n, k), NUM_DRAWS)
    step = max(1, MAX_NUMBERS_IN_MEMORY // (num_subsets * n))
    for start in range(0, num_items, step):
        rows = slice(start, min(num_items, start + step))
        count = rows.stop - rows.start
        if comb(n, k) <= NUM_DRAWS:
            chosen = np.tile(np.array(list(combinations(range(n), k))).ravel(), (count, 1))
        else:
            chosen = (
                generator.random((count, NUM_DRAWS, n))
                .argpartition(k - 1, axis=2)[..., :k]
                .reshape(count, -1)
            )
        shape = (count * num_subsets, k)
        scores = np.take_along_axis(scores_IN[rows], chosen, 1).reshape(shape)
        codes = np.take_along_axis(codes_IN[rows], chosen, 1).reshape(shape)
        found[rows] = (
            _score_most_common_answer(scores, codes, n).reshape(count, num_subsets).mean(1)
        )
    return found


def _score_most_common_answer(
    scores_IN: Floats, codes_IN: NDArray[np.int64], num_codes: int
) -> Floats:
    """Return the mean score of the most common answer of each row; of equally common answers, the
    mean.
    """
    num_rows = len(scores_IN)
    places = (np.arange(num_rows)[:, None] * num_codes + codes_IN).ravel()
    counts = np.bincount(places, minlength=num_rows * num_codes).reshape(num_rows, num_codes)
    sums = np.bincount(places, weights=scores_IN.ravel(), minlength=num_rows * num_codes).reshape(
        counts.shape
    )
    is_most = counts == counts.max(1, keepdims=True)
    means = sums / np.maximum(counts, 1)
    return np.where(is_most, means, 0.0).sum(1) / is_most.sum(1)


def bootstrap_intervals(
    table_IK: Floats,
    generator: np.random.Generator,
    num_resamples: int = NUM_RESAMPLES,
    weights_IK: Floats | None = None,
) -> Iterator[tuple[float, float | None, float | None]]:
    """Yield (mean, low, high) of each column over the items that have an entry (not nan). low and
    high are the 2.5 and 97.5 % quantiles of the means of resampled items, None with a single item.
    All columns use the same resamples. `weights_IK`: the weights of the entries in a mean; None: 1.
    """
    has_entry_IK = ~np.isnan(table_IK)
    weight_IK = has_entry_IK if weights_IK is None else np.where(has_entry_IK, weights_IK, 0.0)
    filled_IK = np.where(has_entry_IK, table_IK, 0.0) * weight_IK
    num_items = len(table_IK)
    means_RK = np.full((num_resamples, table_IK.shape[1]), np.nan)
    step = max(1, MAX_NUMBERS_IN_MEMORY // max(1, num_items))
    for start in range(0, num_resamples if num_items > 1 else 0, step):
        count = min(step, num_resamples - start)
        drawn = (
            generator.integers(num_items, size=(count, num_items))
            + np.arange(count)[:, None] * num_items
        )
        times_RI = (
            np.bincount(drawn.ravel(), minlength=count * num_items)
            .reshape(count, num_items)
            .astype(np.float64)
        )
        with np.errstate(invalid="ignore"):  # a resample without an item that has an entry
            means_RK[start : start + count] = (times_RI @ filled_IK) / (times_RI @ weight_IK)
    for column in range(table_IK.shape[1]):
        value = float(filled_IK[:, column].sum() / weight_IK[:, column].sum())
        means_R = means_RK[:, column]
        is_known = has_entry_IK[:, column].sum() > 1
        low, high = np.nanquantile(means_R, (0.025, 0.975)) if is_known else (None, None)
        yield value, None if low is None else float(low), None if high is None else float(high)


def _encode_answers(answers: Sequence[str]) -> list[int]:
    """Return a number for each answer; equal answers have the same."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(answer, len(numbers)) for answer in answers]
