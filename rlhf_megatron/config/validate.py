"""All rules on a configuration, and on the model and files that it points to. Nothing is started for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_megatron.config import (
    algorithm_rules,
    colocation_rules,
    correction_rules,
    critic_rules,
    data_rules,
    engine_rules,
    loss_rules,
    ray_rules,
    reward_rules,
    schedule_rules,
    state_rules,
)
from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.file_rules import file_problems
from rlhf_megatron.config.ignored import ignored
from rlhf_megatron.config.layout_rules import LAYOUT_RULES
from rlhf_megatron.config.model_rules import FAMILIES, model_problems
from rlhf_megatron.config.provenance import DEFAULT, Loaded
from rlhf_megatron.config.ranges import ranges
from rlhf_megatron.config.rules import RULES, world_size
from rlhf_megatron.config.schema import RunConfig

__all__ = ["FAMILIES", "check_world_size", "problems_of", "problems_of_files", "validate", "validate_model"]


def validate(source: RunConfig | Loaded) -> list[str]:
    """What contradicts itself, lies out of range or would be ignored. A Loaded also tells where it was written."""
    return [str(problem) for problem in problems_of(_loaded(source))]


def validate_model(source: RunConfig | Loaded, hf_config: Mapping[str, Any]) -> list[str]:
    """The configuration against the model's parsed config.json."""
    loaded = _loaded(source)
    return [str(_located(loaded, problem)) for problem in model_problems(loaded.config, hf_config)]


def check_world_size(config: RunConfig, actual: int) -> list[str]:
    """`actual`: the number of processes that the launcher started (WORLD_SIZE)."""
    expected = world_size(config)
    if actual == expected:
        return []
    return [
        f"the launcher started {actual} processes (WORLD_SIZE), but trainer.nnodes x n_gpus_per_node is"
        f" {config.trainer.nnodes} x {config.trainer.n_gpus_per_node} = {expected}; start torchrun with"
        f" --nnodes={config.trainer.nnodes} --nproc-per-node={config.trainer.n_gpus_per_node}, or change the settings."
    ]


def problems_of(loaded: Loaded) -> list[Problem]:
    """Of the rules that need no file, with the places where the values were written."""
    found = list(ranges(loaded))
    impossible = {key for problem in found for key in problem.keys}
    sections = (
        algorithm_rules,
        colocation_rules,
        correction_rules,
        critic_rules,
        data_rules,
        engine_rules,
        loss_rules,
        ray_rules,
        reward_rules,
        schedule_rules,
        state_rules,
    )
    of_sections = [rule for section in sections for rule in section.RULES]
    for rule in (*RULES, *LAYOUT_RULES, *of_sections, ignored):  # what is out of range is not complained about twice
        found += [problem for problem in rule(loaded) if impossible.isdisjoint(problem.keys)]
    return [_located(loaded, problem) for problem in found]


def problems_of_files(loaded: Loaded) -> list[Problem]:
    """Of model, tokenizer and data on disk."""
    return [_located(loaded, problem) for problem in file_problems(loaded.config)]


def _loaded(source: RunConfig | Loaded) -> Loaded:
    return source if isinstance(source, Loaded) else Loaded.of(source)


def _located(loaded: Loaded, problem: Problem) -> Problem:
    """The problem with the origins of its keys, as far as somebody wrote them."""
    origins = {key: loaded.origin(key) for key in problem.keys}
    written = [(key, origin) for key, origin in origins.items() if origin is not DEFAULT and origin.source != "code"]
    if problem.where or not written:
        return problem
    if len(problem.keys) == 1:
        return replace(problem, where=str(written[0][1]))
    return replace(problem, where=", ".join(f"{key}: {origin}" for key, origin in written))
