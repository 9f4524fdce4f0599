"""Checks a configuration against all rules, and against the model and files that it points to. Nothing is started.

A setting that would be ignored is an error, except where a later layer switched off what an earlier one set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

from rlhf_megatron.config import correction
from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.keys import join, leaves, value_of
from rlhf_megatron.config.rules import (
    IDLE_RULES,
    RULES,
    algorithm,
    batches,
    data,
    engines,
    fsdp,
    machines,
    model,
    reward_model,
    run,
    schedule,
    sft,
    told,
)
from rlhf_megatron.config.rules.files import file_problems
from rlhf_megatron.config.rules.model import model_problems
from rlhf_megatron.config.rules.run import GPUS, NODES, megatron_sections, world_size
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.schema.fields import Interval
from rlhf_megatron.config.source import DEFAULT, Loaded

_REGISTERED = (
    run,
    batches,
    model,
    fsdp,
    reward_model,
    algorithm,
    engines,
    machines,
    correction,
    data,
    schedule,
    sft,
)
"""Rules register as their file is imported."""


def ignored(loaded: Loaded) -> Iterator[Problem]:
    """One problem for each setting that somebody wrote and nothing will read. null asks for nothing."""
    for is_idle, keys, switch, fix in chain.from_iterable(find(loaded.config) for find in IDLE_RULES):
        if not is_idle:
            continue
        for prefix in keys:
            for key in loaded.set_keys(prefix):
                try:
                    value = value_of(loaded.config, key)
                except KeyError:  # an entry that could not be read, which has a message of its own
                    continue
                if value is not None and loaded.origin(key).layer >= loaded.layer(switch):
                    yield Problem(
                        f"{key} ({_show(value)}) would be ignored because {switch} is"
                        f" {_show(value_of(loaded.config, switch))}; remove it, or {fix}.",
                        (key, switch),
                    )
    for section, megatron, num_ranks in megatron_sections(loaded.config):
        yield from _nothing_to_share(loaded, section, megatron, num_ranks)


def _nothing_to_share(loaded: Loaded, section: str, m: MegatronConfig, num_ranks: int) -> Iterator[Problem]:
    """Optimizer shards, and gradients to be reduced, where one rank alone trains each parameter."""
    c = loaded.config
    if num_ranks != m.tensor_model_parallel_size * m.pipeline_model_parallel_size or m.context_parallel_size != 1:
        return
    sizes = [f"{section}.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")]
    of_job = (GPUS, NODES, "algorithm.adv_estimator") if section.startswith("actor") else ()
    switches = (
        *of_job,
        "critic.num_ranks",
        "reward_model.num_ranks",
        "reference.num_ranks",
        *sizes,
    )  # those of other pools are not the actor's
    for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        key = f"{section}.{name}"
        is_later = loaded.origin(key).layer >= max(loaded.layer(switch) for switch in switches)
        if value_of(c, key) and is_later:
            yield Problem(
                f"{key} (true) would be ignored because data- and context-parallel size are both 1"
                f" ({num_ranks} ranks for {section}.tensor_model_parallel_size x pipeline_model_parallel_size ="
                f" {m.tensor_model_parallel_size} x {m.pipeline_model_parallel_size}); set it to false, or use"
                f" {2 * num_ranks} ranks.",
                (key, *switches),
            )


def _show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"a list of {len(value)}"
    return str(list(value) if isinstance(value, tuple) else value)


__all__ = ["check_world_size", "problems_of", "problems_of_files", "validate", "validate_model"]


def validate(source: RunConfig | Loaded) -> list[str]:
    """List settings that contradict each other, lie out of range or would be ignored. Given a Loaded, each problem says
    where the setting was written.
    """
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
        f" {config.trainer.nnodes} x {config.trainer.n_gpus_per_node} = {expected}; start it with"
        f" NNODES={config.trainer.nnodes} NPROC_PER_NODE={config.trainer.n_gpus_per_node} launch/torchrun.sh (of"
        " torchrun: --nnodes, --nproc-per-node), or change the settings."
    ]


def ranges(loaded: Loaded) -> Iterator[Problem]:
    """Every number, also in a list or an entry of one, against its interval in the schema."""
    for key, setting, number, bounds in _numbers(RunConfig, loaded.config):
        if number not in bounds:
            default = f"the default is {_show(value_of(RunConfig(), setting))}" if key == setting else "correct it"
            yield Problem(f"{key} ({number}) must be {bounds.told(number)}; {default}.", (key,))


def _numbers(cls: type, section: Any, path: str = "", setting: str = "") -> Iterator[tuple[str, str, float, Interval]]:
    """(key of a number, the setting that it is or stands in, the number, where it must lie)"""
    for leaf in leaves(cls):
        key, value = join(path, leaf.key), value_of(section, leaf.key)
        items = [(key, value)]
        if isinstance(value, dict):  # of parameters, their own dataclass says what they may be
            items = [] if leaf.type == dict[str, Any] else [(f"{key}.{name}", item) for name, item in value.items()]
        elif isinstance(value, tuple):
            items = [(f"{key}[{i}]" if is_dataclass(item) else key, item) for i, item in enumerate(value)]
        for where, item in items:
            if is_dataclass(item):
                yield from _numbers(type(item), item, where, setting or key)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                yield where, setting or key, item, leaf.bounds


def problems_of(loaded: Loaded) -> list[Problem]:
    """Apply all rules that need no file; a problem names the place where the value was written.

    What is out of range is not complained about twice: the other rules see the default in its place.
    """
    found = list(ranges(loaded))
    impossible = {key for problem in found for key in problem.keys}
    sane = replace(loaded, config=_with_defaults(loaded.config, RunConfig(), "", impossible))
    for rule in (*RULES, ignored):
        found += [problem for problem in told(rule(sane)) if impossible.isdisjoint(problem.keys)]
    return [_located(loaded, problem) for problem in found]


def _with_defaults(section: Any, default: Any, path: str, keys: Collection[str]) -> Any:
    """The section with `default`'s values for those keys that are numbers."""
    changed = {}
    for f in fields(section):
        key, value = join(path, f.name), getattr(section, f.name)
        if is_dataclass(value):
            changed[f.name] = _with_defaults(value, getattr(default, f.name), key, keys)
        elif key in keys and not isinstance(value, dict | tuple):
            changed[f.name] = getattr(default, f.name)
    return replace(section, **changed)


def problems_of_files(loaded: Loaded) -> list[Problem]:
    """List problems of the model, tokenizer and data on disk."""
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
