"""A configuration against the one before: what is refused, what is recorded, what the
journal depends on.
"""

from dataclasses import replace

import pytest

from rlhf_megatron.config.resume_changes import (
    NOT_USED,
    compare_run_settings,
    compute_settings_digest,
    flatten_config_yaml,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import render_config_yaml


def settings(**changes: str) -> dict[str, str]:
    known = {
        "model.dtype": "float32",
        "actor.optim.lr": "0.001",
        "actor.megatron.tensor_model_parallel_size": "2",
        "algorithm.adv_estimator": "grpo",
        "rollout.num_engines": "1",
        "trainer.seed": "1",
        "trainer.logger": "[jsonl]",
    }
    return {**known, **{key.replace("__", "."): value for key, value in changes.items()}}


def test_nothing_changed() -> None:
    assert compare_run_settings(settings(), settings()).all_changes == {}


def test_a_layout_and_a_learning_rate_are_recorded_with_both_values() -> None:
    now = settings(
        actor__optim__lr="0.002", actor__megatron__tensor_model_parallel_size="1", critic__path="x"
    )
    changes = compare_run_settings(settings(), now)
    assert changes.layout_changes == {"actor.megatron.tensor_model_parallel_size": ("2", "1")}
    assert changes.other_changes == {
        "actor.optim.lr": ("0.001", "0.002"),
        "critic.path": (NOT_USED, "x"),
    }
    assert "actor.optim.lr 0.001 -> 0.002" in str(changes)


def test_what_a_run_keeps_for_life_is_refused_all_at_once() -> None:
    now = settings(model__dtype="bfloat16", algorithm__adv_estimator="gae", actor__optim__lr="1.0")
    with pytest.raises(ValueError) as error:
        compare_run_settings(settings(), now)
    said = str(error.value)
    assert (
        "model.dtype is bfloat16 and was float32" in said
        and "algorithm.adv_estimator is gae and was grpo" in said
    )
    assert "--fresh" in said and "lr" not in said


def test_a_resolved_configuration_is_read_back_setting_by_setting() -> None:
    config = RunConfig()
    config = replace(config, reward=replace(config.reward, params={"pattern": "^(.)", "no": "on"}))
    found = flatten_config_yaml(render_config_yaml(config))
    assert found["reward.params.pattern"] == "^(.)" and found["reward.params.no"] == "'on'"
    assert found["trainer.seed"] == "1" and found["actor.optim.betas"] == "[0.9, 0.95]"
    assert "algorithm.kl_penalty" not in found, "not in use without a KL term in the reward"


@pytest.mark.parametrize(
    ("key", "counts"),
    [
        ("actor__optim__lr", True),
        ("trainer__seed", True),
        ("rollout__temperature", True),
        ("reward__params__pattern", True),
        ("actor__megatron__tensor_model_parallel_size", False),
        ("rollout__num_engines", False),
        ("trainer__logger", False),
    ],
)
def test_what_the_journal_depends_on(key: str, counts: bool) -> None:
    assert (
        compute_settings_digest(settings()) != compute_settings_digest(settings(**{key: "another"}))
    ) == counts


def test_the_journal_of_episodes_depends_on_their_environment() -> None:
    """Without one, nothing of the section counts: journals of before stay usable."""

    def digest(**changed: str) -> str:
        keys = {key.replace("__", "."): value for key, value in changed.items()}
        section = {f"rollout.environment.{key}": value for key, value in keys.items()}
        return compute_settings_digest({**settings(), **section})

    assert digest(name="null", max_turns="8") == compute_settings_digest(settings())
    with_game = digest(name="guess_number", max_turns="8")
    assert with_game != compute_settings_digest(settings())
    assert with_game != digest(name="guess_number", max_turns="9")
    assert with_game != digest(name="guess_number", max_turns="8", params__highest="5")
    assert with_game == digest(
        name="guess_number", max_turns="8", num_workers="9", max_concurrent="9"
    )
