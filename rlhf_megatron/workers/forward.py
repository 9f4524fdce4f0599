"""The forward-only pass that all models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce

from rlhf_megatron.data.batch import LogProbs, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.log_prob_head import RowLogProbs
from rlhf_megatron.workers.pack import MicroBatch, pack
from rlhf_megatron.workers.pipeline import run_micro_batches


def forward_log_probs(
    chunks: Sequence[nn.Module],
    rows_log_probs: RowLogProbs,
    world: World,
    batch: TokenBatch,
    plan: ReplicaPlan,
) -> LogProbs | None:
    """Log-probs, and what else the rows are asked for, on the leader; None elsewhere. All ranks of a replica."""

    def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> Tensor:
        return torch.stack([column_R for column_R in rows_log_probs.outputs(hidden_SH, micro) if column_R is not None])

    columns = forward_columns(chunks, world, batch, plan, of_rows)
    if columns is None:
        return None
    others = iter(columns[1:])
    return LogProbs(
        offsets=batch.offsets,
        token_ids=batch.token_ids,
        response_mask=batch.response_mask,
        log_probs=columns[0],
        entropies=next(others) if rows_log_probs.with_entropy else None,
        sum_squares=next(others) if rows_log_probs.with_sum_squares else None,
    )


def forward_columns(
    chunks: Sequence[nn.Module],
    world: World,
    batch: TokenBatch,
    plan: ReplicaPlan,
    of_rows: Callable[[Tensor, MicroBatch], Tensor],
) -> Tensor | None:
    """Token columns [C, T] float32 on the CPU, on the leader; None elsewhere. All ranks of a replica.

    `of_rows`: (hidden_SH, micro-batch) -> [C, R], on the last stage. Zero outside of the batch's response mask.
    """
    packed = pack(batch, plan, world.layout, world.coordinates.cp, device=world.device)

    def on_rows(hidden_SH: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        columns_CR = of_rows(hidden_SH, micro)
        return columns_CR[0], columns_CR

    with torch.no_grad():
        rows = run_micro_batches(chunks, world, packed, on_rows, forward_only=True)
    if not world.is_last_stage or world.coordinates.tp != 0:
        return None
    columns = [packed.unpack(column) for column in zip(*rows, strict=True)]
    totals = sum_over_cp(torch.stack(columns), world)
    return totals if world.is_leader else None


def sum_over_cp(values: Tensor, world: World) -> Tensor:
    """The sum over the context-parallel ranks, each of which has rows of its own. All ranks of a cp group."""
    if world.layout.cp == 1:
        return values
    total = values.to(world.device)
    all_reduce(total, group=world.cp_group)
    return total.to(values.device)
