"""Bytes that each rank of a layout will hold, from the real model and gradient buffers, with
no memory spent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.ranks.workers.data_parallel import wrap_for_data_parallelism
from rlhf_megatron.ranks.workers.optimizer_state_format import OptimizerStateFormat
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from rlhf_megatron.weights.weight_table import HeadKind


@dataclass(frozen=True)
class StageMemory:
    """The memory of the ranks of one pipeline stage, bytes a rank. The ranks of a tensor-parallel
    group hold the same.

    A tuple has one entry a rank that holds the same shard: data-parallel x context-parallel
    ranks, cp fastest.
    """

    stage: int
    num_ranks: int  # of this stage, over all replicas
    num_parameters: int  # elements on one rank, a tied copy and padded vocabulary included
    parameters: int  # in model.dtype; padding of the distributed optimizer's buffers included
    gradients: int  # float32 buffers; padding included
    # float32 copies of bfloat16 parameters, or what these have beyond them
    main_parameters: tuple[int, ...]
    moments: tuple[int, ...]  # Adam's two
    reference: int  # parameters of a frozen reference model in the same layout, in model.dtype
    is_optimizer_on_host: bool = False  # main parameters and moments stand in host memory

    @property
    def totals(self) -> tuple[int, ...]:
        """Return the bytes on the device of each rank that holds the same shard, without the
        reference model, whose bytes come on top when it is not offloaded.
        """
        fixed = self.parameters + self.gradients
        if self.is_optimizer_on_host:
            return (fixed,) * len(self.moments)
        return tuple(
            fixed + main + moments
            for main, moments in zip(self.main_parameters, self.moments, strict=True)
        )


def plan_layout_memory(
    hf_config: Mapping[str, Any],
    megatron: MegatronConfig,
    num_ranks: int,
    dtype: torch.dtype,
    head: HeadKind = "vocabulary",
) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage, by building its model without storage. Call it in a
    process without process groups; it leaves none behind.

    `num_ranks` is the size of the pool; `head` is "vocabulary" for an actor, "value" for a critic,
    "unbiased_value" for a reward model whose head has no bias.

    Raise ValueError for a model or layout that is not supported.
    """
    layout = make_parallel_layout(megatron, num_ranks)
    return tuple(
        _plan_stage_memory(hf_config, megatron, layout, stage, dtype, head)
        for stage in range(layout.pp)
    )


def _plan_stage_memory(
    hf_config: Mapping[str, Any],
    megatron: MegatronConfig,
    layout: ParallelLayout,
    stage: int,
    dtype: torch.dtype,
    head: HeadKind,
) -> StageMemory:
    """Return the memory of one pipeline stage, measured on its model in a fake world."""
    # What runs on GPUs only holds no parameters, and this is a CPU.
    megatron = replace(megatron, moe_token_dispatcher_type="alltoall", moe_permute_fusion=False)
    with _create_fake_world(layout, layout.compute_rank(dp=0, pp=stage, tp=0)) as world:
        model = build_megatron_model(hf_config, world, dtype, megatron, head)
        plain = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
        reference = sum(map(_count_tensor_bytes, plain))
        chunks = wrap_for_data_parallelism(model.chunks, model.transformer_config, megatron, world)
        dense = [buffer for chunk in chunks for buffer in chunk.buffers]
        of_experts = [buffer for chunk in chunks for buffer in chunk.expert_parallel_buffers]
        buffers = [*dense, *of_experts]
        is_sharded = bool(megatron.use_distributed_optimizer)
        num_shards = layout.dp * layout.cp
        owned = (sum(p.numel() for p in plain),) * num_shards
        if is_sharded:
            shards = _count_shard_elements(of_experts, layout.edp)
            per_copy = layout.ep * layout.etp
            owned = tuple(
                count + shards[shard * layout.tp // per_copy]
                for shard, count in enumerate(_count_shard_elements(dense, num_shards))
            )
        main, moments = OptimizerStateFormat.from_megatron_config(
            megatron
        ).count_bytes_per_parameter(dtype)
        return StageMemory(
            stage=stage,
            num_ranks=layout.tp * layout.cp * layout.dp,
            num_parameters=sum(parameter.numel() for parameter in plain),
            parameters=sum(_count_tensor_bytes(buffer.param_data) for buffer in buffers)
            if is_sharded
            else reference,
            gradients=sum(_count_tensor_bytes(buffer.grad_data) for buffer in buffers),
            main_parameters=tuple(count * main for count in owned),
            moments=tuple(count * moments for count in owned),
            reference=reference,
            is_optimizer_on_host=megatron.optimizer_cpu_offload,
        )


def _count_shard_elements(buffers: list[Any], num_shards: int) -> tuple[int, ...]:
    """Return the elements that each shard of the distributed optimizer updates: its equal part of
    every bucket, less padding.
    """
    counts = [0] * num_shards
    for buffer in buffers:
        for start, end, bucket in buffer.param_index_map.values():
            first, last = buffer.bucket_indices[bucket]
            size = (last - first) // num_shards
            for shard in range(num_shards):
                low = first + shard * size
                counts[shard] += max(0, min(end, low + size) - max(start, low))
    return tuple(counts)


def _count_tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def _create_fake_world(layout: ParallelLayout, rank: int) -> Iterator[World]:
    """Yield the world of one rank of `layout` within the block, where new tensors have no storage
    and collectives do nothing.
    """
    # registers the backend "fake"
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        world = create_world(layout, torch.device("cpu"))
        # Initialisation forks megatron's random states, and compares them afterwards: not possible
        # without values.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        with FakeTensorMode(), _disable_module_to():
            yield world
    finally:
        destroy_world()
        initialize_rng_tracker(force_reset=True)


@contextlib.contextmanager
def _disable_module_to() -> Iterator[None]:
    """Make Module.to do nothing within the block, because it swaps tensors, which fake tensors
    refuse; all modules are made on their device already.
    """
    to = torch.nn.Module.to
    torch.nn.Module.to = (  # type: ignore[method-assign]
        lambda module, *args, **kwargs: module  # type: ignore[assignment]
    )
    try:
        yield
    finally:
        torch.nn.Module.to = to  # type: ignore[method-assign]
