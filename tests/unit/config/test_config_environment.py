"""What episodes with an environment go with, and what is refused with the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from game_of_chance import GAME_OF_CHANCE, register_game_of_chance
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.batch_rules import compute_episode_tokens, compute_longest_rollout
from rlhf_megatron.config.rules.validate import validate_config

GAME = ROOT / "configs" / "quickstart_game.yaml"


@pytest.fixture(autouse=True)
def game_of_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    register_game_of_chance(monkeypatch)


def list_problems(*overrides: str) -> list[str]:
    return [str(problem) for problem in validate_config(read_run_config(GAME, overrides))]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.deterministic=true"],
        ["algorithm.adv_estimator=gae"],
        ["algorithm.adv_estimator=rloo"],
        ["actor.use_kl_loss=true"],
        ["algorithm.filter_groups.enable=true"],
        ["algorithm.pf_ppo.enable=true"],
        ["rollout.environment.min_group=8"],
        ["rollout.environment.scorer_weight=0.5", "reward.name=exact_match"],
        ["algorithm.rollout_correction.rollout_is=token"],
        ["rollout.num_engines=2", "rollout.num_drivers=2"],
    ],
    ids=lambda overrides: " ".join(overrides) or "as it is",
)
def test_what_episodes_go_with(overrides: list[str]) -> None:
    assert list_problems(*overrides) == []


REFUSED = {
    "another schedule": (["schedule.name=one_step_off"], "needs a schedule in which"),
    "greedy baselines": (["algorithm.adv_estimator=remax"], "compares with greedy samples"),
    "routes of engines": (["actor.router_replay=r3"], r"r3; use r2 or none"),
    "teachers": (["actor.distillation.loss_mode=k1"], "actor.distillation.loss_mode"),
    "groups that never close": (["rollout.environment.min_group=17"], r"between 1 and rollout.n"),
    "no room for a turn": (["rollout.environment.max_tokens=2"], r"max_tokens \(2\) must be"),
    "chance": (
        ["trainer.deterministic=true", f"rollout.environment.name={GAME_OF_CHANCE}"],
        "does not declare is_deterministic",
    ),
    "early groups": (
        ["trainer.deterministic=true", "rollout.environment.min_group=8"],
        "which episodes are aborted depends on time",
    ),
    "an unknown name": (["rollout.environment.name=guess_numbr"], "guess_number"),
    "a wrong parameter": (["rollout.environment.params.highst=5"], "highst.*highest"),
    "settings without an environment": (
        ["rollout.environment.name=null", "rollout.environment.max_turns=5"],
        "rollout.environment.max_turns .* would be ignored",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    problems = "\n".join(list_problems(*overrides))
    assert re.search(message, problems), problems


def test_the_longest_sample_is_a_whole_episode() -> None:
    """Engines and micro-batches are sized by it."""
    config = read_run_config(GAME, []).config
    assert compute_longest_rollout(config) == 9 + 11
    without = read_run_config(GAME, ["rollout.environment.max_tokens=null"]).config
    assert compute_episode_tokens(without.rollout.environment, without.data) == 3 * 3
    [problem] = list_problems("actor.ppo_max_token_len_per_gpu=16")
    assert "data.max_prompt_length + rollout.environment.max_tokens (9 + 11 = 20" in problem


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_labels_are_for_the_environment_unless_scorers_count(weight: float, tmp_path: Path) -> None:
    """The default reward could score no answer with an empty label."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": ""}\n')
    settings = [
        "data.task=null",
        f"data.train_files=[{rows}]",
        f"data.val_files=[{rows}]",
        "warmup.max_steps=0",
        "rollout.environment.name=guess_number",
        f"rollout.environment.scorer_weight={weight}",
    ]
    code = main(["config", "check", str(GAME), *settings])
    assert code == (0 if weight == 0 else 2)
