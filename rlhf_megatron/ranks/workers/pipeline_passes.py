"""Micro-batches through Megatron's schedules, one stage or many: with a backward pass,
or forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from torch.distributed import all_reduce

from rlhf_megatron.ranks.checkpoint.model_weights import unwrap_model_chunk
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.models.router_losses import DocumentTokens, RouterLossTerms
from rlhf_megatron.ranks.models.router_replay import RouterReplay
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.backend_protocols import RowsFunction
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch


def run_micro_batches(
    chunks: Sequence[nn.Module],
    world: World,
    packed_batch: PackedBatch,
    compute_rows: RowsFunction,
    forward_only: bool,
    routers: RouterLossTerms | None = None,
    replay: RouterReplay | None = None,
) -> list[Tensor]:
    """Run the chunks forward, and, unless `forward_only`, backward of the loss that `compute_rows`
    returns, over all micro-batches. Return the third values that `compute_rows` returned, in order,
    on the last stage; [] elsewhere. All ranks of a replica must call it.

    Gradients add up in the main-gradient buffers and are summed over replicas: the loss arrives
    divided by a global count, and nothing divides after it (ranks.models.transformer_config).
    `routers` receives the documents of each micro-batch's tokens, which `packed_batch` must then
    have. `replay` makes the routers follow the `routes` of micro-batches that have routes.
    """

    def forward_step(
        micro_batches: Iterator[MicroBatch], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Run a chunk on the next micro-batch, and return its output and the function that computes
        the loss of its rows.
        """
        micro = next(micro_batches)
        if routers is not None:
            assert micro.documents is not None, "packed without the documents of tokens"
            routers.enter_forward_pass(DocumentTokens(micro.documents, micro.num_sequences))
        if replay is not None:
            replay.enter_forward_pass(micro.routes, has_gradients=not forward_only)
        documents = make_packed_documents(
            micro.cu_seqlens,
            micro.max_seqlen,
            micro.position_ids,
            world.cp_group,
            micro.prompts,
            micro.num_keys,
        )
        hidden = model(micro.token_ids, micro.position_ids, None, packed_seq_params=documents)
        return hidden, partial(compute_rows, micro)

    config = get_model_config(chunks[0])
    # Not in forward-only passes: Megatron's pipelined schedules enter it and leave it there to the
    # garbage collector.
    config.no_sync_func = None if forward_only else _get_no_sync_contexts(chunks)
    pipeline: dict[str, Any] = {}
    if world.layout.pp > 1:
        pipeline["p2p_communicator"] = P2PCommunicator(world.pp_group, config)
    is_interleaved = world.layout.vpp > 1
    run = get_forward_backward_func(
        pp_size=world.layout.pp, vp_size=world.layout.vpp if is_interleaved else None
    )
    collected: list[Tensor] = run(
        forward_step_func=forward_step,
        data_iterator=[iter(packed_batch.micro_batches) for _ in chunks]
        if is_interleaved
        else iter(packed_batch.micro_batches),
        model=list(chunks) if is_interleaved else chunks[0],
        num_microbatches=len(packed_batch.micro_batches),
        # of all cp and tp ranks together: the schedules divide by both
        seq_length=packed_batch.seq_length,
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=world.pg_collection,
        **pipeline,
    )
    for model in map(unwrap_model_chunk, chunks):
        megatron: Any = model
        # what came from another stage would stay until the next pass
        megatron.set_input_tensor(None)
    return collected


def _get_no_sync_contexts(chunks: Sequence[nn.Module]) -> Any:
    """Return the context managers that hold back overlapped gradient reductions until a chunk's
    last micro-batch (a list for several chunks); None where nothing overlaps.
    """
    managers = [
        chunk.no_sync
        for chunk in chunks
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce
    ]
    if len(managers) > 1:
        return managers
    return managers[0] if managers else None


def sum_over_cp(values: Tensor, world: World) -> Tensor:
    """Return the sum over the context-parallel ranks, each of which has its own rows. All ranks of
    a cp group must call it.
    """
    if world.layout.cp == 1:
        return values
    total = values.to(world.device)
    all_reduce(total, group=world.cp_group)
    return total.to(values.device)
