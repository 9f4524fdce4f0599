"""Rules on the layout of each pool, and on what is computed again, without a look at the model."""

from __future__ import annotations

import math

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, rule, wrong
from rlhf_megatron.config.rules.batches import divisors_of
from rlhf_megatron.config.rules.run import megatron_sections
from rlhf_megatron.config.rules.stages import num_chunks, parse_layout
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.config.source import Loaded

FIRST_LAST = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@rule
def layouts(loaded: Loaded) -> Findings:
    """The rules on each pool's layout."""
    for section, megatron, _ in megatron_sections(loaded.config):
        for check in (_axes, _overlap, _recompute):
            yield from check(section, megatron)
        yield from _precision(section, megatron, loaded.config.model.dtype)


def _axes(section: str, m: MegatronConfig) -> Findings:
    vpp, sequence_parallel = f"{section}.virtual_pipeline_model_parallel_size", f"{section}.sequence_parallel"
    yield wrong(
        m.virtual_pipeline_model_parallel_size is not None and m.pipeline_model_parallel_size == 1,
        f"{vpp} ({m.virtual_pipeline_model_parallel_size}) cuts pipeline stages into chunks, but"
        " pipeline_model_parallel_size is 1; use 2 or more stages, or remove it.",
        (vpp, f"{section}.pipeline_model_parallel_size"),
    )
    yield wrong(
        m.sequence_parallel and m.tensor_model_parallel_size == 1,
        f"{sequence_parallel} (true) splits tokens over tensor-parallel ranks, but tensor_model_parallel_size is 1;"
        " use 2 or more, or set it to false.",
        (sequence_parallel, f"{section}.tensor_model_parallel_size"),
    )
    shared = f"{section}.share_prompts"
    yield wrong(
        m.share_prompts and m.context_parallel_size > 1,
        f"{shared} (true) keeps a prompt whole, but context_parallel_size ({m.context_parallel_size}) cuts it; use 1,"
        " or set it to false.",
        (shared, f"{section}.context_parallel_size"),
    )
    for key in FIRST_LAST:
        yield wrong(
            getattr(m, key) is not None
            and (m.pipeline_model_parallel_size == 1 or m.virtual_pipeline_model_parallel_size is not None),
            f"{section}.{key} ({getattr(m, key)}) needs pipeline_model_parallel_size over 1 and no virtual stages;"
            " remove it.",
            (f"{section}.{key}", vpp, f"{section}.pipeline_model_parallel_size"),
        )
    yield from _layout_text(section, m)


def _layout_text(section: str, m: MegatronConfig) -> Findings:
    """megatron-core reads it, with assertions in place of messages."""
    if (text := m.pipeline_model_parallel_layout) is None:
        return
    key, others = f"{section}.pipeline_model_parallel_layout", [name for name in FIRST_LAST if getattr(m, name)]
    try:
        count, wanted = len(parse_layout(text)), num_chunks(m)
    except ValueError as error:
        yield Problem(f"{section}.{error}", (key,))
        return
    yield wrong(
        count != wanted,
        f"{key} ({text!r}) has {count} chunks; pipeline_model_parallel_size x virtual_pipeline_model_parallel_size"
        f" must be as many, and is {wanted}.",
        (key, f"{section}.pipeline_model_parallel_size", f"{section}.virtual_pipeline_model_parallel_size"),
    )
    yield wrong(
        others,
        f"{key} ({text!r}) says what {' and '.join(others)} would; remove one of them.",
        (key, *(f"{section}.{name}" for name in others)),
    )


def _overlap(section: str, m: MegatronConfig) -> Findings:
    """megatron-core gathers in the background only what its distributed optimizer holds in several buckets."""
    key = f"{section}.overlap_param_gather"
    needed = {
        f"{section}.use_distributed_optimizer": m.use_distributed_optimizer,
        f"{section}.overlap_grad_reduce": m.overlap_grad_reduce,
    }
    missing = [name for name, is_on in needed.items() if not is_on]
    if m.overlap_param_gather and missing:
        names = " and ".join(name.rpartition(".")[2] for name in missing)
        yield Problem(
            f"{key} (true) needs use_distributed_optimizer, whose shards it gathers, and"
            f" overlap_grad_reduce, which cuts parameters into buckets; set {names} to true, or it to false.",
            (key, *missing),
        )


