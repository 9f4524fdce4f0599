"""The figures of `evaluate` against enumeration:
every subset of samples, every resample of items.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from test_evaluation_sample_figures import by_name, majority_score

from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    ScoredEvaluationSet,
    summarize_set,
)
from rlhf_megatron.controller.evaluation.sample_figures import bootstrap_intervals
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.jobs.generation.answer_scoring import compare_answers
from rlhf_megatron.rewards.scorers import RewardResult

NUM_SAMPLES = 6


def answered(
    name: str, scores: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]
) -> ScoredEvaluationSet:
    texts = tuple(f"question {i}" for i in range(len(scores)))
    many = tuple("" for _ in texts)
    prompts = PromptBatch(
        tuple(() for _ in texts), texts, many, many, tuple(range(len(texts))), many
    )
    results = tuple(tuple(RewardResult(score) for score in of_item) for of_item in scores)
    lengths = tuple(tuple(1 for _ in of_item) for of_item in scores)
    return ScoredEvaluationSet(name, prompts, tuple(map(tuple, answers)), lengths, results)


def drawn_items(seed: int, count: int) -> tuple[list[list[float]], list[list[str]]]:
    """Right or wrong samples, and the answers that they give: right ones agree, wrong ones may."""
    draw = random.Random(seed)
    scores = [[float(draw.random() < 0.4) for _ in range(NUM_SAMPLES)] for _ in range(count)]
    return scores, [["right" if s else draw.choice("abc") for s in of_item] for of_item in scores]


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_that_of_all_subsets(seed: int) -> None:
    """mean@N, pass@k, best, worst and maj of every size that is told."""
    scores, answers = drawn_items(seed, 7)
    found = summarize_set(answered("set", scores, answers))
    assert found.mean == pytest.approx(fmean(fmean(of_item) for of_item in scores), abs=1e-12)
    pass_at = {
        k: fmean(fmean(any(c) for c in combinations(of, k)) for of in scores) for k in (1, 2, 4, 6)
    }
    assert dict(found.best) == pytest.approx(pass_at, abs=1e-12)
    figures = by_name(found.figures)
    for k in (2, 4, 6):
        subsets = [
            list(combinations(zip(s, a, strict=True), k))
            for s, a in zip(scores, answers, strict=True)
        ]
        assert figures[f"best@{k}"].value == pytest.approx(pass_at[k], abs=1e-12)
        worst = fmean(fmean(min(s for s, _ in chosen) for chosen in of_item) for of_item in subsets)
        assert figures[f"worst@{k}"].value == pytest.approx(worst, abs=1e-12)
        votes = fmean(
            fmean(majority_score(*zip(*chosen, strict=True)) for chosen in of_item)
            for of_item in subsets
        )
        assert figures[f"maj@{k}"].value == pytest.approx(votes, abs=1e-12)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (3, 1, 7, 2, 5)])
def test_bootstrap_intervals_are_the_quantiles_of_all_resamples(weights: tuple[int, ...]) -> None:
    """Five items have 3,125 resamples; with weights a mean is that of tokens, not of documents."""
    values = np.array([0.31, 1.7, 0.94, 2.23, 0.05])
    sums = values * weights
    counts = np.array(weights)
    rows = np.array(list(product(range(5), repeat=5)))
    means = sums[rows].sum(1) / counts[rows].sum(1)
    ((value, low, high),) = bootstrap_intervals(
        values[:, None], np.random.default_rng(3), 200_000, counts[:, None].astype(np.float64)
    )
    assert value == pytest.approx(sums.sum() / counts.sum(), abs=1e-12)
    assert low is not None and high is not None
    share = 2e-3  # five standard errors of a share of 2.5 % in 200,000 draws
    for quantile, edge in ((0.025, low), (0.975, high)):
        assert (
            np.quantile(means, quantile - share) - 1e-9
            <= edge
            <= np.quantile(means, quantile + share) + 1e-9
        )


def test_a_paired_comparison_is_students_interval_of_the_differences() -> None:
    """Of 10 shared questions: 9 degrees of freedom, 2.262157. The files' orders are no matter."""
    first = drawn_items(5, 10)[0]
    second = drawn_items(6, 11)[0]
    differences = [fmean(b) - fmean(a) for a, b in zip(first, second, strict=False)]

    def of(scores: Any, order: Sequence[int]) -> ScoredEvaluationSet:
        found = answered("set", scores, [["x"] * NUM_SAMPLES] * len(scores))
        prompts = tuple(found.prompts.prompts[i] for i in order)
        batch = PromptBatch(
            found.prompts.prompt_ids,
            prompts,
            *(found.prompts.labels,) * 2,
            tuple(order),
            ("",) * len(order),
        )
        return ScoredEvaluationSet(
            "set", batch, found.responses, found.lengths, tuple(found.results[i] for i in order)
        )

    count, mean, interval = compare_answers(
        [of(first, range(10))], [of(second, [10, *range(9, -1, -1)])]
    )
    assert count == 10 and mean == pytest.approx(fmean(differences), abs=1e-12)
    half = 2.262157 * stdev(differences) / 10**0.5
    assert interval == pytest.approx((mean - half, mean + half), abs=1e-4)
