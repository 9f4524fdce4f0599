"""Passes without a backward part: token columns of a shard, through any trainer backend."""
# S tokens of this rank (its part of the sequence under sequence parallelism), R rows, C columns, T
# tokens of the shard

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.data.batch import CriticValues, TokenBatch, TokenLogProbs, TopLogProbs
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.kernels.log_prob import HeadOutputs
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.backend_protocols import ModelBackend, PolicyHead, RowsResult
from rlhf_megatron.ranks.workers.pipeline_passes import sum_over_cp
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch, pack_batch


@dataclass(frozen=True)
class RowLogProbs:
    """A function (hidden_SH, micro-batch) -> log-probs and entropies of the target tokens. Call it
    on the last stage, on all tp ranks.

    `compute_outputs` returns all requested outputs.
    """

    head: PolicyHead
    temperature: float
    with_entropy: bool = False
    with_sum_squares: bool = False

    def __call__(self, hidden_SH: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Return (log-probs, entropies or None) of the target tokens of a micro-batch's rows."""
        found = self.compute_outputs(hidden_SH, micro_batch)
        return found.log_probs_R, found.entropies_R

    def compute_outputs(self, hidden_SH: Tensor, micro_batch: MicroBatch) -> HeadOutputs:
        """Return all requested outputs of the rows: log-probs, entropies, sums of squared
        probabilities.
        """
        return self.head.compute_outputs(
            hidden_SH, micro_batch, self.temperature, self.with_entropy, self.with_sum_squares
        )


def compute_log_probs(
    backend: ModelBackend, row_log_probs: RowLogProbs, batch: TokenBatch, plan: ReplicaPlan
) -> TokenLogProbs | None:
    """Return the log-probs of the batch's tokens, with entropies and sums of squared probabilities
    where `row_log_probs` requests them, on the leader; None elsewhere. All ranks of a replica must
    call it.
    """

    def stack_row_columns(hidden_SH: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the outputs of the rows that are not None, stacked as [C, R]."""
        return torch.stack(
            [
                column_R
                for column_R in row_log_probs.compute_outputs(hidden_SH, micro_batch)
                if column_R is not None
            ]
        )

    columns = compute_token_columns(backend, batch, plan, stack_row_columns)
    if columns is None:
        return None
    others = iter(columns[1:])
    return TokenLogProbs(
        log_probs=columns[0],
        entropies=next(others) if row_log_probs.with_entropy else None,
        sum_squares=next(others) if row_log_probs.with_sum_squares else None,
    )


def compute_values(
    backend: ModelBackend, batch: TokenBatch, plan: ReplicaPlan
) -> CriticValues | None:
    """Return the values of the batch's tokens, of a model with a value head, on the leader; None
    elsewhere. All ranks of a replica must call it.
    """

    def compute_row_values(hidden_SH: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the values of the rows as [1, R]."""
        return backend.compute_values(hidden_SH, micro_batch.rows)[None]

    columns = compute_token_columns(backend, batch, plan, compute_row_values)
    return None if columns is None else CriticValues(columns[0])


def compute_top_log_probs(
    backend: ModelBackend,
    head: PolicyHead,
    batch: TokenBatch,
    plan: ReplicaPlan,
    temperature: float,
    num_top: int,
) -> TopLogProbs | None:
    """Return the `num_top` likeliest tokens of each position and their log-probs, on the leader;
    None elsewhere. All ranks of a replica must call it.
    """

    def compute_row_top_log_probs(hidden_SH: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return ids and log-probs of the rows' likeliest tokens as [2 x `num_top`, R]."""
        ids_RK, log_probs_RK = head.find_likeliest_tokens(
            hidden_SH, micro_batch, temperature, num_top
        )
        # ids are whole numbers in float32, too: no vocabulary has 2^24
        return torch.cat([ids_RK, log_probs_RK], -1).T

    columns = compute_token_columns(backend, batch, plan, compute_row_top_log_probs)
    if columns is None:
        return None
    return TopLogProbs(
        columns[:num_top].T.to(torch.int32).contiguous(), columns[num_top:].T.contiguous()
    )


def compute_token_columns(
    backend: ModelBackend,
    batch: TokenBatch,
    plan: ReplicaPlan,
    compute_rows: Callable[[Tensor, MicroBatch], Tensor],
) -> Tensor | None:
    """Run the model forward over the batch, and return token columns [C, T] float32 on the CPU, on
    the leader; None elsewhere. All ranks of a replica must call it.

    `compute_rows` maps (hidden_SH, micro-batch) to [C, R], on the last stage. The columns are zero
    outside of the batch's response mask.
    """
    world = backend.world
    routes = backend.routes
    packed = pack_batch(
        batch,
        plan,
        world.layout,
        world.coordinates.cp,
        device=world.device,
        with_source_tokens=routes is not None,
    )
    if routes is not None:
        packed = routes.prepare_log_probs_pass(batch, packed)

    def collect_columns(micro_batch: MicroBatch, hidden_states: Tensor) -> RowsResult:
        """Return the rows' columns as the collected value; loss and token count have no use."""
        columns_CR = compute_rows(hidden_states[0], micro_batch)
        return columns_CR[0], 0, columns_CR

    with torch.no_grad():
        rows = backend.run_passes(packed, collect_columns, True)
    if routes is not None:
        routes.store_recorded_routes(batch, packed)
    return gather_token_columns(rows, packed, world)


def gather_token_columns(
    row_columns: Sequence[Tensor], packed_batch: PackedBatch, world: World
) -> Tensor | None:
    """Return the token columns [C, T] float32 on the CPU, on the leader, from `row_columns`, [C, R]
    of each micro-batch; None elsewhere. All cp ranks of the last stage must call it.
    """
    if not world.is_last_stage or world.coordinates.tp != 0:
        return None
    columns = [packed_batch.unpack_rows(column) for column in zip(*row_columns, strict=True)]
    totals = sum_over_cp(torch.stack(columns), world)
    return totals if world.is_leader else None