def _precision(section: str, m: MegatronConfig, dtype: str) -> Findings:
    """Check what an optimizer keeps in fewer bits."""
    key, names = f"{section}.use_precision_aware_optimizer", ("exp_avg_dtype", "exp_avg_sq_dtype")
    short = [name for name in names if getattr(m, name) != "float32"]
    yield wrong(
        short and not m.use_precision_aware_optimizer,
        f"{section}.{' and '.join(short)} (bfloat16) would be ignored without {key}; set it to true.",
        (key, *(f"{section}.{name}" for name in short)),
    )
    yield wrong(
        m.use_precision_aware_optimizer and dtype == "float32" and not short,
        f"{key} (true) would be ignored: a float32 model has no main parameters beside its own; set exp_avg_dtype or"
        " exp_avg_sq_dtype to bfloat16, or it to false.",
        (key, "model.dtype", *(f"{section}.{name}" for name in names)),
    )


def _recompute(section: str, m: MegatronConfig) -> Findings:
    if m.recompute_granularity == "full":
        yield from _full(section, m)
    elif m.recompute_granularity == "selective":
        yield from _selective(section, m)


def _full(section: str, m: MegatronConfig) -> Findings:
    given = {"recompute_method": m.recompute_method, "recompute_num_layers": m.recompute_num_layers}
    missing = [name for name, value in given.items() if value is None]
    yield wrong(
        missing,
        f"{section}.recompute_granularity (full) needs {' and '.join(missing)}; use recompute_method: uniform and"
        " recompute_num_layers: 1 to keep the input of each layer only.",
        (f"{section}.recompute_granularity", *(f"{section}.{name}" for name in missing)),
    )


def _selective(section: str, m: MegatronConfig) -> Findings:
    key, modules = f"{section}.recompute_modules", m.recompute_modules
    yield wrong(
        not modules or len(set(modules)) != len(modules),
        f"{key} ({list(modules)}) must name at least one module and none twice, for recompute_granularity"
        " selective; use [core_attn] or remove it.",
        (key, f"{section}.recompute_granularity"),
    )
    yield wrong(
        "layernorm" in modules and m.transformer_impl == "transformer_engine",
        f"{key} ({list(modules)}) has layernorm, which does nothing for transformer_impl transformer_engine: its"
        " norms are parts of the linear layers; remove it, or use transformer_impl: local.",
        (key, f"{section}.transformer_impl"),
    )


def recompute_of_model(section: str, m: MegatronConfig, num_layers: int) -> Findings:
    """Full recomputation counts the layers of one model chunk; megatron-core does not look whether they are there."""
    num, text = num_chunks(m), m.pipeline_model_parallel_layout
    count, key = m.recompute_num_layers, f"{section}.recompute_num_layers"
    keys = (key, *(f"{section}.{axis}pipeline_model_parallel_size" for axis in ("", "virtual_")))
    if m.recompute_granularity != "full" or not count or count < 1 or num < 1:
        return  # other rules say it
    try:
        chunks = parse_layout(text) if text else (num_layers // num,)
    except ValueError:
        return
    if not text and num_layers % num:
        return
    layers = math.gcd(*chunks) if m.recompute_method == "uniform" else min(chunks)
    chunk = f"the {layers} layers of a model chunk ({text or f'{num_layers} / {num}'})"
    if m.recompute_method == "uniform" and layers % count:
        fit = " or ".join(map(str, divisors_of(layers)))
        yield Problem(f"{key} ({count}) must divide {chunk} for recompute_method uniform; use {fit}.", keys)
    yield wrong(
        m.recompute_method == "block" and count > layers,
        f"{key} ({count}) must be at most {chunk}, or the rest would be ignored; use {layers}.",
        keys,
    )
