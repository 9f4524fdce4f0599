"""The rules between the settings of a layout: virtual stages, sequence parallelism, optimizer shards, recomputation.

Some are megatron-core's own checks, told before anything starts. The others are what it would accept and not do.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import megatron_sections
from rlhf_megatron.config.schema import MegatronConfig


def layouts(loaded: Loaded) -> Iterator[Problem]:
    """The rules on each pool's layout."""
    for section, megatron, _ in megatron_sections(loaded.config):
        for rule in (_axes, _overlap, _recompute):
            yield from rule(section, megatron)


def _axes(section: str, m: MegatronConfig) -> Iterator[Problem]:
    vpp, sequence_parallel = f"{section}.virtual_pipeline_model_parallel_size", f"{section}.sequence_parallel"
    if m.virtual_pipeline_model_parallel_size is not None and m.pipeline_model_parallel_size == 1:
        yield Problem(
            f"{vpp} ({m.virtual_pipeline_model_parallel_size}) cuts pipeline stages into chunks, but"
            " pipeline_model_parallel_size is 1; use 2 or more stages, or remove it.",
            (vpp, f"{section}.pipeline_model_parallel_size"),
        )
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        yield Problem(
            f"{sequence_parallel} (true) splits tokens over tensor-parallel ranks, but tensor_model_parallel_size is 1;"
            " use 2 or more, or set it to false.",
            (sequence_parallel, f"{section}.tensor_model_parallel_size"),
        )


def _overlap(section: str, m: MegatronConfig) -> Iterator[Problem]:
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


def _recompute(section: str, m: MegatronConfig) -> Iterator[Problem]:
    if m.recompute_granularity == "full":
        yield from _full(section, m)
    elif m.recompute_granularity == "selective":
        yield from _selective(section, m)


def _full(section: str, m: MegatronConfig) -> Iterator[Problem]:
    given = {"recompute_method": m.recompute_method, "recompute_num_layers": m.recompute_num_layers}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        yield Problem(
            f"{section}.recompute_granularity (full) needs {' and '.join(missing)}; use recompute_method: uniform and"
            " recompute_num_layers: 1 to keep the input of each layer only.",
            (f"{section}.recompute_granularity", *(f"{section}.{name}" for name in missing)),
        )


def _selective(section: str, m: MegatronConfig) -> Iterator[Problem]:
    key, modules = f"{section}.recompute_modules", m.recompute_modules
    if not modules or len(set(modules)) != len(modules):
        yield Problem(
            f"{key} ({list(modules)}) must name at least one module and none twice, for recompute_granularity"
            " selective; use [core_attn] or remove it.",
            (key, f"{section}.recompute_granularity"),
        )
    if "layernorm" in modules and m.transformer_impl == "transformer_engine":
        yield Problem(
            f"{key} ({list(modules)}) has layernorm, which does nothing for transformer_impl transformer_engine: its"
            " norms are parts of the linear layers; remove it, or use transformer_impl: local.",
            (key, f"{section}.transformer_impl"),
        )


def recompute_of_model(section: str, m: MegatronConfig, num_layers: int) -> Iterator[Problem]:
    """Full recomputation counts the layers of one model chunk; megatron-core does not look whether they are there."""
    num_chunks = m.pipeline_model_parallel_size * (m.virtual_pipeline_model_parallel_size or 1)
    count, key = m.recompute_num_layers, f"{section}.recompute_num_layers"
    keys = (key, *(f"{section}.{axis}pipeline_model_parallel_size" for axis in ("", "virtual_")))
    if m.recompute_granularity != "full" or not count or count < 1 or num_chunks < 1 or num_layers % num_chunks:
        return  # other rules say it
    layers = num_layers // num_chunks
    chunk = f"the {layers} layers of a model chunk ({num_layers} / {num_chunks})"
    if m.recompute_method == "uniform" and layers % count:
        fit = " or ".join(str(d) for d in range(1, layers + 1) if layers % d == 0)
        yield Problem(f"{key} ({count}) must divide {chunk} for recompute_method uniform; use {fit}.", keys)
    if m.recompute_method == "block" and count > layers:
        yield Problem(f"{key} ({count}) must be at most {chunk}, or the rest would be ignored; use {layers}.", keys)


LAYOUT_RULES = (layouts,)
