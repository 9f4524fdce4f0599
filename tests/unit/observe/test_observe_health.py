"""Health verdicts: series by hand on either side of each threshold; what is told when a
verdict changes.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from places import ROOT
from scheduler_samples import train_batch

from rlhf_megatron.controller.observe import health
from rlhf_megatron.controller.observe.health import (
    HEALTH_RULES,
    RULE_METRIC_KEYS,
    HealthWatch,
    judge_steps,
)
from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric
from rlhf_megatron.controller.observe.tracker import RunTracker

MONITORING = ROOT / "docs" / "monitoring.md"
NAN = float("nan")


def series(**columns: Sequence[float]) -> list[dict[str, float]]:
    """Metrics of steps; `a__b` stands for "a/b"."""
    keys = [key.replace("__", "/") for key in columns]
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def falling(rates: list[float]) -> list[dict[str, float]]:
    found = series(
        actor__pg_clipfrac=[0.0] * 6, actor__num_optimizer_steps=[2.0] * 6, actor__lr=rates
    )
    return [row | {health.PEAK_LR_KEY: 1.0} for row in found]


CASES = [
    # At 10 % of where it began nothing is said, below it is.
    ("entropy_collapse", series(actor__entropy=[2.0] * 5 + [0.2] * 5), False),
    ("entropy_collapse", series(actor__entropy=[2.0] * 5 + [0.19] * 5), True),
    (
        "entropy_collapse",
        series(actor__entropy=[2.0] * 5 + [0.1] * 5, reward__solve_all=[0.0] * 5 + [0.95] * 5),
        False,
    ),
    (
        "entropy_collapse",
        series(actor__entropy=[2.0] * 5 + [0.1] * 5, reward__solve_all=[0.0] * 5 + [0.9] * 5),
        True,
    ),
    ("entropy_collapse", series(actor__entropy=[2.0] * 5 + [0.0] * 4), None),
    ("entropy_collapse", series(actor__entropy=[0.0] * 10), None),
    ("kl_runaway", series(actor__kl_loss=[0.5] * 5), False),
    ("kl_runaway", series(actor__kl_loss=[0.4] * 4 + [1.0]), True),  # the mean is 0.52
    ("kl_runaway", series(actor__reward_kl_penalty=[0.6] * 5, actor__ppo_kl=[0.0] * 5), True),
    ("kl_runaway", series(actor__kl_loss=[0.3] * 5, actor__ppo_kl=[0.11] * 5), True),
    ("kl_runaway", series(actor__ppo_kl=[9.0] * 5 + [0.1] * 5), False),
    ("kl_runaway", series(actor__ppo_kl=[9.0] * 4), None),
    ("reward_errors", series(reward__masked=[0.05] * 5), False),
    ("reward_errors", series(reward__masked=[0.0] * 4 + [0.26]), True),  # the mean is 0.052
    ("no_signal", series(reward__uniform_groups=[0.9] * 5), False),
    ("no_signal", series(reward__uniform_groups=[0.9] * 4 + [0.95]), True),
    ("clip_high", series(actor__pg_clipfrac=[0.3] * 5), False),
    ("clip_high", series(actor__pg_clipfrac=[0.31] * 5), True),
    ("clip_zero", series(actor__pg_clipfrac=[0.0] * 5, actor__num_optimizer_steps=[2.0] * 5), True),
    (
        "clip_zero",
        series(actor__pg_clipfrac=[0.0] * 4 + [1e-6], actor__num_optimizer_steps=[2.0] * 5),
        False,
    ),
    (
        "clip_zero",
        series(actor__pg_clipfrac=[0.0] * 5, actor__num_optimizer_steps=[2.0] * 4 + [1.0]),
        None,
    ),
    # A schedule that has decayed the learning rate may leave the policy where it is.
    ("clip_zero", falling([1.0, 0.9, 0.8, 0.7, 0.6, 0.5]), True),
    ("clip_zero", falling([1.0, 0.9, 0.8, 0.7, 0.6, 0.49]), False),
    ("length_limit", series(response_length__clip_ratio=[0.3] * 5), False),
    ("length_limit", series(response_length__clip_ratio=[1.0] * 5 + [0.31] * 5), True),
    ("mismatch_growing", series(training__rollout_kl=[0.01] * 5 + [0.03] * 5), False),
    ("mismatch_growing", series(training__rollout_kl=[0.01] * 5 + [0.031] * 5), True),
    (
        "mismatch_growing",
        series(training__rollout_kl=[1e-8] * 5 + [1e-3] * 5),
        False,
    ),  # still harmless
    ("mismatch_growing", series(training__rollout_kl=[1e-8] * 5 + [1.1e-3] * 5), True),
    ("mismatch_growing", series(training__rollout_kl=[0.01] * 9), None),
    (
        "grad_norm_spike",
        series(actor__grad_norm=[1.0, 2.0, 3.0, 4.0, 50.0, 30.0]),
        False,
    ),  # 10 times the median, 3
    ("grad_norm_spike", series(actor__grad_norm=[1.0, 2.0, 3.0, 4.0, 50.0, 30.1]), True),
    (
        "grad_norm_spike",
        series(actor__grad_norm=[9.0] * 5 + [1.0] * 20 + [11.0]),
        True,
    ),  # the oldest are forgotten
    ("grad_norm_spike", series(actor__grad_norm=[1.0, 2.0, 3.0, 4.0, 100.0]), None),
    (
        "grad_norm_spike",
        series(actor__grad_norm=[1.0, 2.0, 3.0, 4.0, 5.0, NAN]),
        None,
    ),  # a skipped step says nothing
]


@pytest.mark.parametrize(
    ("name", "steps", "expected"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_a_verdict_at_its_threshold(
    name: str, steps: list[dict[str, float]], expected: bool | None
) -> None:
    found = {verdict.name: verdict for verdict in judge_steps(steps)}
    assert (found[name].is_bad if name in found else None) is expected
    if expected:
        assert re.fullmatch(
            rf"health/{name}: .+ should .+; it is [\d.e+-]+\. .+\.", str(found[name])
        )


def test_every_rule_is_tried_on_both_sides() -> None:
    tried = {(name, expected) for name, _, expected in CASES}
    assert {(rule.name, is_bad) for rule in HEALTH_RULES for is_bad in (True, False)} <= tried


def test_each_fix_names_what_to_do_and_each_key_is_a_metric() -> None:
    keys = [*RULE_METRIC_KEYS, *(key for rule in HEALTH_RULES for key in rule.metric_keys)]
    assert [key for key in keys if find_metric(key) is None] == []
    bad = [
        verdict
        for _, steps, expected in CASES
        if expected
        for verdict in judge_steps(steps)
        if verdict.is_bad
    ]
    assert {verdict.name for verdict in bad} == {rule.name for rule in HEALTH_RULES}
    assert all(verdict.fix.endswith(".") and len(verdict.fix) > 40 for verdict in bad)


def test_a_change_is_told_once() -> None:
    watch = HealthWatch()
    lines = {}
    metrics = {}
    for step, share in enumerate([0.0] * 5 + [1.0] * 3 + [0.0] * 10, start=1):
        metrics[step], lines[step] = watch.judge_step(
            step, {"reward/masked": share, "timing_s/step": 1.0}
        )
    # Means of five: steps 6 .. 12 have one of the ones at least.
    assert [
        step for step, of_step in metrics.items() if of_step.get("health/reward_errors")
    ] == list(range(6, 13))
    assert [step for step, told in lines.items() if told] == [6, 13]
    assert (
        lines[6][0].startswith(
            "step 6: health/reward_errors: the mean of reward/masked over 5 steps"
        )
        and len(lines[6]) == 1
    )
    assert lines[13] == ["step 13: health/reward_errors is over"]
    assert "health/reward_errors" not in metrics[4] and metrics[5] == {"health/reward_errors": 0.0}
    (trouble,) = watch.summarise_troubles().values()
    assert (
        trouble["first_step"],
        trouble["last_step"],
        trouble["num_steps"],
        trouble["is_now"],
    ) == (6, 12, 7, False)


def test_the_first_steps_are_remembered_in_a_long_run() -> None:
    watch = HealthWatch()
    entropies = [2.0] * 5 + [1.0] * 100 + [0.1] * 5
    found = [
        watch.judge_step(step, {"actor/entropy": value})[0] for step, value in enumerate(entropies)
    ]
    assert [row.get("health/entropy_collapse") for row in found[-2:]] == [0.0, 1.0], (
        "(4 x 0.1 + 1) / 5 is 0.28"
    )


def test_the_tracker_writes_notes_and_remembers_over_a_resume(tmp_path: Path) -> None:
    cut = {"rollout/num_samples": 10.0, "actor/num_epochs": 1.0, "actor/kl_loss": 2.0}
    with RunTracker(tmp_path, ("jsonl",), 9) as tracker:
        for step in range(1, 6):
            with tracker.track_step(step):
                tracker.set_step_batch(train_batch(), cut)
        told = [
            name
            for name, trouble in tracker.health_watch.troubles.items()
            if trouble.first_step == 5
        ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told == ["kl_runaway"] and [row.get("health/kl_runaway") for row in rows] == [
        None
    ] * 4 + [1.0]
    with RunTracker(tmp_path / "again", (), 9) as resumed:
        resumed.restore_from_rows(rows)
        assert (
            resumed.health_watch.summarise_troubles() == tracker.health_watch.summarise_troubles()
        )


def test_the_documented_thresholds_are_those_of_the_rules() -> None:
    """docs/monitoring.md has a row | `health/<verdict>` | rule | fix | for each."""
    rows = dict(
        re.findall(r"^\| `health/(\w+)` \| ([^|]+) \|", MONITORING.read_text(), re.MULTILINE)
    )
    assert set(rows) == {rule.name for rule in HEALTH_RULES}
    numbers = {
        name: [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
        for name, text in rows.items()
    }
    assert numbers["entropy_collapse"] == [health.MIN_ENTROPY_SHARE, health.MAX_SOLVED_SHARE]
    assert numbers["kl_runaway"] == [health.MAX_REFERENCE_KL, health.MAX_UPDATE_KL]
    assert numbers["reward_errors"] == [health.MAX_MASKED_SHARE] and numbers["no_signal"] == [
        health.MAX_UNIFORM_SHARE
    ]
    assert numbers["clip_high"] == [health.MAX_CLIPPED_SHARE] and numbers["clip_zero"] == [
        0,
        health.MIN_LR_SHARE,
    ]
    assert numbers["length_limit"] == [health.MAX_TRUNCATED_SHARE]
    assert numbers["mismatch_growing"] == [health.MAX_MISMATCH_GROWTH, health.MIN_MISMATCH_KL]
    assert numbers["grad_norm_spike"] == [health.MAX_SPIKE_RATIO, health.NUM_STEPS_BEFORE_SPIKE]
    assert f"the last {health.NUM_WINDOW_STEPS} steps" in MONITORING.read_text()
