"""Rules of the section `rollout.environment`: what episodes of several turns go with."""

from __future__ import annotations

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
)
from rlhf_megatron.config.rules.part_rules import find_registered_part
from rlhf_megatron.config.rules.schedule_rules import (
    does_schedule_take_turns,
    list_turn_taking_schedules,
)
from rlhf_megatron.config.schema import EnvironmentConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

SECTION = "rollout.environment"
NAME = f"{SECTION}.name"
MIN_GROUP = f"{SECTION}.min_group"


def are_labels_for_scorers(environment: EnvironmentConfig) -> bool:
    """Return whether the section `reward` judges every sample by its row's label. An environment
    that rewards its episodes reads labels in its own way, or not at all.
    """
    return environment.name is None or environment.scorer_weight > 0


@register_idle_rule
def list_idle_environment_settings(config: RunConfig) -> tuple[IdleSettings, ...]:
    """Return the settings of episodes, which nothing reads where a sample is one answer."""
    keys = (
        "params",
        "max_turns",
        "max_tokens",
        "timeout_s",
        "num_workers",
        "max_concurrent",
        "min_group",
        "history",
        "on_overflow",
        "reward_weight",
        "scorer_weight",
    )
    is_idle = config.rollout.environment.name is None
    settings = tuple(f"{SECTION}.{key}" for key in keys)
    return ((is_idle, settings, NAME, "name an environment in {switch}"),)


@register_rl_rule
def check_episode_sizes(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if a group could never close, or an episode has no room for a turn."""
    c = loaded.config
    environment = c.rollout.environment
    if environment.name is None:
        return
    least = environment.min_group
    yield make_problem_if(
        least is not None and not 1 <= least <= c.rollout.n,
        (
            f"{MIN_GROUP} ({least}) must be between 1 and rollout.n ({c.rollout.n}), the episodes"
            " of a prompt; lower it, or leave it null."
        ),
        (MIN_GROUP, "rollout.n"),
    )
    yield make_problem_if(
        environment.max_tokens is not None and environment.max_tokens < c.data.max_response_length,
        (
            f"{SECTION}.max_tokens ({environment.max_tokens}) must be at least"
            f" data.max_response_length ({c.data.max_response_length}), the tokens of one turn;"
            " raise it, or lower data.max_response_length."
        ),
        (f"{SECTION}.max_tokens", "data.max_response_length"),
    )


@register_rl_rule
def check_episode_partners(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each part of a run that knows samples of one answer only."""
    c = loaded.config
    if c.rollout.environment.name is None:
        return
    yield make_problem_if(
        not does_schedule_take_turns(c.schedule),
        (
            f"{NAME} ({c.rollout.environment.name}) needs a schedule in which engines and trainer"
            f" take turns, and schedule.name is {c.schedule.name}; set schedule.name:"
            f" {list_turn_taking_schedules()}."
        ),
        (NAME, "schedule.name"),
    )
    estimator = find_registered_part("advantage estimator", c.algorithm.adv_estimator)
    refused: tuple[tuple[bool, str, str], ...] = (
        (
            estimator is not None and "greedy_rewards" in estimator.needs,
            "algorithm.adv_estimator",
            f"{c.algorithm.adv_estimator}, which compares with greedy samples; use another one",
        ),
        (c.actor.router_replay == "r3", "actor.router_replay", "r3; use r2 or none"),
        (
            c.actor.distillation.loss_mode is not None,
            "actor.distillation.loss_mode",
            f"{c.actor.distillation.loss_mode}; leave it null",
        ),
    )
    for is_refused, setting, value in refused:
        yield make_problem_if(
            is_refused,
            f"{NAME} ({c.rollout.environment.name}) does not work with {setting} ({value}).",
            (NAME, setting),
        )


@register_rl_rule
def check_deterministic_environment(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if deterministic mode is on with an environment that does not declare to be a
    function of task, seed and answers, or with groups that close early.
    """
    c = loaded.config
    environment = c.rollout.environment
    if environment.name is None or not c.trainer.deterministic:
        return
    entry = find_registered_part("environment", environment.name)
    if entry is not None and not entry.build.is_deterministic:
        yield ConfigProblem(
            (
                f"trainer.deterministic (true) cannot hold with {NAME} ({environment.name}), which"
                " does not declare is_deterministic: that an episode is a function of its task,"
                " its seed and the policy's answers; declare it if that is so, or set"
                " trainer.deterministic: false."
            ),
            (NAME, "trainer.deterministic"),
        )
    if environment.min_group is not None and environment.min_group < c.rollout.n:
        yield ConfigProblem(
            (
                f"trainer.deterministic (true) cannot hold with {MIN_GROUP}"
                f" ({environment.min_group}) below rollout.n ({c.rollout.n}): which episodes are"
                f" aborted depends on time; leave {MIN_GROUP} null."
            ),
            (MIN_GROUP, "trainer.deterministic"),
        )
