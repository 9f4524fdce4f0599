"""What is wrong with a named estimator is said at start: unknown names, fields that nobody
computes, lost settings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_samples import VALID

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.algorithm_rules import list_reward_parts, name_reward_term_parts
from rlhf_megatron.config.rules.part_rules import OF_ESTIMATORS
from rlhf_megatron.config.rules.run_rules import has_critic
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import AlgorithmConfig, RewardConfig, RewardTermConfig, RunConfig
from rlhf_megatron.controller.scheduler.algorithm_setup import load_algorithm_setup
from rlhf_megatron.rewards.service.reward_components import load_reward_components

NAMES = [
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "tir_optimal_token_baseline",
]
PARAMS: dict[str, dict[str, Any]] = {"gdpo": {"gdpo_reward_keys": ["exact_match"]}}
GDPO = "algorithm: {adv_estimator: gdpo, params: {gdpo_reward_keys: [exact_match, format]}}"
TERM = "{name: format, params: {pattern: a}}"


def told(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        load_algorithm_setup(config)
    return "\n".join(error.value.problems)


def of(name: str, **params: Any) -> RunConfig:
    config = RunConfig(
        algorithm=AlgorithmConfig(adv_estimator=name, params={**PARAMS.get(name, {}), **params})
    )
    return replace(config, data=replace(config.data, task="addition"))


def test_the_shelf() -> None:
    assert set(NAMES) <= set(ADV_ESTIMATORS)


def test_what_the_configuration_says_of_estimators_is_what_they_need() -> None:
    for name in NAMES:
        needs = ADV_ESTIMATORS.get(name).needs
        assert (ADV_ESTIMATORS.get(name).scope == "group") == ("group_ids" in needs)
        assert has_critic(of(name)) == ("values" in needs)


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_runs_or_is_refused_by_what_it_lacks(name: str) -> None:
    missing = set(ADV_ESTIMATORS.get(name).needs) - OF_ESTIMATORS
    if not missing:
        assert load_algorithm_setup(of(name)).estimator is ADV_ESTIMATORS.get(name).build
        return
    lacks = ", ".join(sorted(missing))
    assert told(of(name)).startswith(
        f"algorithm.adv_estimator={name!r} needs {lacks}, which this run does not compute;"
        " use one of "
    )


def test_an_estimator_of_values_brings_a_critic() -> None:
    @ADV_ESTIMATORS.register("of_values", needs=("token_rewards", "values"))
    def of_values(inputs: Any, params: None) -> None: ...

    @ADV_ESTIMATORS.register("of_nothing_known", needs=("dreams",))
    def of_nothing_known(inputs: Any, params: None) -> None: ...

    try:
        parts = load_algorithm_setup(of("of_values"))
        assert parts.needs_values and parts.needs_token_rewards and has_critic(of("of_values"))
        message = told(of("of_nothing_known"))
        assert (
            "needs dreams, which this run does not compute; use one of" in message
            and "of_nothing" not in message[40:]
        )
    finally:
        del ADV_ESTIMATORS._entries["of_values"], ADV_ESTIMATORS._entries["of_nothing_known"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of("rlo"), "algorithm: unknown advantage estimator 'rlo'. Did you mean 'rloo'?"),
        (of("rloo_vectorized"), "algorithm: unknown advantage estimator 'rloo_vectorized'."),
        (of("rloo", epsilon=1.0),
         (
             "algorithm.params ({'epsilon': 1.0}) must be empty: advantage estimator 'rloo' has"
             " no parameters."
         )),
        (of("gpg", f_norm=0.0), "f_norm (0.0) must be above 0"),
        (of("reinforce_plus_plus", gamma=2.0), "gamma (2.0) must be at least 0 and at most 1"),
        (of("gdpo", gdpo_reward_keys=[]),
         "gdpo_reward_keys ([]) must be distinct names, at least one"),
        (of("gdpo", gdpo_reward_weights=[1.0, 2.0]),
         "gdpo_reward_weights ([1.0, 2.0]) must be one a key (1: exact_match)"),
        (replace(of("gdpo"), algorithm=AlgorithmConfig(adv_estimator="gdpo")),
         "algorithm.params.gdpo_reward_keys"),
    ],
)  # fmt: skip
def test_names_and_parameters(config: RunConfig, expected: str) -> None:
    assert expected in told(config)


@pytest.mark.parametrize(
    ("section", "overrides", "expected"),
    [
        (GDPO + "\nreward: {terms: [" + TERM + "]}", [], None),
        (GDPO + (
            "\nreward: {terms: [{name: function, weight: 0, params: {path: 'a:b'}}, "
        ) + TERM + "]}", [], None),
        (GDPO + "\nreward: {terms: [" + TERM + "]}", ["algorithm.use_kl_in_reward=true"],
         (
             "algorithm.use_kl_in_reward (true) would be ignored: algorithm.adv_estimator gdpo"
             " reads the parts of the reward"
         )),
        (GDPO, [], (
            "algorithm.params.gdpo_reward_keys has 'format', but the rewards of this run are"
            " 'exact_match'; rename 'format', or add a reward of that name to"
            " reward.terms."
        )),
        (GDPO.replace("format",
                      "formt/x") + (
                          "\nreward: {terms: [{name: format, weight: 0, params: {pattern: a}}]}"
                      ), [], (
                          "algorithm.params.gdpo_reward_keys has 'formt/x', but the rewards of this"
                          " run are 'exact_match', 'format'; did you mean 'format'?"
                      )),
        (GDPO + "\nreward: {terms: [" + TERM + ", " + TERM + "]}", [],
         (
             "reward.terms[1].weight (1) of 'format_2' would be ignored:"
             " algorithm.params.gdpo_reward_keys (exact_match, format) does not name it"
         )),
        (GDPO + "\nreward: {terms: [{name: format, weight: 0.5, params: {pattern: a}}]}", [],
         (
             "reward.terms[0].weight (0.5) of 'format' would be ignored: gdpo has weights of its"
             " own; give algorithm.params.gdpo_reward_weights."
         )),
        ("", ["algorithm.adv_estimator=rloo", "rollout.n=1", "actor.mini_batch_size=32"],
         "rollout.n (1) must be at least 2 for algorithm.adv_estimator rloo"),
        ("", ["algorithm.adv_estimator=tir_optimal_token_baseline", "rollout.n=1",
              "actor.mini_batch_size=32"], "rollout.n (1) must be at least 2"),
        ("", ["algorithm.adv_estimator=reinforce_plus_plus_baseline", "rollout.n=1",
              "actor.mini_batch_size=32"], "rollout.n (1) must be at least 2"),
        ("", ["algorithm.adv_estimator=reinforce_plus_plus", "rollout.n=1",
              "actor.mini_batch_size=32"], None),
        ("", ["algorithm.adv_estimator=remax", "rollout.n=1", "actor.mini_batch_size=32"], None),
    ],
)  # fmt: skip
def test_pairs(tmp_path: Path, section: str, overrides: list[str], expected: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID + section)
    found = validate_config(read_run_config(path, overrides))
    assert len(found) == (expected is not None), found
    assert expected is None or found[0].startswith(expected), found


def test_gdpo_weights_stand_for_those_of_the_terms(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    terms = "\nreward: {terms: [{name: format, weight: 0.5, params: {pattern: a}}]}"
    path.write_text(
        VALID + GDPO.replace("params: {", "params: {gdpo_reward_weights: [1.0, 0.5], ") + terms
    )
    assert validate_config(read_run_config(path)) == []


def test_the_names_of_reward_parts_are_those_of_the_scorer() -> None:
    form = RewardTermConfig("format", params={"pattern": "a"})
    config = RewardConfig(
        by_source={"a": RewardTermConfig("math_verify")},
        terms=(form, RewardTermConfig("exact_match"), form, form),
    )
    run = RunConfig(reward=config)
    components = load_reward_components(config)
    assert name_reward_term_parts(run) == [component.part_name for component in components.terms]
    assert list_reward_parts(run) == sorted({component.part_name for component in components})
