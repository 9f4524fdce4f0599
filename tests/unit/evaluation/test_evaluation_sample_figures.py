"""best@k, worst@k and maj@k: by hand, against all subsets, and their intervals."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from rlhf_megatron.controller.evaluation.sample_figures import (
    SampleFigure,
    bootstrap_intervals,
    compute_majority_score,
    compute_sample_figures,
    extract_final_answer,
    list_subset_sizes,
)

SCORES = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.25, 0.5], [1.0, 1.0], [0.5]]
ANSWERS = [["7", "8", "8", "7"], ["a", "a", "b", "c"], ["x", "x"], ["y"]]


def majority_score(scores: tuple[float, ...], answers: tuple[str, ...]) -> float:
    most = max(answers.count(answer) for answer in answers)
    tied = {answer for answer in answers if answers.count(answer) == most}
    return fmean(
        fmean(s for s, a in zip(scores, answers, strict=True) if a == answer) for answer in tied
    )


def by_name(figures: tuple[SampleFigure, ...]) -> dict[str, SampleFigure]:
    return {f"{figure.name}@{figure.k}": figure for figure in figures}


def test_against_all_subsets() -> None:
    found = by_name(compute_sample_figures(SCORES, ANSWERS))
    assert set(found) == {f"{name}@{k}" for name in ("best", "worst", "maj") for k in (2, 4)}
    for k in (2, 4):
        subsets = [
            list(combinations(zip(s, a, strict=True), k))
            for s, a in zip(SCORES, ANSWERS, strict=True)
        ]
        subsets = [of_item for of_item in subsets if of_item]  # items that have k samples
        best = fmean(fmean(max(s for s, _ in chosen) for chosen in of_item) for of_item in subsets)
        worst = fmean(fmean(min(s for s, _ in chosen) for chosen in of_item) for of_item in subsets)
        voted = fmean(
            fmean(majority_score(*zip(*chosen, strict=True)) for chosen in of_item)
            for of_item in subsets
        )
        assert found[f"best@{k}"].value == pytest.approx(best) and found[
            f"worst@{k}"
        ].value == pytest.approx(worst)
        assert found[f"maj@{k}"].value == pytest.approx(voted, abs=1e-12)


def test_by_hand() -> None:
    found = by_name(compute_sample_figures([[1.0, 0.0, 0.0]], [["7", "8", "8"]]))
    # Of two of three: best is 1 in 2 of 3 pairs, worst is 0 in all; votes: 7 against 8 is a tie
    # twice, then 8 and 8.
    assert (found["best@2"].value, found["worst@2"].value) == (pytest.approx(2 / 3), 0.0)
    assert found["maj@2"].value == pytest.approx(1 / 3)
    assert (found["best@3"].value, found["worst@3"].value, found["maj@3"].value) == (1.0, 0.0, 0.0)
    assert all(figure.low is figure.high is None for figure in found.values()), (
        "one item says nothing of others"
    )


def test_a_majority_of_drawn_subsets_converges() -> None:
    """Of 10 samples 6 are right: of five, three or more in 186 of 252 subsets."""
    scores = np.tile([1.0] * 6 + [0.0] * 4, (400, 1))
    codes = np.tile([0] * 6 + [1] * 4, (400, 1))
    found = compute_majority_score(scores, codes, 5, np.random.default_rng(0))
    # 40000 draws: a standard error of 0.0022
    assert found.mean() == pytest.approx(186 / 252, abs=0.01)


def test_the_same_input_gives_the_same_figures_and_the_order_of_samples_is_no_matter() -> None:
    assert compute_sample_figures(SCORES, ANSWERS) == compute_sample_figures(SCORES, ANSWERS)
    turned = by_name(compute_sample_figures([s[::-1] for s in SCORES], [a[::-1] for a in ANSWERS]))
    for name, figure in by_name(compute_sample_figures(SCORES, ANSWERS)).items():
        assert turned[name].value == pytest.approx(figure.value, abs=1e-12)


def test_single_samples_have_no_figures() -> None:
    assert (
        compute_sample_figures([[1.0], [0.0]], [["a"], ["b"]])
        == ()
        == compute_sample_figures([], [])
    )
    assert compute_sample_figures([[], [1.0, 0.0]], [[], ["a", "b"]])[0] == SampleFigure(
        "best", 2, 1.0, None, None
    )


def test_sizes() -> None:
    assert [list_subset_sizes(n) for n in (0, 1, 2, 3, 8, 10)] == [
        [],
        [],
        [2],
        [2, 3],
        [2, 4, 8],
        [2, 4, 8, 10],
    ]


def test_answers() -> None:
    texts = [r"so \boxed{4} or \boxed{5}", "72 / 2 = 36\n#### 36 ", " 149 ", ""]
    assert [extract_final_answer(text) for text in texts] == ["5", "36", "149", ""]


def test_bootstrap_intervals_are_those_of_the_mean() -> None:
    """Of 400 items of mean 0.3: the standard error is sqrt(0.21 / 400)."""
    column = np.array([1.0] * 120 + [0.0] * 280)
    ((value, low, high), (half, *_), (alone, none, _)) = bootstrap_intervals(
        np.stack(
            [
                column,
                np.where(np.arange(400) < 200, column, np.nan),
                np.where(np.arange(400) < 1, 1, np.nan),
            ],
            1,
        ),
        np.random.default_rng(1),
    )
    assert (
        value == pytest.approx(0.3) and half == pytest.approx(0.6) and (alone, none) == (1.0, None)
    )
    error = 1.96 * (0.21 / 400) ** 0.5
    assert low == pytest.approx(0.3 - error, abs=0.008) and high == pytest.approx(
        0.3 + error, abs=0.008
    )


def test_columns_that_are_all_alike_have_an_interval_of_no_width() -> None:
    assert list(bootstrap_intervals(np.ones((10, 1)), np.random.default_rng(0))) == [
        (1.0, 1.0, 1.0)
    ]
