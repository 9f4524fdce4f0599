"""Our scorers against verl's own on 1,362 answers, published and adversarial: the same
score, or a reason.

tests/support/verl_scores.jsonl holds what verl said (`python -m benchmarks.verl_scores`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from places import ROOT

from rlhf_megatron.rewards.scorers import REWARDS, RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.code_tests import CodeParams, get_process_sandbox

ROWS = [
    json.loads(line)
    for line in (ROOT / "tests" / "support" / "verl_scores.jsonl").read_text().splitlines()
]
SHARE = {"score": "share", "test_timeout_s": 2.0}
OURS: dict[str, tuple[str, dict[str, Any]]] = {  # ours -> verl's, and our parameters
    "gsm8k": ("gsm8k", {}),
    "math": ("math", {}),
    "math_dapo": ("math_dapo", {}),
    "short_answer": ("search_r1", {}),
    "code": ("prime_code", {**SHARE, "compare": "allclose"}),
    "code, close": ("prime_code", SHARE),
    "code, exact": ("prime_code", {**SHARE, "compare": "exact"}),
    "exact_match": ("gsm8k", {"pattern": "#### (.*)"}),
    "math_verify": ("math_verify", {}),
}
COMMAS = "verl removes commas of the answer; text compares as it is: clean the labels, or use gsm8k"
READS_DIGITS = (
    "verl stops reading at the first character that is none of a number's, so the rest of an"
    " answer is free"
)
BLANKS = "white space around an answer does not count here; verl wants one blank"
READS_ALL = "verl looks at the last 300 characters only"
OTHER_BOXES = (
    "verl's parser reads no answer in them; here the last box that is closed counts, an \\fbox too"
)
FROM_THE_FIRST = "verl's parser joins the boxes of a response; here the last one counts"
FRACTIONS = (
    "a \\frac that stands in no box, or in other marks within it, verl's parser finds all the same"
)
RIGHT = (
    "a right program; verl's grader runs it as a function in its own process, with texts as"
    " stdin and stdout"
)
LINES_OF_NUMBERS = (
    "lines of numbers are compared as decimals, as LiveCodeBench does; verl compares digits as text"
)
OF_CODE = {
    **dict.fromkeys(("open(0)", "buffer", "bytes", "exit(0) behind", "star"), RIGHT),
    "exit code 1 behind": "a program that fails has not passed",
    "no mark": "an unmarked block counts where none is marked as Python",
    "not closed": "a block that does not end is malformed",
    "the first": "verl takes the first element of an expected list for all of it",
    "equals all": "verl compares where the program's __eq__ counts",
    "number": "verl takes 1 for true",
    "by heart": (
        "verl leaves out the function's name when it scores test by test: functions have no"
        " share there"
    ),
}
REASONS = {
    "code": OF_CODE,
    "code, close": {**OF_CODE, "zero before": LINES_OF_NUMBERS},
    "code, exact": {
        **OF_CODE,
        "zero before": LINES_OF_NUMBERS,
        "nearly": "verl has a tolerance; with `exact` decimals have none, as LiveCodeBench's",
    },
    "short_answer": {
        "eleven tags": "verl pays a quarter above ten tags; the term `repetition` fines those here"
    },
    "exact_match": {
        **dict.fromkeys(("published", "blank behind", "second one right", "five marks"), COMMAS),
        **dict.fromkeys(
            ("percent", "unit", "sum", "both", "comma behind", "over one", "exponent"), READS_DIGITS
        ),
        **dict.fromkeys(
            ("blank in the number", "in a sentence", "a list of numbers"), READS_DIGITS
        ),
        "two blanks": BLANKS,
        "far from the end": READS_ALL,
    },
    "math_verify": {
        **dict.fromkeys(
            ("fbox", "box with a blank", "box with a blank and braces", "no braces"), OTHER_BOXES
        ),
        **dict.fromkeys(("text in the box", "open box", "capital"), FRACTIONS),
        "an unfinished box behind": "a last box that is not closed scores nothing",
        "last one right": FROM_THE_FIRST,
        "full stop in the box": "`12.` is no number for verl's parser",
        "approximately": (
            "the library reads \\approx before 1/2 alone, asked as verl does before \\frac alone"
        ),
    },
}


def scores(name: str) -> dict[str, list[tuple[str, str, float, float]]]:
    """Of each kind of answers what differs: response, label, verl's score, ours."""
    theirs, given = OURS[name]
    entry = REWARDS.get(name.partition(",")[0])
    assert entry.params is not None
    params = entry.params(**given)
    differing = defaultdict(list)
    rows = [row for row in ROWS if row["scorer"] == theirs]
    assert len(rows) >= 160 and {row["verl"] for row in rows} >= {0.0, 1.0}
    for row in rows:
        label = row["label"].replace(",", "") if theirs == "gsm8k" else row["label"]
        found = entry.build(RewardSample("", row["response"], label, "", "stop", 9), params).score
        if found != row["verl"]:
            differing[row["kind"]].append((row["response"], label, row["verl"], found))
    return differing


LONG = ("code, exact",)  # the programs run for the other two rules as well


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in OURS]
)
def test_the_same_score_or_a_reason(name: str) -> None:
    if name == "math_verify":
        pytest.importorskip("math_verify")
    if name.startswith("code"):
        try:
            CodeParams(**OURS[name][1]).prepare()
        except ValueError as error:
            pytest.skip(str(error))
    differing = scores(name)
    if name.startswith("code"):
        get_process_sandbox(CodeParams(**OURS[name][1])).close()
        get_process_sandbox.cache_clear()
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
            entry.build(RewardSample("", response, label, "", "stop", 9), entry.params()).status
            == "masked:bad_label"
        )


def test_scores_of_wrong_answers_and_commas_of_labels() -> None:
    entry = REWARDS.get("math_dapo")
    assert entry.params is not None and entry.params().wrong_score == -1.0, (
        "as verl's, which scores 1 and -1"
    )
    assert gsm8k("#### 1,234", "1,234").score == 1.0, "verl wants labels without commas"
    assert gsm8k("no mark", "3").status == "malformed"
    with pytest.raises(ValueError, match="must be at most 0"):
        entry.params(wrong_score=0.5)


def gsm8k(response: str, label: str) -> RewardResult:
    entry = REWARDS.get("gsm8k")
    assert entry.params is not None
    return entry.build(RewardSample("", response, label, "", "stop", 9), entry.params())
