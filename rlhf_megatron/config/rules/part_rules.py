"""The parts that a configuration names: they must be registered, take its parameters, and get the
columns they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.rules import OptionalProblems, register_rule
from rlhf_megatron.config.schema import RolloutConfig, RunConfig, ScheduleConfig
from rlhf_megatron.config.type_conversion import build_params, resolve_part
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.plugins import find_unloaded_plugins
from rlhf_megatron.registry import RegistryEntry, load_registry

TP_NAMES = ("tp-size", "tensor-parallel-size", "tp")  # SGLang's
ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor.policy_loss.loss_mode"
OF_ESTIMATORS = {
    *("rewards", "group_ids", "token_rewards", "reward_parts", "greedy_rewards", "values"),
    *("log_probs", "rollout_log_probs", "sum_squares"),
}
"""Columns that a run computes where an estimator needs them.
One that needs values brings a critic.
"""
OF_LOSSES = {
    *(
        "advantages",
        "old_log_probs",
        "rollout_log_probs",
        "entropies",
        "log_probs",
        "response_mask",
    ),
    *("is_picked", "sequences"),
}
"""The same for policy losses; with a KL term there is ref_log_probs."""

# under which the scores of the section reward_model are a part of a sample's reward
MODEL_PART = "reward_model"
# under which the main reward, before its weight, is a part where more is in a sample's reward
MAIN_REWARD = "main_reward"
NO_MAIN_REWARD = "zero"  # the registered reward with which terms or a reward model say all


@dataclass(frozen=True)
class NamedPart:
    """A registered part that a configuration names: its kind, its name, and its parameters.
    `section_path` is the path of the section that names the part, and `field` is the key of the
    parameters in that section.
    """

    kind: str
    name: str
    key: str  # setting that holds the name
    section_path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    field: str = "params"


def list_named_parts(config: RunConfig) -> Iterator[NamedPart]:
    """Yield a NamedPart for each registered part that the configuration names, in the order of the
    loop: tasks, rewards and judge, estimator, losses, aggregations, loggers, engine, balancer and
    schedule.
    """
    tasks = [("data", config.data.task, config.data.task_params)]
    tasks += [
        (f"data.sources[{i}]", source.task, source.task_params)
        for i, source in enumerate(config.data.sources)
    ]
    for where, task, task_params in tasks:
        if task is not None:
            key = "data.sources" if "[" in where else "data.task"
            yield NamedPart("task", task, key, where, task_params, "task_params")
    yield NamedPart("reward", config.reward.name, "reward.name", "reward", config.reward.params)
    for source_name, one in config.reward.by_source.items():
        yield NamedPart(
            "reward", one.name, "reward.by_source", f"reward.by_source.{source_name}", one.params
        )
    for i, term in enumerate(config.reward.terms):
        yield NamedPart("reward", term.name, "reward.terms", f"reward.terms[{i}]", term.params)
    served = config.reward_model.served
    if served.judge is not None:
        params = {"servers": [{"url": "http://127.0.0.1"}], **served.judge}
        yield NamedPart(
            "reward",
            "llm_judge",
            "reward_model.served.judge",
            "reward_model.served",
            params,
            "judge",
        )
    yield NamedPart(
        "advantage estimator",
        config.algorithm.adv_estimator,
        ESTIMATOR,
        "algorithm",
        config.algorithm.params,
    )
    loss = config.actor.policy_loss
    yield NamedPart("policy loss", loss.loss_mode, LOSS, "actor.policy_loss", loss.params)
    teacher = config.actor.distillation
    if config.job == "train" and teacher.loss_mode is not None:
        where = "actor.distillation"
        yield NamedPart(
            "distillation loss", teacher.loss_mode, f"{where}.loss_mode", where, teacher.params
        )
    for section, mode in (
        ("actor", config.actor.loss_agg_mode),
        ("critic", config.critic.loss_agg_mode),
    ):
        if mode is not None:
            yield NamedPart(
                "aggregation", mode, f"{section}.loss_agg_mode", f"{section}.loss_agg_mode"
            )
    if config.job != "train" and config.sft.loss_mode != "sft":
        kind = (
            "distillation loss"
            if config.sft.loss_mode in load_registry("distillation loss")
            else "preference loss"
        )
        yield NamedPart(kind, config.sft.loss_mode, "sft.loss_mode", "sft", config.sft.params)
    for logger in config.trainer.logger:
        yield NamedPart("logger", logger, "trainer.logger", "trainer.logger")
    yield NamedPart("engine", config.rollout.engine, "rollout.engine", "rollout.engine")
    yield NamedPart("balancer", config.rollout.router, "rollout.router", "rollout.router")
    environment = config.rollout.environment
    if environment.name is not None:
        where = "rollout.environment"
        yield NamedPart("environment", environment.name, f"{where}.name", where, environment.params)
    yield NamedPart(
        "schedule", config.schedule.name, "schedule.name", "schedule", config.schedule.params
    )


@register_rule
def check_named_parts(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each part that the configuration names and that is not registered, has
    wrong parameters, or needs columns that no run computes. Skip unknown names while a plugin is
    not loaded, since the plugin may register them.
    """
    c = loaded.config
    for one in list_named_parts(c):
        registry = load_registry(one.kind)
        if one.name not in registry and find_unloaded_plugins(c.plugins):
            continue  # a plugin that was not run may have it
        told: list[str] = []
        entry, _ = resolve_part(registry, one.name, one.params, one.section_path, told, one.field)
        if entry is not None:
            told += _find_missing_columns(c, one, entry)
        yield from (ConfigProblem(text, (one.key,)) for text in told)


