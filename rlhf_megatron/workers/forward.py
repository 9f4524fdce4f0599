"""The forward-only pass that all models share, and the one place where rows become log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce

from rlhf_megatron.data.batch import LogProbs, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.kernels.log_prob import linear_log_prob
from rlhf_megatron.models.build import MegatronModel
from rlhf_megatron.models.head import head_weight, whole_sequence
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.pack import MicroBatch, pack
from rlhf_megatron.workers.pipeline import run_micro_batches


class RowLogProbs:
    """(hidden_SH, micro-batch) -> log-probs and entropies of the target tokens. Last stage, all tp ranks."""

    def __init__(
        self, model: MegatronModel, world: World, temperature: float, with_entropy: bool, chunk_size: int
    ) -> None:
        self.weight_VH = head_weight(model.chunks[-1]) if world.is_last_stage else None
        self.vocab_size = model.vocab_size
        self.vocab_start = model.vocab_start
        self.world = world
        self.temperature = temperature
        self.with_entropy = with_entropy
        self.chunk_size = chunk_size

    def __call__(self, hidden_SH: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        assert self.weight_VH is not None, "rows are on the last pipeline stage only"
        is_split = self.world.layout.sequence_parallel
        whole_SH = whole_sequence(hidden_SH, self.world.tp_group) if is_split else hidden_SH
        outputs = linear_log_prob(
            whole_SH.index_select(0, micro.rows),
            self.weight_VH,
            micro.targets,
            temperature=self.temperature,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            tp_group=self.world.tp_group,
            chunk_size=self.chunk_size,
            with_entropy=self.with_entropy,
        )
        return outputs.log_probs_R, outputs.entropies_R


def forward_log_probs(
    chunks: Sequence[nn.Module],
    rows_log_probs: RowLogProbs,
    world: World,
    batch: TokenBatch,
    plan: ReplicaPlan,
) -> LogProbs | None:
    """Log-probs (and entropies) at response tokens, on the leader; None elsewhere. All ranks of a replica."""

    def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> Tensor:
        log_probs_R, entropies_R = rows_log_probs(hidden_SH, micro)
        return log_probs_R[None] if entropies_R is None else torch.stack([log_probs_R, entropies_R])

    columns = forward_columns(chunks, world, batch, plan, of_rows)
    if columns is None:
        return None
    return LogProbs(
        offsets=batch.offsets,
        token_ids=batch.token_ids,
        response_mask=batch.response_mask,
        log_probs=columns[0],
        entropies=columns[1] if rows_log_probs.with_entropy else None,
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
