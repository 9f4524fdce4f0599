"""Checks a configuration against all rules, and against the model and files that it points to.
Nothing is started.

A setting that would be ignored is an error, except where a later layer switched off what an
earlier one set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

from rlhf_megatron.config import rollout_correction_rules
from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.key_paths import get_config_value, join_key_path, list_setting_leaves
from rlhf_megatron.config.rules import (
    IDLE_RULES,
    RULES,
    algorithm_rules,
    batch_rules,
    data_rules,
    drop_none,
    engine_machines,
    engine_rules,
    environment_rules,
    expert_rules,
    fsdp_rules,
    model_rules,
    reward_model_rules,
    run_rules,
    schedule_rules,
    supervised_rules,
)
from rlhf_megatron.config.rules.file_rules import find_file_problems
from rlhf_megatron.config.rules.model_rules import find_policy_model_problems
from rlhf_megatron.config.rules.run_rules import GPUS, NODES, compute_world_size, list_pool_layouts
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.schema.setting_fields import Interval
from rlhf_megatron.config.yaml_nodes import DEFAULT, LoadedConfig

_REGISTERED = (
    run_rules,
    batch_rules,
    expert_rules,
    model_rules,
    fsdp_rules,
    reward_model_rules,
    algorithm_rules,
    engine_rules,
    engine_machines,
    rollout_correction_rules,
    data_rules,
    schedule_rules,
    environment_rules,
    supervised_rules,
)
"""Rules register as their file is imported."""


def find_ignored_settings(loaded: LoadedConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each setting that somebody wrote and that nothing reads. Skip a setting
    whose value is null, and a setting that a later layer than its own switched off.
    """
    for is_idle, keys, switch, fix in chain.from_iterable(
        find(loaded.config) for find in IDLE_RULES
    ):
        if not is_idle:
            continue
        for prefix in keys:
            for key in loaded.list_set_keys(prefix):
                try:
                    value = get_config_value(loaded.config, key)
                except KeyError:  # an entry that could not be read, which has a message of its own
                    continue
                if value is not None and loaded.find_origin(key).layer >= loaded.find_layer(switch):
                    yield ConfigProblem(
                        (
                            f"{key} ({_format_value(value)}) would be ignored because {switch} is"
                            f" {_format_value(get_config_value(loaded.config, switch))}; remove"
                            f" {key}, or {fix.replace('{switch}', switch)}."
                        ),
                        (key, switch),
                    )
    for section, megatron, num_ranks in list_pool_layouts(loaded.config):
        yield from _find_useless_sharing_settings(loaded, section, megatron, num_ranks)


def _find_useless_sharing_settings(
    loaded: LoadedConfig, section: str, megatron: MegatronConfig, num_ranks: int
) -> Iterator[ConfigProblem]:
    """Yield a problem for each setting that shards an optimizer or overlaps gradient reduction in a
    pool where each parameter is on one rank only, so that nothing is shared. Context-parallel
    size counts as data-parallel size does. A setting that an older layer wrote than the layout
    did is passed over.
    """
    c = loaded.config
    if (
        num_ranks != megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        or megatron.context_parallel_size != 1
    ):
        return
    sizes = [
        f"{section}.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")
    ]
    of_job = (GPUS, NODES, "algorithm.adv_estimator") if section.startswith("actor") else ()
    # those of other pools are not the actor's
    switches = *of_job, "critic.num_ranks", "reward_model.num_ranks", "reference.num_ranks", *sizes
    for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        key = f"{section}.{name}"
        is_later = loaded.find_origin(key).layer >= max(
            loaded.find_layer(switch) for switch in switches
        )
        if get_config_value(c, key) and is_later:
            yield ConfigProblem(
                (
                    f"{key} (true) would be ignored because data- and context-parallel size are"
                    f" both 1 ({num_ranks} ranks for {section}.tensor_model_parallel_size x"
                    f" pipeline_model_parallel_size = {megatron.tensor_model_parallel_size} x"
                    f" {megatron.pipeline_model_parallel_size}); set {key} to false, or"
                    f" use {2 * num_ranks} ranks."
                ),
                (key, *switches),
            )


