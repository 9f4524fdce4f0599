"""The parts that a configuration names: they must be registered, take its parameters, and get the columns they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.rules import Findings, rule
from rlhf_megatron.config.schema import RolloutConfig, RunConfig, ScheduleConfig
from rlhf_megatron.config.source import Loaded
from rlhf_megatron.config.typed import look_up, params_from_mapping
from rlhf_megatron.plugins import not_loaded
from rlhf_megatron.registry import Entry, parts_of

TP_NAMES = ("tp-size", "tensor-parallel-size", "tp")  # SGLang's
ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor.policy_loss.loss_mode"
OF_ESTIMATORS = {
    *("rewards", "group_ids", "token_rewards", "reward_parts", "greedy_rewards", "values"),
    *("log_probs", "rollout_log_probs", "sum_squares"),
}
"""Columns that a run computes where an estimator needs them. One that needs values brings a critic."""
OF_LOSSES = {
    *("advantages", "old_log_probs", "rollout_log_probs", "entropies", "log_probs", "response_mask"),
    *("is_picked", "sequences"),
}
"""The same for policy losses; with a KL term there is ref_log_probs."""


@dataclass(frozen=True)
class Named:
    """A part, where a configuration names it. `where`: of its section, which has `field` for the parameters."""

    kind: str
    name: str
    key: str  # setting that holds the name
    where: str
    params: Mapping[str, Any] = field(default_factory=dict)
    field: str = "params"


MODEL_PART = "reward_model"  # under which the scores of the section reward_model are a part of a sample's reward


def named_parts(c: RunConfig) -> Iterator[Named]:
    """All of them, in the order of the loop."""
    tasks = [("data", c.data.task, c.data.task_params)]
    tasks += [(f"data.sources[{i}]", source.task, source.task_params) for i, source in enumerate(c.data.sources)]
    for where, task, task_params in tasks:
        if task is not None:
            key = "data.sources" if "[" in where else "data.task"
            yield Named("task", task, key, where, task_params, "task_params")
    yield Named("reward", c.reward.name, "reward.name", "reward", c.reward.params)
    for source_name, one in c.reward.by_source.items():
        yield Named("reward", one.name, "reward.by_source", f"reward.by_source.{source_name}", one.params)
    for i, term in enumerate(c.reward.terms):
        yield Named("reward", term.name, "reward.terms", f"reward.terms[{i}]", term.params)
    served = c.reward_model.served
    if served.judge is not None:
        params = {"servers": [{"url": "http://127.0.0.1"}], **served.judge}
        yield Named("reward", "llm_judge", "reward_model.served.judge", "reward_model.served", params, "judge")
    yield Named("advantage estimator", c.algorithm.adv_estimator, ESTIMATOR, "algorithm", c.algorithm.params)
    loss = c.actor.policy_loss
    yield Named("policy loss", loss.loss_mode, LOSS, "actor.policy_loss", loss.params)
    teacher = c.actor.distillation
    if c.job == "train" and teacher.loss_mode is not None:
        where = "actor.distillation"
        yield Named("distillation loss", teacher.loss_mode, f"{where}.loss_mode", where, teacher.params)
    for section, mode in (("actor", c.actor.loss_agg_mode), ("critic", c.critic.loss_agg_mode)):
        if mode is not None:
            yield Named("aggregation", mode, f"{section}.loss_agg_mode", f"{section}.loss_agg_mode")
    if c.job != "train" and c.sft.loss_mode != "sft":
        kind = "distillation loss" if c.sft.loss_mode in parts_of("distillation loss") else "preference loss"
        yield Named(kind, c.sft.loss_mode, "sft.loss_mode", "sft", c.sft.params)
    for logger in c.trainer.logger:
        yield Named("logger", logger, "trainer.logger", "trainer.logger")
    yield Named("engine", c.rollout.engine, "rollout.engine", "rollout.engine")
    yield Named("balancer", c.rollout.router, "rollout.router", "rollout.router")
    yield Named("schedule", c.schedule.name, "schedule.name", "schedule", c.schedule.params)


@rule
def parts(loaded: Loaded) -> Findings:
    """Unknown names, wrong parameters, and needs that no run can meet."""
    c = loaded.config
    for one in named_parts(c):
        registry = parts_of(one.kind)
        if one.name not in registry and not_loaded(c.plugins):
            continue  # a plugin that was not run may have it
        told: list[str] = []
        entry, _ = look_up(registry, one.name, one.params, one.where, told, one.field)
        if entry is not None:
            told += _missing(c, one, entry)
        yield from (Problem(text, (one.key,)) for text in told)


def unchecked(c: RunConfig) -> list[Named]:
    """Parts that only a plugin which was not run can have."""
    return [one for one in named_parts(c) if not_loaded(c.plugins) and one.name not in parts_of(one.kind)]


def _missing(c: RunConfig, one: Named, entry: Entry[Any]) -> Iterator[str]:
    """Columns that an estimator or a loss needs and this run does not compute."""
    if one.key == ESTIMATOR:
        provided, usable = OF_ESTIMATORS, parts_of(one.kind)
        if missing := ", ".join(sorted(set(entry.needs) - provided)):
            names = ", ".join(name for name in usable if set(usable.get(name).needs) <= provided)
            yield f"{one.key}={one.name!r} needs {missing}, which this run does not compute; use one of {names}."
    elif one.key == LOSS:
        has_reference = c.actor.use_kl_loss or c.algorithm.use_kl_in_reward
        for need in sorted(set(entry.needs) - OF_LOSSES - ({"ref_log_probs"} if has_reference else set())):
            yield f"{one.key}={one.name!r} needs {need}, which this run does not compute."


def entry_of(kind: str, name: str) -> Entry[Any] | None:
    """Find a registered part; None for an unknown name, which `parts` reports."""
    return parts_of(kind).find(name)


def params_of(kind: str, name: str, params: Mapping[str, Any]) -> Any:
    """The parameters of a part as its dataclass, for rules that read them; None where that is not possible."""
    entry = entry_of(kind, name)
    try:
        return params_from_mapping(entry.params, params, "") if entry is not None and entry.params is not None else None
    except ConfigError:
        return None


def reads(rollout: RolloutConfig, setting: str) -> bool:
    """Whether the run's engine has a setting that not every engine has."""
    entry = entry_of("engine", rollout.engine)
    return entry is not None and setting in entry.build.settings


def server_number(arguments: Mapping[str, Any], *names: str) -> int:
    """Return a whole number from the arguments of a server, by any of its names with dashes; 1: there is none, or
    something else, which the server's own check tells."""
    given = {name.replace("_", "-"): value for name, value in arguments.items()}
    value = next((given[name] for name in names if given.get(name) is not None), 1)
    return int(str(value)) if str(value).isdecimal() and int(str(value)) else 1


def num_ranks(rollout: RolloutConfig) -> int:
    """Return the number of ranks of an engine."""
    return server_number(rollout.sglang.args, *TP_NAMES) if reads(rollout, "rollout.sglang") else 1


def num_parts(rollout: RolloutConfig) -> int:
    """Return the number of machines that an engine of the run spans: of its parts."""
    return server_number(rollout.sglang.args, "nnodes") if reads(rollout, "rollout.sglang") else 1


def schedule_of(section: ScheduleConfig) -> Any:
    """The schedule as an object; None where it cannot be made."""
    entry = entry_of("schedule", section.name)
    if entry is None or entry.params is not None:
        return params_of("schedule", section.name, section.params)  # it is its own dataclass of parameters
    return entry.build()
