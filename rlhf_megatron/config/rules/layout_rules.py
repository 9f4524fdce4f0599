"""Rules on the layout of each pool, and on what is computed again, without a look at the model."""

from __future__ import annotations

import math

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import OptionalProblems, make_problem_if, register_rule
from rlhf_megatron.config.rules.batch_rules import list_divisors
from rlhf_megatron.config.rules.pipeline_layout_text import (
    count_model_chunks,
    parse_pipeline_layout,
)
from rlhf_megatron.config.rules.run_rules import list_pool_layouts
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

FIRST_LAST = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@register_rule
def check_pool_layouts(loaded: LoadedConfig) -> OptionalProblems:
    """Yield the problems of each pool's megatron section: parallel axes, overlap of parameter
    gathers, recomputation, and precision of the optimizer states.
    """
    for section, megatron, _ in list_pool_layouts(loaded.config):
        for check in (_check_parallel_axes, _check_param_gather_overlap, _check_recompute):
            yield from check(section, megatron)
        yield from _check_optimizer_precision(section, megatron, loaded.config.model.dtype)


def _check_parallel_axes(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield problems of parallel sizes that contradict each other: virtual stages without pipeline
    stages, sequence parallelism without tensor parallelism, shared prompts with context
    parallelism, uneven first and last stages, and the written pipeline layout.
    """
    vpp = f"{section}.virtual_pipeline_model_parallel_size"
    sequence_parallel = f"{section}.sequence_parallel"
    yield make_problem_if(
        megatron.virtual_pipeline_model_parallel_size is not None
        and megatron.pipeline_model_parallel_size == 1,
        (
            f"{vpp} ({megatron.virtual_pipeline_model_parallel_size}) cuts pipeline stages into"
            " chunks, but pipeline_model_parallel_size is 1; use 2 or more stages, or"
            f" remove {vpp}."
        ),
        (vpp, f"{section}.pipeline_model_parallel_size"),
    )
    yield make_problem_if(
        megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1,
        (
            f"{sequence_parallel} (true) splits tokens over tensor-parallel ranks, but"
            " tensor_model_parallel_size is 1; use 2 or more, or set"
            f" {sequence_parallel} to false."
        ),
        (sequence_parallel, f"{section}.tensor_model_parallel_size"),
    )
    shared = f"{section}.share_prompts"
    yield make_problem_if(
        megatron.share_prompts and megatron.context_parallel_size > 1,
        (
            f"{shared} (true) keeps a prompt whole, but context_parallel_size"
            f" ({megatron.context_parallel_size}) cuts it; use 1, or set {shared} to"
            " false."
        ),
        (shared, f"{section}.context_parallel_size"),
    )
    for key in FIRST_LAST:
        yield make_problem_if(
            getattr(megatron, key) is not None
            and (
                megatron.pipeline_model_parallel_size == 1
                or megatron.virtual_pipeline_model_parallel_size is not None
            ),
            (
                f"{section}.{key} ({getattr(megatron, key)}) needs pipeline_model_parallel_size"
                f" over 1 and no virtual stages; remove {section}.{key}."
            ),
            (f"{section}.{key}", vpp, f"{section}.pipeline_model_parallel_size"),
        )
    yield from _check_pipeline_layout(section, megatron)


def _check_pipeline_layout(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield problems of the text pipeline_model_parallel_layout: bad syntax, a wrong number of
    chunks, or settings for the first and last stage beside it. megatron-core reads the text too,
    but fails with assertions instead of messages.
    """
    if (text := megatron.pipeline_model_parallel_layout) is None:
        return
    key = f"{section}.pipeline_model_parallel_layout"
    others = [name for name in FIRST_LAST if getattr(megatron, name)]
    try:
        count = len(parse_pipeline_layout(text))
        wanted = count_model_chunks(megatron)
    except ValueError as error:
        yield ConfigProblem(f"{section}.{error}", (key,))
        return
    yield make_problem_if(
        count != wanted,
        (
            f"{key} ({text!r}) has {count} chunks; pipeline_model_parallel_size x"
            f" virtual_pipeline_model_parallel_size must be as many, and is {wanted}."
        ),
        (
            key,
            f"{section}.pipeline_model_parallel_size",
            f"{section}.virtual_pipeline_model_parallel_size",
        ),
    )
    yield make_problem_if(
        others,
        f"{key} ({text!r}) says what {' and '.join(others)} would; remove one of them.",
        (key, *(f"{section}.{name}" for name in others)),
    )


def _check_param_gather_overlap(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield a problem if overlap_param_gather is on without use_distributed_optimizer and
    overlap_grad_reduce: megatron-core gathers in the background only parameters that its
    distributed optimizer holds in several buckets.
    """
    key = f"{section}.overlap_param_gather"
    needed = {
        f"{section}.use_distributed_optimizer": megatron.use_distributed_optimizer,
        f"{section}.overlap_grad_reduce": megatron.overlap_grad_reduce,
    }
    missing = [name for name, is_on in needed.items() if not is_on]
    if megatron.overlap_param_gather and missing:
        names = " and ".join(name.rpartition(".")[2] for name in missing)
        yield ConfigProblem(
            (
                f"{key} (true) needs use_distributed_optimizer, whose shards it gathers, and"
                f" overlap_grad_reduce, which cuts parameters into buckets; set {names} to true, or"
                f" {key} to false."
            ),
            (key, *missing),
        )


def _check_optimizer_precision(
    section: str, megatron: MegatronConfig, dtype: str
) -> OptionalProblems:
    """Yield a problem if optimizer states are to be bfloat16 without use_precision_aware_optimizer,
    or if that option has no effect on a float32 model.
    """
    key = f"{section}.use_precision_aware_optimizer"
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    short = [name for name in names if getattr(megatron, name) != "float32"]
    yield make_problem_if(
        short and not megatron.use_precision_aware_optimizer,
        (
            f"{section}.{' and '.join(short)} (bfloat16) would be ignored without {key}; set"
            f" {key} to true."
        ),
        (key, *(f"{section}.{name}" for name in short)),
    )
    yield make_problem_if(
        megatron.use_precision_aware_optimizer and dtype == "float32" and not short,
        (
            f"{key} (true) would be ignored: a float32 model has no main parameters beside its own;"
            f" set exp_avg_dtype or exp_avg_sq_dtype to bfloat16, or {key} to false."
        ),
        (key, "model.dtype", *(f"{section}.{name}" for name in names)),
    )


def _check_recompute(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield the problems of activation recomputation for the granularity that is set; nothing
    without recomputation.
    """
    if megatron.recompute_granularity == "full":
        yield from _check_full_recompute(section, megatron)
    elif megatron.recompute_granularity == "selective":
        yield from _check_selective_recompute(section, megatron)


def _check_full_recompute(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield a problem if full recomputation lacks its method or its number of layers."""
    given = {
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
    }
    missing = [name for name, value in given.items() if value is None]
    yield make_problem_if(
        missing,
        (
            f"{section}.recompute_granularity (full) needs {' and '.join(missing)}; use"
            " recompute_method: uniform and recompute_num_layers: 1 to keep the input of each"
            " layer only."
        ),
        (f"{section}.recompute_granularity", *(f"{section}.{name}" for name in missing)),
    )


def _check_selective_recompute(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield a problem if selective recomputation names no module, a module twice, or layernorm
    under transformer_engine, where that does nothing.
    """
    key = f"{section}.recompute_modules"
    modules = megatron.recompute_modules
    yield make_problem_if(
        not modules or len(set(modules)) != len(modules),
        (
            f"{key} ({list(modules)}) must name at least one module and none twice, for"
            f" recompute_granularity selective; use [core_attn] or remove {key}."
        ),
        (key, f"{section}.recompute_granularity"),
    )
    yield make_problem_if(
        "layernorm" in modules and megatron.transformer_impl == "transformer_engine",
        (
            f"{key} ({list(modules)}) has layernorm, which does nothing for transformer_impl"
            " transformer_engine: its norms are parts of the linear layers; remove layernorm, or"
            " use transformer_impl: local."
        ),
        (key, f"{section}.transformer_impl"),
    )


def check_recompute_layer_count(
    section: str, megatron: MegatronConfig, num_layers: int
) -> OptionalProblems:
    """Yield a problem if recompute_num_layers, for full recomputation, does not fit the layers of a
    model chunk: a divisor for method uniform, at most the layers for method block. megatron-core
    does not check this.
    """
    num = count_model_chunks(megatron)
    text = megatron.pipeline_model_parallel_layout
    count = megatron.recompute_num_layers
    key = f"{section}.recompute_num_layers"
    keys = (key, *(f"{section}.{axis}pipeline_model_parallel_size" for axis in ("", "virtual_")))
    if megatron.recompute_granularity != "full" or not count or count < 1 or num < 1:
        return  # other rules say it
    try:
        chunks = parse_pipeline_layout(text) if text else (num_layers // num,)
    except ValueError:
        return
    if not text and num_layers % num:
        return
    layers = math.gcd(*chunks) if megatron.recompute_method == "uniform" else min(chunks)
    chunk = f"the {layers} layers of a model chunk ({text or f'{num_layers} / {num}'})"
    if megatron.recompute_method == "uniform" and layers % count:
        fit = " or ".join(map(str, list_divisors(layers)))
        yield ConfigProblem(
            f"{key} ({count}) must divide {chunk} for recompute_method uniform; use {fit}.", keys
        )
    yield make_problem_if(
        megatron.recompute_method == "block" and count > layers,
        f"{key} ({count}) must be at most {chunk}, or the rest would be ignored; use {layers}.",
        keys,
    )
