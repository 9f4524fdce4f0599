"""The rules between the settings of a layout: virtual stages, sequence parallelism, optimizer shards, recomputation.

Some are megatron-core's own checks, told before anything starts. The others are what it would accept and not do.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import PP, SEQUENCE_PARALLEL, TP
from rlhf_megatron.config.schema import MegatronConfig

VPP = "actor.megatron.virtual_pipeline_model_parallel_size"
DISTRIBUTED_OPTIMIZER = "actor.megatron.use_distributed_optimizer"
OVERLAP_GRADS = "actor.megatron.overlap_grad_reduce"
OVERLAP_PARAMS = "actor.megatron.overlap_param_gather"
RECOMPUTE = "actor.megatron.recompute_"


def axes(loaded: Loaded) -> Iterator[Problem]:
    m = loaded.config.actor.megatron
    if m.virtual_pipeline_model_parallel_size is not None and m.pipeline_model_parallel_size == 1:
        yield Problem(
            f"{VPP} ({m.virtual_pipeline_model_parallel_size}) cuts pipeline stages into chunks, but"
            " pipeline_model_parallel_size is 1; use 2 or more stages, or remove it.",
            (VPP, PP),
        )
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        yield Problem(
            f"{SEQUENCE_PARALLEL} (true) splits tokens over tensor-parallel ranks, but tensor_model_parallel_size is 1;"
            " use 2 or more, or set it to false.",
            (SEQUENCE_PARALLEL, TP),
        )


def overlap(loaded: Loaded) -> Iterator[Problem]:
    """megatron-core gathers in the background only what its distributed optimizer holds in several buckets."""
    m = loaded.config.actor.megatron
    needed = {DISTRIBUTED_OPTIMIZER: m.use_distributed_optimizer, OVERLAP_GRADS: m.overlap_grad_reduce}
    missing = [key for key, is_on in needed.items() if not is_on]
    if m.overlap_param_gather and missing:
        names = " and ".join(key.rpartition(".")[2] for key in missing)
        yield Problem(
            f"{OVERLAP_PARAMS} (true) needs use_distributed_optimizer, whose shards it gathers, and"
            f" overlap_grad_reduce, which cuts parameters into buckets; set {names} to true, or it to false.",
            (OVERLAP_PARAMS, *missing),
        )


def recompute(loaded: Loaded) -> Iterator[Problem]:
    m = loaded.config.actor.megatron
    if m.recompute_granularity == "full":
        yield from _full(m)
    elif m.recompute_granularity == "selective":
        yield from _selective(m)


def _full(m: MegatronConfig) -> Iterator[Problem]:
    given = {"recompute_method": m.recompute_method, "recompute_num_layers": m.recompute_num_layers}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        yield Problem(
            f"{RECOMPUTE}granularity (full) needs {' and '.join(missing)}; use recompute_method: uniform and"
            " recompute_num_layers: 1 to keep the input of each layer only.",
            (f"{RECOMPUTE}granularity", *(f"actor.megatron.{name}" for name in missing)),
        )


def _selective(m: MegatronConfig) -> Iterator[Problem]:
    key, modules = f"{RECOMPUTE}modules", m.recompute_modules
    if not modules or len(set(modules)) != len(modules):
        yield Problem(
            f"{key} ({list(modules)}) must name at least one module and none twice, for recompute_granularity"
            " selective; use [core_attn] or remove it.",
            (key, f"{RECOMPUTE}granularity"),
        )
    if "layernorm" in modules and m.transformer_impl == "transformer_engine":
        yield Problem(
            f"{key} ({list(modules)}) has layernorm, which does nothing for transformer_impl transformer_engine: its"
            " norms are parts of the linear layers; remove it, or use transformer_impl: local.",
            (key, "actor.megatron.transformer_impl"),
        )


def recompute_of_model(m: MegatronConfig, num_layers: int) -> Iterator[Problem]:
    """Full recomputation counts the layers of one model chunk; megatron-core does not look whether they are there."""
    num_chunks = m.pipeline_model_parallel_size * (m.virtual_pipeline_model_parallel_size or 1)
    count, key = m.recompute_num_layers, f"{RECOMPUTE}num_layers"
    if m.recompute_granularity != "full" or not count or count < 1 or num_chunks < 1 or num_layers % num_chunks:
        return  # other rules say it
    layers = num_layers // num_chunks
    chunk = f"the {layers} layers of a model chunk ({num_layers} / {num_chunks})"
    if m.recompute_method == "uniform" and layers % count:
        fit = " or ".join(str(d) for d in range(1, layers + 1) if layers % d == 0)
        yield Problem(f"{key} ({count}) must divide {chunk} for recompute_method uniform; use {fit}.", (key, PP, VPP))
    if m.recompute_method == "block" and count > layers:
        yield Problem(
            f"{key} ({count}) must be at most {chunk}, or the rest would be ignored; use {layers}.", (key, PP, VPP)
        )


LAYOUT_RULES = (axes, overlap, recompute)
