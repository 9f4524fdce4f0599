"""Our scorers against verl's own on 846 answers, published and adversarial: the same score, or a reason.

tests/support/verl_scores.jsonl holds what verl said (`python -m benchmarks.verl_scores`)."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from places import ROOT

from rlhf_megatron.rewards.scorers import REWARDS, RewardResult, RewardSample

ROWS = [json.loads(line) for line in (ROOT / "tests" / "support" / "verl_scores.jsonl").read_text().splitlines()]
OURS: dict[str, tuple[str, dict[str, Any]]] = {  # ours -> verl's, and our parameters
    "gsm8k": ("gsm8k", {}),
    "math": ("math", {}),
    "math_dapo": ("math_dapo", {}),
    "short_answer": ("search_r1", {}),
    "exact_match": ("gsm8k", {"pattern": "#### (.*)"}),
    "math_verify": ("math", {}),
}
COMMAS = "verl removes commas of the answer; text compares as it is: clean the labels, or use gsm8k"
READS_DIGITS = "verl stops reading at the first character that is none of a number's, so the rest of an answer is free"
BLANKS = "white space around an answer does not count here; verl wants one blank"
READS_ALL = "verl looks at the last 300 characters only"
VALUES = "verl compares text after its rules, the library values"
OTHER_BOXES = (
    "verl wants the last \\boxed with braces, or one blank; here the last box that is closed counts, an \\fbox too"
)
UNITS = "verl cuts all behind \\text{ , and the percent sign: `12 or 77` passes for 12 there"
REASONS = {
    "short_answer": {"eleven tags": "verl pays a quarter above ten tags; the term `repetition` fines those here"},
    "exact_match": {
        **dict.fromkeys(("published", "blank behind", "second one right", "five marks"), COMMAS),
        **dict.fromkeys(("percent", "unit", "sum", "both", "comma behind", "over one", "exponent"), READS_DIGITS),
        **dict.fromkeys(("blank in the number", "in a sentence", "a list of numbers"), READS_DIGITS),
        "two blanks": BLANKS,
        "far from the end": READS_ALL,
    },
    "math_verify": {
        **dict.fromkeys(("dollars in the box", "text in the box", "left right", "name of three letters"), VALUES),
        **dict.fromkeys(("two equations", "another order", "with a sign", "full stop in the box"), VALUES),
        **dict.fromkeys(("approximately", "degrees", "name of two letters"), VALUES),
        **dict.fromkeys(("fbox", "fbox behind", "an unfinished box behind", "no braces"), OTHER_BOXES),
        **dict.fromkeys(("box with a blank", "box with a blank and braces"), OTHER_BOXES),
        **dict.fromkeys(("no box", "box without a backslash"), "without a box the library reads the last expression"),
        **dict.fromkeys(("both", "two units", "percent"), UNITS),
    },
}


def scores(name: str) -> dict[str, list[tuple[str, str, float, float]]]:
    """Of each kind of answers what differs: response, label, verl's score, ours."""
    theirs, given = OURS[name]
    entry = REWARDS.get(name)
    assert entry.params is not None
    params, differing = entry.params(**given), defaultdict(list)
    rows = [row for row in ROWS if row["scorer"] == theirs]
    assert len(rows) >= 160 and {row["verl"] for row in rows} >= {0.0, 1.0}
    for row in rows:
        label = row["label"].replace(",", "") if theirs == "gsm8k" else row["label"]
        found = entry.build(RewardSample("", row["response"], label, "", "stop", 9), params).score
        if found != row["verl"]:
            differing[row["kind"]].append((row["response"], label, row["verl"], found))
    return differing


@pytest.mark.parametrize("name", OURS)
def test_the_same_score_or_a_reason(name: str) -> None:
    if name == "math_verify":
        pytest.importorskip("math_verify")
    differing = scores(name)
    assert set(differing) == set(REASONS.get(name, {})), dict(differing)


def test_an_empty_label_is_masked_and_not_equal_to_an_empty_answer() -> None:
    """verl pays these."""
    for name, response, label in (
        ("gsm8k", "#### ,", ""),
        ("math", r"\boxed{}", r"\!"),
        ("math_dapo", "Answer: units", "km"),
        ("short_answer", "<answer>the</answer>", "a"),
    ):
        entry = REWARDS.get(name)
        assert entry.params is not None
        assert (
            entry.build(RewardSample("", response, label, "", "stop", 9), entry.params()).status == "masked:bad_label"
        )


def test_scores_of_wrong_answers_and_commas_of_labels() -> None:
    entry = REWARDS.get("math_dapo")
    assert entry.params is not None and entry.params().wrong_score == -1.0, "as verl's, which scores 1 and -1"
    assert gsm8k("#### 1,234", "1,234").score == 1.0, "verl wants labels without commas"
    assert gsm8k("no mark", "3").status == "malformed"
    with pytest.raises(ValueError, match="must be at most 0"):
        entry.params(wrong_score=0.5)


def gsm8k(response: str, label: str) -> RewardResult:
    entry = REWARDS.get("gsm8k")
    assert entry.params is not None
    return entry.build(RewardSample("", response, label, "", "stop", 9), entry.params())
