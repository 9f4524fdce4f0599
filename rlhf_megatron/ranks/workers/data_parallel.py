"""Model chunks wrapped for data parallelism: gradient buffers and, where the optimizer is split,
parameter buffers.

With use_distributed_optimizer every parameter is a view of a flat buffer, of which each
data-parallel (and context-parallel) rank updates a part and gathers the rest: after the step, or
with overlap_param_gather in the next forward pass. Until then the parameters of the other ranks'
parts are the old ones: see `gather_updated_parameters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.parallel.world import World

# parameters whose gradients are reduced together under overlap; None: megatron's choice
DDP_BUCKET_SIZE: int | None = None


def wrap_for_data_parallelism(
    chunks: Sequence[nn.Module],
    transformer_config: TransformerConfig,
    megatron: MegatronConfig,
    world: World,
) -> list[DistributedDataParallel]:
    """Wrap the chunks in megatron's DistributedDataParallel, with gradients in float32 buffers that
    are summed over all ranks with the same shard. The chunks have their weights already.

    All ranks of the pool must call it at once.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        overlap_param_gather=megatron.overlap_param_gather,
        use_distributed_optimizer=bool(megatron.use_distributed_optimizer),
        bucket_size=DDP_BUCKET_SIZE,
        # Optimizer.step sees it in the norm, and skips instead of ending the run
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(
            transformer_config,
            settings,
            chunk,
            # As megatron's training does: what later chunks send is hidden by the earlier ones'
            # computation anyway.
            disable_bucketing=index > 0,
            pg_collection=world.pg_collection,
        )
        for index, chunk in enumerate(chunks)
    ]


def gather_updated_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the parameters that the last optimizer step updated on other ranks, where otherwise
    the next forward pass would gather them (overlap_param_gather). All ranks of the pool must call
    it.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def list_parameter_tensors(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return the tensors that hold the memory of all parameters: flat buffers with their padding,
    and the parameters, which may be views of them.
    """
    flat = [
        buffer.param_data for buffer in _list_flat_buffers(chunks) if buffer.param_data is not None
    ]
    return [*flat, *(parameter for chunk in chunks for parameter in chunk.parameters())]


def list_gradient_tensors(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return the tensors that hold the memory of all gradients."""
    return [buffer.grad_data for buffer in _list_flat_buffers(chunks)]


def _list_flat_buffers(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    """Return megatron's flat buffers of all chunks, of dense parameters and of experts."""
    return [
        buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    ]
