"""Rewards: what scores, what scores 0 and why, what is left out."""

import pytest

from rlhf_megatron.rewards.scorers import REWARDS, RewardResult, RewardSample, is_masked
from rlhf_megatron.rewards.scorers.exact_match import ExactMatchParams, score_exact_match
from rlhf_megatron.rewards.scorers.reward_types import BadResultError, make_masked_result


def sample(response: str, label: str, reason: str) -> RewardSample:
    return RewardSample("", response, label, "test", reason, len(response))


def score(
    response: str, label: str = "52", reason: str = "stop", **params: object
) -> tuple[float, str]:
    result = score_exact_match(sample(response, label, reason), ExactMatchParams(**params))  # type: ignore[arg-type]
    return result.score, result.status


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("52", "52", (1.0, "ok")),
        (" 52\n", "52", (1.0, "ok")),
        ("52", " 52 ", (1.0, "ok")),
        ("152", "52", (0.0, "ok")),
        ("52 or 53", "52", (0.0, "ok")),
        ("052", "52", (0.0, "ok")),
        ("5", "52", (0.0, "ok")),
        ("", "52", (0.0, "malformed")),
        (" \n", "52", (0.0, "malformed")),
    ],
)
def test_the_whole_response(response: str, label: str, expected: tuple[float, str]) -> None:
    assert score(response, label) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("so <answer> 52 </answer> it is", (1.0, "ok")),
        ("<answer>52</answer> no, <answer>53</answer>", (0.0, "ok")),
        ("<answer>53</answer> no, <answer>52</answer>", (1.0, "ok")),
        ("<answer>52, 53</answer>", (0.0, "ok")),
        ("52", (0.0, "malformed")),
        ("<answer>52", (0.0, "malformed")),
        ("<answer> </answer>", (0.0, "malformed")),
    ],
)
def test_a_slot(response: str, expected: tuple[float, str]) -> None:
    assert score(response, pattern=r"<answer>(.*?)</answer>") == expected


def test_a_group_that_did_not_take_part_is_malformed() -> None:
    assert score("none", pattern=r"(\d+)|none") == (0.0, "malformed")


def test_a_response_that_ended_by_length() -> None:
    assert score("52", reason="length") == (0.0, "malformed")
    assert score("52", reason="length", allow_truncated=True) == (1.0, "ok")


def test_masked_statuses() -> None:
    assert is_masked("masked:aborted") and not is_masked("malformed")


def test_long_answers_are_malformed() -> None:
    assert score("1234", "1234", max_answer_chars=4) == (1.0, "ok")
    assert score("12345", "1234", max_answer_chars=4) == (0.0, "malformed")


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"pattern": "(x"}, r"pattern \('\(x'\) is not a regular expression"),
        ({"pattern": "x"}, r"pattern \('x'\) needs a group"),
        ({"max_answer_chars": 0}, r"max_answer_chars \(0\) must be at least 1"),
    ],
)
def test_wrong_params(params: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ExactMatchParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("score_", "status", "problem"),
    [
        (0.0, "fine", r"status \('fine'\) must be ok, malformed, timeout or masked:<why>"),
        (0.0, "masked:", "status"),
        (float("nan"), "ok", r"score \(nan\) must be a number from -1e\+06 to 1e\+06"),
        (float("-inf"), "ok", "must be a number"),
        (1.1e6, "ok", "must be a number"),
        (10**400, "ok", "must be a number"),
        ("1", "ok", r"score \('1'\) must be a number"),
        (None, "ok", "must be a number"),
    ],
)
def test_impossible_results(score_: object, status: str, problem: str) -> None:
    with pytest.raises(BadResultError, match=problem):
        RewardResult(score_, status)  # type: ignore[arg-type]


def test_a_part_must_be_a_number() -> None:
    with pytest.raises(BadResultError, match=r"depth \(inf\) must be a number"):
        RewardResult(1.0, parts={"depth": float("inf")})


def test_results_of_every_kind() -> None:
    assert RewardResult(-0.5).status == "ok"
    assert RewardResult(0.0, "timeout").parts == {}
    assert make_masked_result("server_down").status == "masked:server_down"


def test_the_registry_finds_rewards_of_the_package() -> None:
    entry = REWARDS.get("exact_match")
    assert entry.build is score_exact_match and entry.params is ExactMatchParams
    with pytest.raises(ValueError, match="Did you mean 'exact_match'"):
        REWARDS.get("exact_mach")
