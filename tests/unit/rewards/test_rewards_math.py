"""math-verify behind our own cut, size limits and statuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.scorers.answer_params import find_last_boxed
from rlhf_megatron.rewards.scorers.exact_match import ExactMatchParams, score_exact_match
from rlhf_megatron.rewards.scorers.math_verify import (
    MathVerifyParams,
    is_formula_too_large,
    score_math_verify,
)
from rlhf_megatron.rewards.scorers.reward_types import MALFORMED
from rlhf_megatron.rewards.service.reward_scorer import (
    check_rewards_load,
    make_process_tasks,
    make_reward_scorer,
)

pytest.importorskip("math_verify", reason="needs the extra `math`")


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    MathVerifyParams().prepare()


def sample(response: str, label: str, reason: str = "stop") -> RewardSample:
    return RewardSample("", response, label, "math", reason, 1)


def score(response: str, label: str, reason: str = "stop", **params: object) -> tuple[float, str]:
    result = score_math_verify(sample(response, label, reason), MathVerifyParams(**params))  # type: ignore[arg-type]
    return result.score, result.status


@pytest.mark.parametrize(
    ("response", "label"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"so \boxed{\frac{2}{4}}.", "1/2"),
        (r"\boxed{1} or rather \boxed{ 2\sqrt{2} }", r"\sqrt{8}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{(1,2)}", "(1, 2)"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{x=3}", "3"),
        (r"\boxed{2^{3^4}}", "2^{81}"),
        ("42", "42.0"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("the answer is 42", "42"),
        ("the answer is $\\frac{1}{2}$.", "0.5"),
        (r"\boxed{a lucky guess}", "a lucky guess"),
        ("We compute step by step. " * 40 + "The final answer is $\\frac{1}{2}$.", "0.5"),
        ("The final answer is $\\frac{1}{2}$. " + "I checked it with care. " * 400, "0.5"),
        (
            "(as ((((((((((((said)))))))))))) before, 99999! is large) " * 9
            + "so x = 3 and the answer: 42",
            "42",
        ),
    ],
)
def test_right_answers(response: str, label: str) -> None:
    assert score(response, label) == (1.0, "ok")


@pytest.mark.parametrize(
    ("response", "label"),
    [
        (r"\boxed{41}", "42"),
        (r"42, no: \boxed{41}", "42"),
        (r"\boxed{3.14}", r"\pi"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{[0,1)}", "[0,1]"),
        (r"\boxed{41 or 42}", "42"),
    ],
)
def test_wrong_answers(response: str, label: str) -> None:
    assert score(response, label) == (0.0, "ok")


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        r"\boxed{}",
        "$",
        r"\boxed{$$}",
        "7" * 257,
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{10^{10^{10}}}",
    ]
    + ["(" * 20 + "1" + ")" * 20, r"\boxed{" + r"\frac{" * 12 + "1" + "}{2}" * 12 + "}"]
    + [
        "word " * 200,
        "the answer is $" + "7" * 257 + "$",
        "so the answer is $9^{9^{9^9}}$",
        "it is $12345!$ then",
    ]
    + [r"\boxed{((9!)!)!}", r"\boxed{1000000!}", r"\boxed{\binom{10000000}{5000000}}"],
)
def test_malformed_answers(response: str) -> None:
    assert score(response, "42") == (0.0, "malformed")


def test_where_the_answer_stands() -> None:
    assert score("Answer: 1/2\nAnswer: 3/4\n", "0.75", pattern=r"Answer: (.*)") == (1.0, "ok")
    assert score(r"\boxed{0.75}", "0.75", pattern=r"Answer: (.*)") == (0.0, "malformed")
    assert score(r"\boxed{1}", "1", reason="length") == (0.0, "malformed")
    assert score(r"\boxed{1}", "1", reason="length", allow_truncated=True) == (1.0, "ok")


def test_a_label_that_cannot_be_read_is_not_the_policys_fault() -> None:
    assert score(r"\boxed{1}", "") == (0.0, "masked:bad_label")
    assert score(r"\boxed{1}", "9^{9^{9}}") == (0.0, "masked:bad_label")
    assert score(r"\boxed{9^{9^{9}}}", "9^{9^{9}}") == (1.0, "ok")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{\text{the } \boxed{2}", "2"),
        (r"\fbox {3}", "3"),
        (r"} \boxed{\{4\}} {", r"\{4\}"),
        (r"{ \boxed{5}", "5"),
        (r"\\boxed{6}", None),
        ("boxed{7}", None),
    ],
)
def test_boxes(response: str, expected: str | None) -> None:
    assert find_last_boxed(response) == expected


def test_boxes_that_never_close_take_no_time() -> None:
    """Each of them scanned to the end would be 10^10 steps."""
    assert find_last_boxed(r"\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2^{332192}", False),  # 99,999.8 digits
        ("2^{332200}", True),
        ("9^9", False),
        ("9^{9^9}", True),
        ("2^3^4", False),
        ("1^{99999999}", False),
        ("0^{99999999}", False),
        ("x^{2^{10}}", False),
        ("10000!", False),
        ("10001!", True),
        ("(3!)!", True),
        (r"\binom{100000}{2}", False),
        (r"\binom{100001}{2}", True),
        ("(" * 10 + ")" * 10, False),
        ("(" * 11, True),
        ("2^{" + "9" * 200 + "}", True),
        ("9" * 200 + "^{9}", False),
    ],
)
def test_sizes(text: str, expected: bool) -> None:
    assert is_formula_too_large(text) is expected


def test_hanging_algebra_is_ended_and_equal_answers_are_computed_once(tmp_path: Path) -> None:
    hanging = r"\boxed{\sum_{n=1}^{\infty} \frac{\sin n}{n^3}}"
    config = RewardConfig(name="math_verify", num_workers=2, timeout_s=1.0)
    check_rewards_load(config)
    right = r"\boxed{84/2}"
    samples = [sample(response, "42") for response in (hanging, *[right] * 20, *[hanging] * 20)]
    with make_reward_scorer(config, tmp_path / "log") as scorer:
        results = scorer(samples)
    assert len(make_process_tasks(scorer.components, list(scorer.components), samples)) == 2
    assert [(r.score, r.status) for r in results] == [
        (0.0, "timeout"),
        *[(1.0, "ok")] * 20,
        *[(0.0, "timeout")] * 20,
    ]


def test_what_a_result_depends_on() -> None:
    params = MathVerifyParams()
    keys = {
        params.make_result_key(sample(response, "1"))
        for response in (r"\boxed{2}", r"so \boxed{2}", r"\boxed{ 2 }")
    }
    assert keys == {json.dumps([["2", False], "1"])}
    assert params.make_result_key(sample("is 2", "1")) == json.dumps([["is 2", True], "1"])
    assert params.make_result_key(sample("", "1")) == json.dumps([None, "1"])


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"pattern": "x"}, "needs a group"),
        ({"max_answer_chars": 0}, r"max_answer_chars \(0\) must be at least 1"),
    ],
)
def test_wrong_params(params: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        MathVerifyParams(**params)  # type: ignore[arg-type]


def gsm8k(response: str, label: str) -> float:
    """verl's rule."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", response[-300:])
    return float(bool(found) and found[-1].replace(",", "").replace("$", "") == label)


def test_what_the_page_says_of_each_scorer() -> None:
    section = (
        (ROOT / "docs" / "rewards.md").read_text().split("### What is read")[1].split("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) == 13
    for text, label, exact, by_library, verl in rows:
        response = re.findall("`(.*?)`", text)[0] + (
            "\n" + "x" * 300 if "300 characters" in text else ""
        )
        one = sample(response, label.strip("`"), "length" if "cut by length" in text else "stop")
        for told, found in (
            (exact, score_exact_match(one, ExactMatchParams(pattern="#### (.*)"))),
            (by_library, score_math_verify(one, MathVerifyParams())),
        ):
            assert told == (found.status if found.status == MALFORMED else f"{found.score:g}"), text
        if verl.startswith("gsm8k"):
            assert int(verl.split()[1].strip(",:")) == gsm8k(response, label.strip("`")), text
