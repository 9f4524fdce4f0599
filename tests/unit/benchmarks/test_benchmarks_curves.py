"""The learning curves of all algorithms: what runs is registered and complete, the page says what
the file says.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import algorithm_curves, algorithm_page
from benchmarks.algorithm_families import FAMILIES, members, right_digits
from benchmarks.common import ROOT
from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import RunConfig

BASE_CONFIG = Path(algorithm_curves.ROOT / "configs" / "quickstart_warm.yaml")
MEMBERS = members()


@pytest.fixture(scope="module")
def configs() -> dict[str, RunConfig]:
    """Raises for settings that a run would refuse."""
    runs = Path("runs/algorithm_curves")
    jobs = [algorithm_curves.Job(member, 1, 50, runs) for member in MEMBERS]
    return {
        job.member.name: load_run_config(
            BASE_CONFIG, algorithm_curves.overrides_of(job), with_files=False
        ).config
        for job in jobs
    }


def test_every_algorithm_is_in_some_family(configs: dict[str, RunConfig]) -> None:
    assert {config.algorithm.adv_estimator for config in configs.values()} == set(ADV_ESTIMATORS)
    assert {config.actor.policy_loss.loss_mode for config in configs.values()} == set(POLICY_LOSSES)


def test_a_loss_has_its_own_defaults_not_the_quickstarts(configs: dict[str, RunConfig]) -> None:
    for name, config in configs.items():
        if config.actor.policy_loss.loss_mode != "ppo_clip":
            assert config.actor.policy_loss.params == {}, name


def test_all_runs_have_the_same_samples_and_length(configs: dict[str, RunConfig]) -> None:
    """What makes curves comparable, whatever an algorithm overrides."""
    assert {c.data.train_batch_size * c.rollout.n for c in configs.values()} == {512}
    assert {
        (c.actor.optim.lr, c.trainer.total_training_steps, c.trainer.seed) for c in configs.values()
    } == {(4e-4, 50, 1)}
    assert {c.model.path for c in configs.values()} == {
        str(ROOT / "runs/algorithm_curves/warm-seed1/warm_model")
    }


def test_the_first_of_each_family_runs_before_any_second() -> None:
    assert MEMBERS[: len(FAMILIES)] == [family.members[0] for family in FAMILIES]
    assert len(MEMBERS) == sum(len(family.members) for family in FAMILIES)
    assert [member.name for member in members(("gspo", "grpo"))] == ["gspo", "grpo"]


def test_the_second_reward_counts_digits_in_their_place() -> None:
    assert right_digits(response="052", label="052") == 1
    assert right_digits(response="952", label="052") == pytest.approx(2 / 3)
    assert right_digits(response="05", label="052") == pytest.approx(2 / 3)
    assert right_digits(response="", label="052") == 0


def test_a_row_is_what_a_run_wrote(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "evaluation", "step": 0, "val/accuracy": 0.5},
        {"kind": "step", "step": 1, "reward/part/exact_match": 0.25, "critic/rewards/mean": 1.0},
        {"kind": "step", "step": 2, "reward/part/exact_match": 0.75, "critic/rewards/mean": 1.5},
        {"kind": "evaluation", "step": 2, "val/accuracy": 0.875},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": 12.5}))
    row = algorithm_curves.row_of(algorithm_curves.Job(MEMBERS[0], 3, 2, tmp_path), tmp_path)
    assert (row["accuracy"], row["reward"], row["seconds"]) == (
        [[0, 0.5], [2, 0.875]],
        [0.25, 0.75],
        12.5,
    )


def test_runs_with_other_settings_than_todays_are_not_reused(tmp_path: Path) -> None:
    member = MEMBERS[0]
    row = {
        "name": member.name,
        "seed": 1,
        "steps": 50,
        "overrides": list(member.overrides),
        "cpu_s": 1.0,
    }
    rows = [row, {**row, "seed": 2, "overrides": ["actor.optim.lr=1"]}, {**row, "cpu_s": 2.0}]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert algorithm_curves.read_rows(path, MEMBERS) == [{**row, "cpu_s": 2.0}]
    assert algorithm_curves.read_rows(path, [replace(member, overrides=("other=1",))]) == []


def test_figures_of_the_table() -> None:
    rows = [
        {"accuracy": [[0, 0.5], [50, last]], "reward": [0.25] * 5 + [0.75] * 5, "cpu_s": 40}
        for last in (0.8, 0.9)
    ]
    # Mean 0.85, deviation 0.0707, Student's t with one degree of freedom 12.706: half width 0.635,
    # cut at 0 and 1.
    assert algorithm_page.figures_of(rows) == "0.850 [0.215, 1.000] (2 seeds) | 0.250 to 0.750 | 40"
    assert algorithm_page.figures_of(rows[:1]) == "0.800 (1 seed) | 0.250 to 0.750 | 40"
    assert algorithm_page.smoothed([1, 2, 3, 6], width=2) == [1, 1.5, 2.5, 4.5]


def test_the_page_says_what_the_result_file_says() -> None:
    result = json.loads(algorithm_page.RESULT_FILE.read_text())
    text = algorithm_page.PAGE.read_text()
    assert algorithm_page.page_with(text, result) == text, (
        "python -m benchmarks.algorithm_curves --draw"
    )


def test_what_has_been_run_has_todays_settings() -> None:
    result = json.loads(algorithm_page.RESULT_FILE.read_text())
    ran = {(row["name"], row["seed"], tuple(row["overrides"])) for row in result["runs"]}
    assert ran == {
        (member.name, seed, member.overrides) for member in MEMBERS for seed in (1, 2, 3)
    }


def test_the_figure_is_small() -> None:
    assert 10_000 < algorithm_page.FIGURE.stat().st_size < 300_000