def list_unchecked_parts(config: RunConfig) -> list[NamedPart]:
    """Return the parts that the configuration names and that are not registered, if a plugin was
    not loaded and may register them; else an empty list.
    """
    return [
        one
        for one in list_named_parts(config)
        if find_unloaded_plugins(config.plugins) and one.name not in load_registry(one.kind)
    ]


def _find_missing_columns(
    config: RunConfig, part: NamedPart, entry: RegistryEntry[Any]
) -> Iterator[str]:
    """Yield a text for the columns that an advantage estimator or a policy loss needs and that this
    run does not compute. Other kinds of parts have no such needs.
    """
    if part.key == ESTIMATOR:
        provided = OF_ESTIMATORS
        usable = load_registry(part.kind)
        if missing := ", ".join(sorted(set(entry.needs) - provided)):
            names = ", ".join(name for name in usable if set(usable.get(name).needs) <= provided)
            yield (
                f"{part.key}={part.name!r} needs {missing}, which this run does not compute; use"
                f" one of {names}."
            )
    elif part.key == LOSS:
        has_reference = config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
        for need in sorted(
            set(entry.needs) - OF_LOSSES - ({"ref_log_probs"} if has_reference else set())
        ):
            yield f"{part.key}={part.name!r} needs {need}, which this run does not compute."


def find_registered_part(kind: str, name: str) -> RegistryEntry[Any] | None:
    """Return the registry entry of a part, or None for an unknown name, which `check_named_parts`
    reports.
    """
    return load_registry(kind).find(name)


def try_build_params(kind: str, name: str, params: Mapping[str, Any]) -> Any:
    """Return the parameters of a part as an instance of its dataclass, for rules that read them;
    None where the part is unknown, has no parameters, or the parameters are wrong.
    """
    entry = find_registered_part(kind, name)
    try:
        return (
            build_params(entry.params, params, "")
            if entry is not None and entry.params is not None
            else None
        )
    except ConfigError:
        return None


def has_engine_setting(rollout: RolloutConfig, setting: str) -> bool:
    """Return whether the engine that the run uses reads this setting; each kind of engine lists the
    settings of its own.
    """
    entry = find_registered_part("engine", rollout.engine)
    return entry is not None and setting in entry.build.setting_keys


def parse_server_number(server_arguments: Mapping[str, Any], argument_names: Sequence[str]) -> int:
    """Return a whole number from the arguments of a server, given under any of `argument_names`
    (with dashes). Return 1 where the number is absent or is no positive whole number; the server's
    own check reports that.
    """
    given = {name.replace("_", "-"): value for name, value in server_arguments.items()}
    value = next((given[name] for name in argument_names if given.get(name) is not None), 1)
    return int(str(value)) if str(value).isdecimal() and int(str(value)) else 1


def count_ranks_per_engine(rollout: RolloutConfig) -> int:
    """Return the number of tensor-parallel ranks of one engine; 1 for engines other than SGLang."""
    return (
        parse_server_number(rollout.sglang.args, TP_NAMES)
        if has_engine_setting(rollout, "rollout.sglang")
        else 1
    )


def count_machines_per_engine(rollout: RolloutConfig) -> int:
    """Return the number of machines that one engine spans, which is the number of its parts; 1 for
    engines other than SGLang.
    """
    return (
        parse_server_number(rollout.sglang.args, ("nnodes",))
        if has_engine_setting(rollout, "rollout.sglang")
        else 1
    )


def build_schedule(section: ScheduleConfig) -> Any:
    """Return the schedule that the section names, as an object; None where the name is unknown or
    its parameters are wrong.
    """
    entry = find_registered_part("schedule", section.name)
    if entry is None or entry.params is not None:
        # it is its own dataclass of parameters
        return try_build_params("schedule", section.name, section.params)
    return entry.build()
