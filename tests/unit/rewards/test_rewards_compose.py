"""Several rewards, one score: weights, parts, sources, whose status counts; forms and lengths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.rewards.scorers import REWARDS, RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.overlong import OverlongParams, score_overlong
from rlhf_megatron.rewards.scorers.response_format import FormatParams, score_format
from rlhf_megatron.rewards.scorers.reward_types import make_masked_result
from rlhf_megatron.rewards.service.reward_components import (
    RewardComponent,
    combine_results,
    load_reward_components,
)
from rlhf_megatron.rewards.service.reward_scorer import (
    RewardErrorRateError,
    check_reward_error_rate,
    check_rewards_load,
    make_reward_scorer,
)
from rlhf_megatron.rewards.service.reward_worker import call_reward

THINK = r"<think>.*</think>\s*<answer>(.*)</answer>"
EXACT = {"pattern": "<answer>(.*)</answer>"}


def sample(
    response: str, label: str = "7", num_tokens: int = 10, source: str = "s", reason: str = "stop"
) -> RewardSample:
    return RewardSample("", response, label, source, reason, num_tokens)


def score(config: RewardConfig, *samples: RewardSample) -> list[RewardResult]:
    with make_reward_scorer(config, Path(os.devnull)) as scorer:
        return scorer(samples)


def test_a_weighted_sum_by_hand() -> None:
    """exact_match + 0.5 x format + 2 x overlong(100, 20); the response of 95 tokens has
    -15/20 of the last.
    """
    config = RewardConfig(
        params=EXACT,
        terms=(
            RewardTermConfig("format", 0.5, {"pattern": THINK}),
            RewardTermConfig("overlong", 2.0, {"max_len": 100, "buffer": 20}),
        ),
    )
    right, wrong, no_answer, no_form = score(
        config,
        sample("<think>\n3 + 4\n</think>\n<answer>7</answer>", num_tokens=95),
        sample("<think>x</think><answer>8</answer>"),
        sample("<think>x</think>", num_tokens=200),
        sample("so <answer>7</answer>"),
    )
    assert right == RewardResult(
        1 + 0.5 - 1.5,
        "ok",
        {"exact_match": 1.0, "format": 1.0, "overlong": -0.75, "main_reward": 1.0},
    )
    assert wrong == RewardResult(
        0.5, "ok", {"exact_match": 0.0, "format": 1.0, "overlong": 0.0, "main_reward": 0.0}
    )
    assert no_answer == RewardResult(
        -2.0, "malformed", {"exact_match": 0.0, "format": 0.0, "overlong": -1.0, "main_reward": 0.0}
    )
    assert no_form == RewardResult(
        1.0, "ok", {"exact_match": 1.0, "format": 0.0, "overlong": 0.0, "main_reward": 1.0}
    )


def test_a_wrong_answer_may_cost() -> None:
    config = RewardConfig(name="exact_match", params={"wrong_score": -1.0, "allow_truncated": True})
    results = score(config, sample("7", "7"), sample("8", "7"), sample("", "7"))
    assert [(result.score, result.status) for result in results] == [
        (1.0, "ok"),
        (-1.0, "ok"),
        (-1.0, "malformed"),
    ]


def test_sources_have_their_own_main_reward_and_share_the_terms() -> None:
    config = RewardConfig(
        by_source={"digits": RewardTermConfig("character_share", 3.0)},
        terms=(RewardTermConfig("overlong", 1.0, {"max_len": 10, "buffer": 5}),),
    )
    exact, digits = score(
        config, sample("7", num_tokens=6), sample("7a", num_tokens=6, source="digits")
    )
    assert exact == RewardResult(
        0.8, "ok", {"exact_match": 1.0, "overlong": -0.2, "main_reward": 1.0}
    )
    assert digits == RewardResult(
        3 * 0.5 - 0.2, "ok", {"character_share": 0.5, "overlong": -0.2, "main_reward": 0.5}
    )


def test_parts_of_one_name_are_numbered() -> None:
    config = RewardConfig(
        name="format",
        params={"pattern": "a+"},
        terms=tuple(RewardTermConfig("format", 1.0, {"pattern": p}) for p in ("b+", "[ab]+")),
    )
    [result] = score(config, sample("aa"))
    assert result == RewardResult(
        2.0, "ok", {"format": 1.0, "format_2": 0.0, "format_3": 1.0, "main_reward": 1.0}
    )


def components(*weights: float) -> list[RewardComponent]:
    return [
        RewardComponent(
            f"reward.terms[{i}]", f"part{i}", weight, REWARDS.get("exact_match"), None, {}
        )
        for i, weight in enumerate(weights)
    ]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            [RewardResult(1.0), make_masked_result("KeyError", "why")],
            make_masked_result("KeyError", "why"),
        ),
        ([RewardResult(0.0, "timeout"), make_masked_result("x")], make_masked_result("x")),
        (
            [RewardResult(0.0, "timeout"), RewardResult(1.0)],
            RewardResult(0.5, "timeout", {"part0": 0.0, "part1": 1.0, "main_reward": 0.0}),
        ),
        (
            [RewardResult(1.0), RewardResult(0.0, "timeout")],
            RewardResult(1.0, "ok", {"part0": 1.0, "part1": 0.0, "main_reward": 1.0}),
        ),
        (
            [RewardResult(-1.0, "malformed"), RewardResult(1.0)],
            RewardResult(-0.5, "malformed", {"part0": -1.0, "part1": 1.0, "main_reward": -1.0}),
        ),
        (
            [RewardResult(2.0, parts={"a": 3.0}), RewardResult(1.0)],
            RewardResult(
                2.5, "ok", {"part0": 2.0, "part0/a": 3.0, "part1": 1.0, "main_reward": 2.0}
            ),
        ),
    ],
)
def test_whose_status_counts(results: Sequence[RewardResult], expected: RewardResult) -> None:
    assert combine_results(components(1.0, 0.5), results) == expected


def test_rewards_of_the_controllers_own_process_are_watched_too() -> None:
    def raises(sample: RewardSample, params: object) -> RewardResult:
        raise ZeroDivisionError("by design")

    def pays_for_nothing(sample: RewardSample, params: object) -> RewardResult:
        return RewardResult(0.1, "malformed")

    one = sample("7")
    failed = call_reward(raises, one, None)
    assert failed.status == "masked:ZeroDivisionError" and failed.error.endswith(
        "ZeroDivisionError: by design"
    )
    assert call_reward(pays_for_nothing, one, None).status == "masked:bad_result"
    assert call_reward(lambda sample, params: 1.0, one, None).status == "masked:bad_result"  # type: ignore[arg-type,return-value]
    assert (
        call_reward(lambda sample, params: RewardResult(float("nan")), one, None).status
        == "masked:bad_result"
    )


def test_aborted_samples_are_masked_and_no_error() -> None:
    results = score(RewardConfig(max_error_rate=0.0), sample("7", reason="abort"), sample("7"))
    assert [result.status for result in results] == ["masked:aborted", "ok"]


def test_the_share_of_failures() -> None:
    samples = [sample("7")] * 10
    ok = RewardResult(1.0)
    failed = make_masked_result("KeyError", "Traceback\nKeyError: 'x'")
    aborted = make_masked_result("aborted")
    check_reward_error_rate(samples, [failed, *[ok] * 9], 0.1, "log")
    check_reward_error_rate(samples, [aborted] * 10, 0.0, "log")
    check_reward_error_rate([], [], 0.0, "log")
    with pytest.raises(RewardErrorRateError, match=r"1 of 9 rewards failed \(11.1%\)"):
        check_reward_error_rate(samples, [aborted, failed, *[ok] * 8], 0.1, "log")
    with pytest.raises(
        RewardErrorRateError,
        match=r"Most of them: masked:KeyError \(2\).*\nTraceback\nKeyError: 'x'\nCorrect the",
    ):
        check_reward_error_rate(
            samples, [make_masked_result("other"), failed, failed, *[ok] * 7], 0.2, "log"
        )


def test_wrong_rewards_are_told_all_at_once() -> None:
    config = RewardConfig(
        name="exact_mach",
        by_source={"a": RewardTermConfig("format", 1.0, {"patern": "x"})},
        terms=(
            RewardTermConfig("overlong", 1.0, {"max_len": 5, "buffer": 6}),
            RewardTermConfig("function"),
        ),
    )
    for look in (load_reward_components, check_rewards_load):
        with pytest.raises(ConfigError) as error:
            look(config)
        told = "\n".join(error.value.problems)
        assert "reward: unknown reward 'exact_mach'. Did you mean 'exact_match'?" in told
        assert (
            "reward.by_source.a.params.patern" in told
            and "reward.by_source.a.params.pattern" in told
        )
        assert "buffer (6 tokens) must be from 1 to max_len (5)" in told
        assert "reward.terms[1].params.path" in told


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)],
)
def test_overlong(num_tokens: int, expected: float) -> None:
    assert score_overlong(
        sample("x", num_tokens=num_tokens), OverlongParams(100, 20)
    ) == RewardResult(expected)


@pytest.mark.parametrize(
    ("response", "match", "expected"),
    [
        ("<think>a</think><answer>1</answer>", "whole", 1.0),
        (" <think>a\nb</think>\n <answer>1</answer>\n", "whole", 1.0),
        ("<think>a</think><answer>1</answer>.", "whole", 0.0),
        ("<think>a</think><answer>1</answer>.", "somewhere", 1.0),
        ("<answer>1</answer>", "somewhere", 0.0),
        ("", "whole", 0.0),
    ],
)
def test_format(response: str, match: str, expected: float) -> None:
    assert score_format(sample(response), FormatParams(THINK, match)) == RewardResult(expected)  # type: ignore[arg-type]


def test_wrong_params() -> None:
    with pytest.raises(ValueError, match=r"pattern \('\('\) is not a regular expression"):
        FormatParams("(")
