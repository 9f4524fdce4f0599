"""All rules on a configuration, and on the model and files that it points to. Nothing is started for them.

Also: Settings that would be ignored. Each is an error, except where a later layer switched off what an earlier
one set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from itertools import chain
from typing import Any

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.keys import value_of
from rlhf_megatron.config.rules import algorithm, correction, data, engines, ray, run, schedule
from rlhf_megatron.config.rules.files import file_problems
from rlhf_megatron.config.rules.model import FAMILIES, LAYOUT_RULES, model_problems
from rlhf_megatron.config.rules.ranges import ranges
from rlhf_megatron.config.rules.run import GPUS, NODES, megatron_sections, needs_reference, world_size
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.source import DEFAULT, Loaded

ALL_RULES = (
    *run.RULES,
    *LAYOUT_RULES,
    *algorithm.ALGORITHM_RULES,
    *engines.COLOCATION_RULES,
    *correction.CORRECTION_RULES,
    *algorithm.CRITIC_RULES,
    *data.DATA_RULES,
    *engines.ENGINE_RULES,
    *algorithm.LOSS_RULES,
    *ray.RAY_RULES,
    *data.REWARD_RULES,
    *schedule.SCHEDULE_RULES,
    *run.STATE_RULES,
)
IDLE_SETTINGS = (
    algorithm.idle_algorithm_settings,
    correction.idle_correction_settings,
    algorithm.idle_critic_settings,
    data.idle_data_settings,
    engines.idle_engine_settings,
    algorithm.idle_loss_settings,
    ray.idle_ray_settings,
    data.idle_reward_settings,
    schedule.idle_schedule_settings,
    run.idle_state_settings,
)
FILE_KEYS = ("data.prompt_key", "data.label_key", "data.skip_bad_rows")


def ignored(loaded: Loaded) -> Iterator[Problem]:
    """One problem for each setting that somebody wrote and nothing will read. null asks for nothing."""
    by_section = (idle(loaded.config) for idle in IDLE_SETTINGS)
    for is_idle, keys, switch, fix in chain(_idle_settings(loaded), *by_section):
        if not is_idle:
            continue
        for prefix in keys:
            for key in loaded.set_keys(prefix):
                value = value_of(loaded.config, key)
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
    switches = (*of_job, "critic.num_ranks", *sizes)  # ranks of the critic are not the actor's
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


def _idle_settings(loaded: Loaded) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    c = loaded.config
    of_loss = ("actor.kl_loss_coef", "actor.kl_loss_type")
    yield not c.actor.use_kl_loss, of_loss, "actor.use_kl_loss", "set it to true"
    fix = "set it or algorithm.use_kl_in_reward to true"
    yield not needs_reference(c), ("reference",), "actor.use_kl_loss", fix
    yield c.rollout.engine != "sglang", ("rollout.sglang",), "rollout.engine", "set that to sglang"
    local_only = ("rollout.max_num_seqs", "rollout.max_num_batched_tokens")
    fix = "use rollout.sglang.args: {max_running_requests: ..., max_total_tokens: ...}"
    yield c.rollout.engine == "sglang", local_only, "rollout.engine", fix
    yield c.data.task is not None, FILE_KEYS, "data.task", "use files (task: null)"
    yield c.data.task is None, ("data.task_params",), "data.task", "name a task"
    warmup = ("batch_size", "stop_accuracy", "test_freq", "test_samples", "save_hf", "optim")
    keys = tuple(f"warmup.{name}" for name in warmup)
    yield c.warmup.max_steps == 0, keys, "warmup.max_steps", "give that a number of steps"
    for section, optim in (("actor", c.actor.optim), ("warmup", c.warmup.optim), ("critic", c.critic.optim)):
        keys = (f"{section}.optim.min_lr", f"{section}.optim.lr_decay_steps")
        switch = f"{section}.optim.lr_decay_style"
        yield optim.lr_decay_style == "constant", keys, switch, "choose a style that decays"
    is_float32 = c.model.dtype == "float32" and c.rollout.dtype in (None, "float32")
    bounds = tuple(f"checks.log_prob_{name}" for name in ("p50_abs_diff", "p99_abs_diff", "mean_kl"))
    yield is_float32, bounds, "model.dtype", "bound checks.log_prob_max_abs_diff, which float32 is held to"
    decides = "model.dtype" if c.model.dtype == "bfloat16" else "rollout.dtype"
    fix = "bound checks.log_prob_p50_abs_diff, log_prob_p99_abs_diff and log_prob_mean_kl, which bfloat16 is held to"
    yield not is_float32, ("checks.log_prob_max_abs_diff",), decides, fix
    for section, m, _ in megatron_sections(c):
        granularity = f"{section}.recompute_granularity"
        of_full = (f"{section}.recompute_method", f"{section}.recompute_num_layers")
        yield m.recompute_granularity != "full", of_full, granularity, "set that to full"
        of_selective = (f"{section}.recompute_modules",)
        yield m.recompute_granularity != "selective", of_selective, granularity, "set that to selective"
    is_never = c.trainer.test_freq > c.trainer.total_training_steps
    yield is_never, ("trainer.test_freq",), "trainer.total_training_steps", "make it smaller than that"


def _show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"a list of {len(value)}"
    return str(list(value) if isinstance(value, tuple) else value)


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
    for rule in (*ALL_RULES, ignored):  # what is out of range is not complained about twice
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
