"""Our scorers against verl's own on 260 answers, published and adversarial: the same score, or a reason.

tests/support/verl_scores.jsonl holds what verl said (`python -m benchmarks.verl_scores`)."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from places import ROOT

from rlhf_megatron.rewards.scorers import REWARDS, RewardSample

ROWS = [json.loads(line) for line in (ROOT / "tests" / "support" / "verl_scores.jsonl").read_text().splitlines()]
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "gsm8k": ("exact_match", {"pattern": "#### (.*)"}),
    "math": ("math_verify", {}),
    "math_dapo": ("math_verify", {"pattern": r"(?i)answer\s*:\s*([^\n]+)"}),
    "search_r1": ("short_answer", {}),
}
COMMAS = "verl removes commas of the answer; text compares as it is: clean the labels, or use math_verify"
READS_DIGITS = "verl stops reading at the first character that is none of a number's, so the rest of an answer is free"
READS_ALL = "verl looks at the last 300 characters only"
REASONS = {
    ("gsm8k", "published"): COMMAS,
    ("gsm8k", "blank behind"): COMMAS,
    ("gsm8k", "second one right"): COMMAS,
    ("gsm8k", "two blanks"): "white space around an answer does not count here; verl wants one blank",
    ("gsm8k", "percent"): READS_DIGITS,
    ("gsm8k", "unit"): READS_DIGITS,
    ("gsm8k", "sum"): READS_DIGITS,
    ("gsm8k", "both"): READS_DIGITS,
    ("gsm8k", "far from the end"): READS_ALL,
    ("math", "fbox"): "verl finds the \\fbox and fails to open it",
    ("math", "no box"): "without a box the library reads the last expression; a pattern forbids it",
    ("math", "dollars in the box"): "verl compares text, with the dollars",
    ("math", "text in the box"): "verl compares text, with the command; the library reads the number in it",
    ("math_dapo", "full stop"): "verl compares text after its rules, with the full stop",
    ("math_dapo", "text behind"): "the library reads the number before the words",
    ("search_r1", "eleven tags"): "verl pays a quarter above ten tags; the term `repetition` fines those here",
}  # fmt: skip


@pytest.mark.parametrize("scorer", OURS)
def test_the_same_score_or_a_reason(scorer: str) -> None:
    name, given = OURS[scorer]
    if name == "math_verify":
        pytest.importorskip("math_verify")
    entry = REWARDS.get(name)
    assert entry.params is not None
    params, differing = entry.params(**given), defaultdict(list)
    rows = [row for row in ROWS if row["scorer"] == scorer]
    for row in rows:
        label = row["label"].replace(",", "") if scorer == "gsm8k" else row["label"]
        found = entry.build(RewardSample("", row["response"], label, "", "stop", 9), params).score
        if found != row["verl"]:
            differing[scorer, row["kind"]].append((row["response"], row["verl"], found))
    assert set(differing) == {key for key in REASONS if key[0] == scorer}, dict(differing)
    assert len(rows) >= 40 and {row["verl"] for row in rows} >= {0.0, 1.0}


def test_no_wrong_answer_is_paid_where_verl_pays_none() -> None:
    """Of the kinds that are wrong by their making."""
    wrong = {"wrong", "last one wrong", "empty", "mark only", "nothing", "empty tag", "empty box", "second one wrong"}
    assert not {kind for _, kind in REASONS} & wrong
    assert {row["verl"] for row in ROWS if row["kind"] in wrong} == {0.0}