def _format_value(value: object) -> str:
    """Return a value as a configuration file would write it; a list of sections only as
    its length.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"a list of {len(value)}"
    return str(list(value) if isinstance(value, tuple) else value)


__all__ = [
    "check_world_size",
    "find_config_problems",
    "list_file_problems",
    "validate_config",
    "validate_model_config",
]


def validate_config(source: RunConfig | LoadedConfig) -> list[str]:
    """Return the problems of a configuration as texts: settings that contradict each other, are out
    of range, or would be ignored. For a LoadedConfig each text also says where the setting was
    written.
    """
    return [str(problem) for problem in find_config_problems(_wrap_config(source))]


def validate_model_config(
    source: RunConfig | LoadedConfig, hf_config: Mapping[str, Any]
) -> list[str]:
    """Return the reasons why a model with this parsed config.json cannot be the policy of this
    configuration, as texts.
    """
    loaded = _wrap_config(source)
    return [
        str(_add_location(loaded, problem))
        for problem in find_policy_model_problems(loaded.config, hf_config)
    ]


def check_world_size(config: RunConfig, num_processes: int) -> list[str]:
    """Return a list with one problem if the launcher started another number of processes
    (WORLD_SIZE) than the configuration needs; else an empty list.
    """
    expected = compute_world_size(config)
    if num_processes == expected:
        return []
    return [
        f"the launcher started {num_processes} processes (WORLD_SIZE), but trainer.nnodes x"
        f" n_gpus_per_node is {config.trainer.nnodes} x {config.trainer.n_gpus_per_node} ="
        f" {expected}; start it with NNODES={config.trainer.nnodes}"
        f" NPROC_PER_NODE={config.trainer.n_gpus_per_node} launch/torchrun.sh (of torchrun:"
        " --nnodes, --nproc-per-node), or change the settings."
    ]


def find_numbers_out_of_range(loaded: LoadedConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each number of the configuration that is outside of its interval in the
    schema, also for numbers in lists and in the entries of lists.
    """
    for key, setting, number, bounds in _list_bounded_numbers(RunConfig, loaded.config):
        if number not in bounds:
            default = (
                f"the default is {_format_value(get_config_value(RunConfig(), setting))}"
                if key == setting
                else "correct it"
            )
            yield ConfigProblem(
                f"{key} ({number}) must be {bounds.violation_message(number)}; {default}.", (key,)
            )


def _list_bounded_numbers(
    cls: type, section: Any, path: str = "", setting: str = ""
) -> Iterator[tuple[str, str, float, Interval]]:
    """Yield (key of the number, key of the setting that is or contains the number, the number, the
    interval in which it must be) for each number of a section of type `cls`, without the parameters
    of parts.
    """
    for leaf in list_setting_leaves(cls):
        key = join_key_path(path, leaf.key)
        value = get_config_value(section, leaf.key)
        items = [(key, value)]
        if isinstance(value, dict):  # of parameters, their own dataclass says what they may be
            items = (
                []
                if leaf.type == dict[str, Any]
                else [(f"{key}.{name}", item) for name, item in value.items()]
            )
        elif isinstance(value, tuple):
            items = [
                (f"{key}[{i}]" if is_dataclass(item) else key, item) for i, item in enumerate(value)
            ]
        for where, item in items:
            if is_dataclass(item):
                yield from _list_bounded_numbers(type(item), item, where, setting or key)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                yield where, setting or key, item, leaf.bounds


def find_config_problems(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Apply all rules that need no file, and return their problems with the places where the values
    were written. A number that is out of range is reported once: the other rules see the default in
    its place.
    """
    found = list(find_numbers_out_of_range(loaded))
    impossible = {key for problem in found for key in problem.keys}
    sane = replace(loaded, config=_replace_by_defaults(loaded.config, RunConfig(), "", impossible))
    for rule in (*RULES, find_ignored_settings):
        found += [
            problem for problem in drop_none(rule(sane)) if impossible.isdisjoint(problem.keys)
        ]
    return [_add_location(loaded, problem) for problem in found]


def _replace_by_defaults(section: Any, default: Any, path: str, keys: Collection[str]) -> Any:
    """Return a copy of the section in which the settings named in `keys` have the values of
    `default`. Settings that are dicts or tuples keep their values.
    """
    changed = {}
    for f in fields(section):
        key = join_key_path(path, f.name)
        value = getattr(section, f.name)
        if is_dataclass(value):
            changed[f.name] = _replace_by_defaults(value, getattr(default, f.name), key, keys)
        elif key in keys and not isinstance(value, dict | tuple):
            changed[f.name] = getattr(default, f.name)
    return replace(section, **changed)


def list_file_problems(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Return the problems of the model, tokenizer and data on disk, with the places where the
    settings were written.
    """
    return [_add_location(loaded, problem) for problem in find_file_problems(loaded.config)]


def _wrap_config(source: RunConfig | LoadedConfig) -> LoadedConfig:
    """Return a LoadedConfig as it is, and a RunConfig as a LoadedConfig without places."""
    return source if isinstance(source, LoadedConfig) else LoadedConfig.from_config(source)


def _add_location(loaded: LoadedConfig, problem: ConfigProblem) -> ConfigProblem:
    """Return the problem with the places where its keys were written; unchanged if the problem has
    a place already, or if nobody wrote its keys.
    """
    origins = {key: loaded.find_origin(key) for key in problem.keys}
    written = [
        (key, origin)
        for key, origin in origins.items()
        if origin is not DEFAULT and origin.source != "code"
    ]
    if problem.location or not written:
        return problem
    if len(problem.keys) == 1:
        return replace(problem, location=str(written[0][1]))
    return replace(problem, location=", ".join(f"{key}: {origin}" for key, origin in written))
