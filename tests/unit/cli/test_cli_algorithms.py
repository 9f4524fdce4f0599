"""`rlhf-megatron algorithms`: everything that is registered, as its own source says it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.algorithms.losses.kl_estimators import KL_TYPES
from rlhf_megatron.cli.algorithms_command import LINE_WIDTH, _iter_registry_parts
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.rollout_correction_rules import PRESETS
from rlhf_megatron.controller.scheduler.schedules import SCHEDULES
from rlhf_megatron.registry import Registry
from rlhf_megatron.rewards.scorers import REWARDS


def run(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["algorithms", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def listed(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, out, err = run([*arguments, "--json"], capsys)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_all_that_is_registered_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = [(part["kind"], part["name"]) for part in listed([], capsys)]
    assert found == [
        *(("advantage estimator", name) for name in sorted(ADV_ESTIMATORS)),
        *(("policy loss", name) for name in sorted(POLICY_LOSSES)),
        *(("aggregation", name) for name in AGGREGATIONS),
        *(("KL estimator", name) for name in KL_TYPES),
        *(("rollout correction", name) for name in PRESETS),
        *(("reward", name) for name in sorted(REWARDS)),
        *(("schedule", name) for name in sorted(SCHEDULES)),
    ]


def test_every_part_says_what_it_is_and_each_parameter_what_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for part in listed([], capsys):
        assert part["summary"], part["name"]
        assert not [
            one["name"] for one in part["parameters"] if not (one["doc"] and one["type"])
        ], part["name"]
    for part in listed([], capsys):
        assert part["papers"] or part["kind"] not in ("advantage estimator", "policy loss"), part[
            "name"
        ]


def test_one_part_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    (grpo,) = listed(["grpo"], capsys)
    assert grpo["key"] == "algorithm.adv_estimator"
    assert grpo["summary"] == (
        "Group-relative advantages: a sample's reward against the other samples of its prompt."
    )
    assert [(one["name"], one["type"], one["default"]) for one in grpo["parameters"]] == [
        ("norm_adv_by_std_in_grpo", "true or false", "true"),
        ("epsilon", "number", "1e-06"),
    ]
    assert grpo["parameters"][1]["doc"] == "added to the standard deviation"
    assert grpo["needs"] == ["rewards", "group_ids"] and grpo["missing"] == []
    assert {"title": "DeepSeekMath", "arxiv": "2402.03300"} in grpo["papers"]
    assert "A = (r - mean_g) / (std_g + " in run(["grpo"], capsys)[1]
    (gdpo,) = listed(["gdpo"], capsys)
    assert gdpo["parameters"][0]["default"] is None
    code, out, _ = run(["gdpo"], capsys)
    assert (
        code == 0 and "gdpo_reward_keys: list of text, must be given; names of reward parts" in out
    )


def test_a_name_of_two_kinds_gives_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert [part["kind"] for part in listed(["gpg"], capsys)] == [
        "advantage estimator",
        "policy loss",
    ]


def test_an_unknown_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["ppo_clp"], capsys)
    assert code == 1 and out == ""
    assert "no part is called 'ppo_clp'; near to it: ppo_clip" in err
    code, out, err = run(["nosuch"], capsys)
    assert (code, out) == (1, "")
    assert err == "error: no part is called 'nosuch'; `rlhf-megatron algorithms` lists all.\n"


def test_a_name_of_verl_gives_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert [part["name"] for part in listed(["vanilla"], capsys)] == ["ppo_clip"]


def test_the_table_names_all_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([], capsys)
    assert code == 0 and max(map(len, out.splitlines())) <= LINE_WIDTH
    words = set(out.split())
    assert {*ADV_ESTIMATORS, *POLICY_LOSSES, *AGGREGATIONS, *KL_TYPES, *REWARDS} <= words
    assert "parameters: gamma=1.0, lam=1.0, whiten=true" in out
    assert "policy loss (actor.policy_loss.loss_mode)" in out
    assert (
        " bypass_pg_is          mode=bypass, loss_type=reinforce, rollout_is=sequence,"
        " rollout_is_threshold=2.0"
    ) in out
    assert set(PRESETS) <= words


def test_needs_that_no_run_meets_are_told() -> None:
    @dataclass(frozen=True)
    class Params:
        wanted: int  # without a default
        depth: tuple[int, ...] = (1, 2)  # with one

    registry: Registry[Any] = Registry("toy")
    registry.register("toy", Params, needs=("rewards", "tea_leaves"))(
        test_needs_that_no_run_meets_are_told
    )
    (part,) = _iter_registry_parts(registry, "a.b", {"rewards"})
    assert part.missing == ("tea_leaves",) and part.needs == ("rewards", "tea_leaves")
    assert [(one.name, one.default) for one in part.parameters] == [
        ("wanted", None),
        ("depth", "[1, 2]"),
    ]
