"""Labels that no answer could score with: refused before a run, masked in it,
and never a silent 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import DataConfig, RewardConfig, RewardTermConfig
from rlhf_megatron.jobs.generation.answer_scoring import score_answer_file
from rlhf_megatron.rewards.scorers import REWARDS, RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.reward_types import LabelCheckingParams
from rlhf_megatron.rewards.service.reward_scorer import check_reward_labels

SOLUTION = "Natalia sold 48/2 = 24 clips in May.\n#### 72"
LONG = "9" * 257
BAD = "masked:bad_label"


def scored(name: str, response: str, label: str, **params: Any) -> RewardResult:
    entry = REWARDS.get(name)
    assert entry.params is not None
    return entry.build(RewardSample("", response, label, "s", "stop", 9), entry.params(**params))


@pytest.mark.parametrize(
    ("name", "response", "label", "says"),
    [
        ("exact_match", "72", " ", "is empty, which no answer is"),
        (
            "exact_match",
            LONG,
            LONG,
            "has 257 characters, and a longer answer than max_answer_chars (256) is malformed",
        ),
        (
            "gsm8k",
            "#### 72",
            SOLUTION,
            "can equal no answer, which is a number of digits, commas and points; cut",
        ),
        ("gsm8k", "#### 72", "$72", "a number of digits"),
        ("gsm8k", "#### 72", "72 clips", "a number of digits"),
        ("gsm8k", "#### 0.5", r"\frac{1}{2}", "a number of digits"),
        ("gsm8k", "#### 72", '["72"]', "a number of digits"),
        ("gsm8k", "#### ,", ",", "equals an empty answer"),
        (
            "math",
            r"\boxed{5}",
            r"So $x=\boxed{5}$.",
            r"which is what stands within \\boxed{...}; cut that out of it",
        ),
        ("math", r"\boxed{}", "", "equals an empty answer"),
        ("math_dapo", "Answer: 72", SOLUTION, "can equal no answer, which is on one line"),
        ("math_dapo", "Answer: ", "", "equals an empty answer"),
        ("multiple_choice", "Answer: C", "2", "begins with none of the letters ABCDEFGHIJ"),
        ("multiple_choice", "Answer: C", '["A", "C"]', "begins with none"),
        ("multiple_choice", "Answer: C", "", "begins with none"),
        ("short_answer", "<answer>Paris</answer>", "", "has no words to compare with"),
        ("short_answer", "<answer>none</answer>", "[null]", "has no words"),
        ("short_answer", "<answer>Paris Rome</answer>", '[["Paris", "Rome"]]', "has no words"),
        ("short_answer", "<answer>True</answer>", '{"target": true}', "has no words"),
        ("short_answer", "<answer>Paris</answer>", '{"answer": "Paris"}', "has no words"),
    ],
)
def test_a_label_that_no_answer_could_score_with_is_masked(
    name: str, response: str, label: str, says: str
) -> None:
    result = scored(name, response, label)
    assert result.status == BAD and says.replace("\\\\", "\\") in result.error


@pytest.mark.parametrize(
    ("name", "response", "label"),
    [
        ("exact_match", "[1, 2]", "[1, 2]"),
        ("exact_match", '"a"', '"a"'),
        ("gsm8k", "#### 1,234", "1,234"),
        ("math", r"\boxed{\frac12}", r"\frac{1}{2}"),
        ("math_dapo", r"Answer: \boxed{5}", r"\boxed{5}"),
        ("multiple_choice", "Answer: C", "c"),
        ("short_answer", "<answer>Paris</answer>", json.dumps(json.dumps(["Rome", "Paris"]))),
        (
            "short_answer",
            "<answer>Paris</answer>",
            json.dumps(json.dumps({"target": ["Paris", None]})),
        ),
        ("short_answer", "<answer>1990</answer>", '{"target": 1990}'),
        ("short_answer", "<answer>1990</answer>", '"1990"'),
        ("short_answer", "<answer>null</answer>", "null"),
    ],
)
def test_labels_of_other_forms_that_count(name: str, response: str, label: str) -> None:
    assert scored(name, response, label) == RewardResult(1.0)
    params = REWARDS.get(name).params
    assert params is not None
    chosen = params()
    assert isinstance(chosen, LabelCheckingParams) and chosen.find_label_problem(label) == ""


def test_lists_and_objects_are_refused_before_a_run_where_text_is_compared() -> None:
    labels = [("a", '["72"]', '{"label_is_json": true}'), *[("a", "72", "")] * 99]
    with pytest.raises(ConfigError) as caught:
        check_reward_labels(RewardConfig(name="exact_match"), labels)
    assert caught.value.problems == [
        "reward (exact_match): 1 of 100 labels of the source 'a' could score with no answer. The"
        " label '[\"72\"]' is no text; name the key of one text or number in data.label_key, or"
        " use short_answer, which takes several right answers."
    ]
    for name in ("math_verify", "math", "gsm8k", "math_dapo", "multiple_choice"):
        with pytest.raises(ConfigError, match=r"(1|100) of 100 labels"):
            check_reward_labels(RewardConfig(name=name), labels)
    for name in ("short_answer", "code", "zero"):
        check_reward_labels(RewardConfig(name=name), labels)


def test_other_labels_are_refused_where_a_run_would_stop_for_them() -> None:
    """Up to reward.max_error_rate of a source's are masked as they are scored,
    as whatever fails.
    """
    config = RewardConfig(by_source={"b": RewardTermConfig("gsm8k")})
    labels = [("a", SOLUTION, "")] * 20 + [("b", "1", "")] * 9
    check_reward_labels(config, [*labels, ("b", SOLUTION, "")])
    with pytest.raises(
        ConfigError, match=r"reward\.by_source\.b \(gsm8k\): 2 of 11 labels of the source 'b'"
    ):
        check_reward_labels(config, [*labels, *[("b", SOLUTION, "")] * 2])


def test_labels_that_are_all_json_within_text_are_told(caplog: pytest.LogCaptureFixture) -> None:
    check_reward_labels(RewardConfig(), [("a", '"72"', ""), ("a", "[1]", "")])
    assert (
        "all labels of the source 'a' are JSON within text, such as '\"72\"'; reward (exact_match)"
        in caplog.text
    )
    caplog.clear()
    check_reward_labels(RewardConfig(), [("a", '"72"', ""), ("a", "72", "")])
    check_reward_labels(RewardConfig(name="short_answer"), [("a", '"72"', "")])
    assert not caplog.records


def test_answers_that_others_wrote(tmp_path: Path) -> None:
    row = {"question": "6*12=", "answer": ["72", "72.0"], "responses": ["72"]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(prompt_key="question", label_key="answer")
    with pytest.raises(ConfigError, match="1 of 1 labels of the source 'answers'"):
        score_answer_file(tmp_path / "answers.jsonl", RewardConfig(), tmp_path / "log", data)
