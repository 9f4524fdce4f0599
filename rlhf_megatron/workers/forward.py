"""Passes without a backward part: token columns of a shard, through any trainer backend."""
# S tokens of this rank (its part of the sequence under sequence parallelism), R rows, C columns, T tokens of the shard

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.data.batch import LogProbs, TokenBatch, TopLogProbs, Values
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.kernels.log_prob import HeadOutputs
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.backend import Backend, Head, RowsResult
from rlhf_megatron.workers.pack import MicroBatch, Packed, pack
from rlhf_megatron.workers.pipeline import sum_over_cp


@dataclass(frozen=True)
class RowLogProbs:
    """(hidden_SH, micro-batch) -> log-probs and entropies of the target tokens. Last stage, all tp ranks.

    `outputs` gives all that was asked for.
    """

    head: Head
    temperature: float
    with_entropy: bool = False
    with_sum_squares: bool = False

    def __call__(self, hidden_SH: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        found = self.outputs(hidden_SH, micro)
        return found.log_probs_R, found.entropies_R

    def outputs(self, hidden_SH: Tensor, micro: MicroBatch) -> HeadOutputs:
        return self.head.outputs(hidden_SH, micro, self.temperature, self.with_entropy, self.with_sum_squares)


def forward_log_probs(backend: Backend, rows: RowLogProbs, batch: TokenBatch, plan: ReplicaPlan) -> LogProbs | None:
    """Log-probs, and what else the rows are asked for, on the leader; None elsewhere. All ranks of a replica."""

    def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> Tensor:
        return torch.stack([column_R for column_R in rows.outputs(hidden_SH, micro) if column_R is not None])

    columns = forward_columns(backend, batch, plan, of_rows)
    if columns is None:
        return None
    others = iter(columns[1:])
    return LogProbs(
        log_probs=columns[0],
        entropies=next(others) if rows.with_entropy else None,
        sum_squares=next(others) if rows.with_sum_squares else None,
    )


def forward_values(backend: Backend, batch: TokenBatch, plan: ReplicaPlan) -> Values | None:
    """Values of a model with a value head, on the leader; None elsewhere. All ranks of a replica."""

    def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> Tensor:
        return backend.values(hidden_SH, micro.rows)[None]

    columns = forward_columns(backend, batch, plan, of_rows)
    return None if columns is None else Values(columns[0])


def forward_top(
    backend: Backend, head: Head, batch: TokenBatch, plan: ReplicaPlan, temperature: float, count: int
) -> TopLogProbs | None:
    """The likeliest tokens of each place, on the leader; None elsewhere. All ranks of a replica."""

    def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> Tensor:
        ids_RK, log_probs_RK = head.top(hidden_SH, micro, temperature, count)
        return torch.cat([ids_RK, log_probs_RK], -1).T  # ids are whole numbers in float32, too: no vocabulary has 2^24

    columns = forward_columns(backend, batch, plan, of_rows)
    if columns is None:
        return None
    return TopLogProbs(columns[:count].T.to(torch.int32).contiguous(), columns[count:].T.contiguous())


def forward_columns(
    backend: Backend,
    batch: TokenBatch,
    plan: ReplicaPlan,
    of_rows: Callable[[Tensor, MicroBatch], Tensor],
) -> Tensor | None:
    """Token columns [C, T] float32 on the CPU, on the leader; None elsewhere. All ranks of a replica.

    `of_rows`: (hidden_SH, micro-batch) -> [C, R], on the last stage. Zero outside of the batch's response mask.
    """
    world = backend.world
    routes = backend.routes
    packed = pack(batch, plan, world.layout, world.coordinates.cp, device=world.device, with_sources=routes is not None)
    if routes is not None:
        packed = routes.before_log_probs(batch, packed)

    def on_rows(micro: MicroBatch, hidden: Tensor) -> RowsResult:
        columns_CR = of_rows(hidden[0], micro)
        return columns_CR[0], 0, columns_CR

    with torch.no_grad():
        rows = backend.run(packed, on_rows, True)
    if routes is not None:
        routes.after_log_probs(batch, packed)
    return columns_of_rows(rows, packed, world)


def columns_of_rows(rows: Sequence[Tensor], packed: Packed, world: World) -> Tensor | None:
    """The token columns [C, T] float32 on the CPU of `rows`, [C, R] of each micro-batch. As `forward_columns`."""
    if not world.is_last_stage or world.coordinates.tp != 0:
        return None
    columns = [packed.unpack(column) for column in zip(*rows, strict=True)]
    totals = sum_over_cp(torch.stack(columns), world)
    return totals if world.is_leader else None
