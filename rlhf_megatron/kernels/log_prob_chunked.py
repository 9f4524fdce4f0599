"""`linear_log_prob` in tiles: GEMMs with float32 results and passes over a tile by `TileOps`.

The vocabulary is the outer loop, so that each row of the weight's gradient is written once for each block of rows. The
forward keeps a few numbers a row (see `tile_ops`) and what fits into the stash; the backward computes the other tiles
again. Under tensor parallelism one all-gather of the packed statistics is the only exchange of the forward, and one sum
of the hidden states' gradient the only one of the backward: it starts before the last tile's product for the weight's
gradient, which hides it. A split sequence is gathered on the way into both.
"""

# S tokens (of this rank's part), R rows, A rows with a gradient, V vocabulary shard (with padding)
# C columns of a tile, H hidden

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rlhf_megatron.kernels.head_exchange import GradientSum, PackedStatistics, gather_sequence
from rlhf_megatron.kernels.products import (
    WeightGradient,
    WeightGradSink,
    accumulator_dtype,
    add_product,
    multiply,
    operand_dtype,
)
from rlhf_megatron.kernels.stash import Budget, KeptChunk, Stash
from rlhf_megatron.kernels.tile_ops import RowGradients, RowStatistics, TileOps

_TILE_ROWS = {"cpu": 1024, "cuda": 8192}  # cache-sized on a CPU; on a GPU enough to keep the GEMM at full rate
_TILE_COLUMNS = {"cpu": 2048}  # at most; elsewhere as many as `chunk_size` says


def tile_shape(num_rows: int, num_columns: int, chunk_size: int, device_type: str) -> tuple[int, int]:
    """(rows, columns) of the largest tile that is made of so many rows and columns of the shard."""
    columns = min(chunk_size, _TILE_COLUMNS.get(device_type, chunk_size), num_columns)
    return max(1, min(_TILE_ROWS.get(device_type, num_rows), num_rows)), max(1, columns)


@dataclass(frozen=True)
class HeadCall:
    """The settings of one call of the head, beside its tensors."""

    num_columns: int  # of the shard; the rest of its rows are padding
    tp_group: ProcessGroup | None  # of at least two ranks
    is_sequence_split: bool
    has_repeats: bool  # several rows may be one token
    chunk_size: int
    with_entropy: bool
    with_sum_squares: bool
    sink: WeightGradSink | None
    stash_bytes: int
    has_gradient: bool  # else nothing is kept
    ops: TileOps


def chunked_linear_log_prob(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    columns_R: Tensor,
    rows_R: Tensor | None,
    inv_temperature_R: Tensor | None,
    call: HeadCall,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `log_prob.linear_log_prob`, which checks the arguments.

    `columns_R`: the target's column in this shard, outside of [0, num_columns) where another shard has it.
    `inv_temperature_R`: None for temperature 1.
    """
    out: tuple[Tensor, Tensor | None, Tensor | None] = _LinearLogProb.apply(
        hidden_SH, weight_VH, columns_R, rows_R, inv_temperature_R, call
    )
    return out


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        columns_R: Tensor,
        rows_R: Tensor | None,
        inv_temperature_R: Tensor | None,
        call: HeadCall,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        num_rows = len(columns_R)
        tiles = _Tiles(_sequence(hidden_SH, num_rows, call), weight_VH, rows_R, inv_temperature_R, num_rows, call)
        budget = Budget.on(hidden_SH.device.type, call.stash_bytes) if call.has_gradient else Budget(0, 0)
        stash = Stash(budget)
        packed = PackedStatistics.of_nothing(
            num_rows, call.with_entropy, call.with_sum_squares, tiles.dtype, hidden_SH.device
        )
        for chunk in tiles.chunks():
            kept = stash.make_room(chunk.first, num_rows, chunk.last - chunk.first, packed.values_KR)
            for rows in tiles.blocks():
                logits_RC = tiles.logits(rows, chunk)
                stash_RC = max_R = None
                if kept is not None and kept.max_R is not None:
                    stash_RC, max_R = kept.values_RC[rows], kept.max_R[rows]
                elif kept is not None:
                    kept.values_RC[rows] = logits_RC
                inverse_R = None if tiles.inv_temperature_R is None else tiles.inv_temperature_R[rows]
                statistics = packed.rows(rows)
                call.ops.update(logits_RC, inverse_R, columns_R[rows], statistics, stash_RC, max_R, chunk.first)
        group = call.tp_group if num_rows > 0 else None
        outcome = _outcome(packed.rows() if group is None else packed.over(group))
        ctx.save_for_backward(
            hidden_SH,
            weight_VH,
            columns_R,
            rows_R,
            inv_temperature_R,
            outcome.log_z_R,
            outcome.log_z_rest_R,
            outcome.entropies_R,
        )
        ctx.call, ctx.stash = call, stash
        ctx.set_materialize_grads(False)
        if outcome.sum_squares_R is not None:
            ctx.mark_non_differentiable(outcome.sum_squares_R)
        return outcome.log_probs_R, outcome.entropies_R, outcome.sum_squares_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropies_R: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, columns_R, rows_R, inv_temperature_R, log_z_R, rest_R, entropies_R = ctx.saved_tensors
        call, stash = ctx.call, ctx.stash
        num_rows = len(columns_R)
        gradients = RowGradients(
            log_z_R,
            inv_temperature_R,
            torch.zeros_like(log_z_R) if grad_log_probs_R is None else grad_log_probs_R.contiguous(),
            None if grad_entropies_R is None else entropies_R,
            None if grad_entropies_R is None else grad_entropies_R.contiguous(),
            rest_R,
        )
        # A rows have a gradient. What the ranks exchange has a shape that does not depend on which.
        active_A = _rows_with_gradient(gradients)
        if active_A is not None:
            columns_R, gradients = columns_R[active_A], gradients.of(active_A)
        head_rows_A = rows_R if active_A is None else (active_A if rows_R is None else rows_R[active_A])
        sequence_SH = _sequence(hidden_SH, num_rows, call)
        tiles = _Tiles(sequence_SH, weight_VH, head_rows_A, gradients.inv_temperature_R, len(columns_R), call)
        if tiles.inv_temperature_R is None:
            gradients = replace(gradients, inv_temperature_R=None)

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = (
            _HiddenGradient(tiles, active_A, rows_R, num_rows, len(sequence_SH), call) if needs_hidden else None
        )
        grad_weight = WeightGradient(weight_VH, call.sink, tiles.dtype) if needs_weight else None
        del sequence_SH
        for chunk in tiles.chunks():
            kept = stash.take(chunk.first)
            for rows in tiles.blocks():
                grad_RC = _grad_tile(tiles, chunk, rows, kept, active_A, columns_R, gradients.of(rows), call.ops)
                if grad_hidden is not None:
                    grad_hidden.add(rows, grad_RC, chunk)
                if grad_weight is not None:
                    grad_weight.add(chunk.first, chunk.last, grad_RC, tiles.hidden_RH[rows])
                del grad_RC  # before the next one is made
            if grad_weight is not None:
                grad_weight.end_chunk(chunk.last)
        return (
            None if grad_hidden is None else grad_hidden.result(hidden_SH),
            None if grad_weight is None else grad_weight.result(),
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True)
class _Outcome:
    log_probs_R: Tensor
    log_z_R: Tensor
    log_z_rest_R: Tensor  # what rounding left out
    entropies_R: Tensor | None
    sum_squares_R: Tensor | None


def _outcome(of: RowStatistics) -> _Outcome:
    log_sum_R = of.sum_R.log()
    log_z_R = of.max_R + log_sum_R
    return _Outcome(
        (of.target_R - of.max_R) - log_sum_R,
        log_z_R,
        (of.max_R - log_z_R) + log_sum_R,
        None if of.weighted_R is None else log_sum_R - of.weighted_R / of.sum_R,
        None if of.squares_R is None else of.squares_R / of.sum_R.square(),
    )


@dataclass(frozen=True)
class _Chunk:
    """Rows first:last of the weight, as a GEMM operand."""

    first: int
    last: int
    weight_CH: Tensor
    is_last: bool


class _Tiles:
    """The rows that a pass works on and the weight, as they go into products; the tiles of their logits.

    The temperature goes into the rows where they keep float32 and nothing caps the logits before it divides them; else
    it is left to the passes over the tiles.
    """

    def __init__(
        self,
        sequence_SH: Tensor,
        weight_VH: Tensor,
        rows_R: Tensor | None,
        inv_temperature_R: Tensor | None,
        num_rows: int,
        call: HeadCall,
    ) -> None:
        self.dtype = accumulator_dtype(sequence_SH, weight_VH)
        self.operand_dtype = operand_dtype(sequence_SH, weight_VH)
        hidden_RH = sequence_SH if rows_R is None else sequence_SH.index_select(0, rows_R)
        self.hidden_RH = hidden_RH.to(self.operand_dtype)
        self.row_scale_R: Tensor | None = None  # what the rows were multiplied with
        self.inv_temperature_R = inv_temperature_R  # what the logits are still to be multiplied with
        if inv_temperature_R is not None and self.operand_dtype == self.dtype and call.ops.softcap is None:
            self.hidden_RH = self.hidden_RH * inv_temperature_R[:, None]
            self.row_scale_R, self.inv_temperature_R = inv_temperature_R, None
        self._weight_VH = weight_VH
        self._num_columns = call.num_columns
        self._block_size, self._chunk_size = tile_shape(
            num_rows, call.num_columns, call.chunk_size, sequence_SH.device.type
        )
        self._num_rows = num_rows
        self._logits = self.hidden_RH.new_empty(self._block_size * self._chunk_size, dtype=self.dtype)

    def chunks(self) -> Iterator[_Chunk]:
        for first in range(0, self._num_columns if self._num_rows else 0, self._chunk_size):
            last = min(first + self._chunk_size, self._num_columns)
            weight_CH = self._weight_VH[first:last].to(self.operand_dtype)
            yield _Chunk(first, last, weight_CH, last == self._num_columns)

    def blocks(self) -> Iterator[slice]:
        for first in range(0, self._num_rows, self._block_size):
            yield slice(first, min(first + self._block_size, self._num_rows))

    def logits(self, rows: slice, chunk: _Chunk) -> Tensor:
        """Compute the logits of a tile, in the same memory for every tile."""
        shape = (rows.stop - rows.start, chunk.last - chunk.first)
        return multiply(self.hidden_RH[rows], chunk.weight_CH.T, self._logits[: shape[0] * shape[1]].view(shape))


class _HiddenGradient:
    """The hidden states' gradient of one backward pass: added up over tiles, summed over the tp group, spread."""

    def __init__(
        self,
        tiles: _Tiles,
        active_A: Tensor | None,
        rows_R: Tensor | None,
        num_rows: int,
        num_tokens: int,
        call: HeadCall,
    ) -> None:
        """`active_A`: which of the `num_rows` rows `tiles` has; `rows_R`: which of the `num_tokens` tokens they are."""
        self._gradient_AH = torch.zeros_like(tiles.hidden_RH, dtype=tiles.dtype)
        self._row_scale_A = tiles.row_scale_R
        self._active_A, self._rows_R = active_A, rows_R
        self._num_rows, self._num_tokens = num_rows, num_tokens
        self._group, self._is_split = call.tp_group, call.is_sequence_split
        self._has_repeats = call.has_repeats
        self._sum: GradientSum | None = None

    def add(self, rows: slice, grad_RC: Tensor, chunk: _Chunk) -> None:
        add_product(self._gradient_AH[rows], grad_RC, chunk.weight_CH)
        if chunk.is_last and rows.stop == len(self._gradient_AH):
            self._start()

    def _start(self) -> None:
        gradient = self._gradient_AH
        if self._row_scale_A is not None:
            gradient.mul_(self._row_scale_A[:, None])
        gradient = _spread(gradient, self._active_A, self._num_rows)
        if self._is_split:
            gradient = _spread(gradient, self._rows_R, self._num_tokens, self._has_repeats)
        self._sum = GradientSum.start(gradient, self._group if self._num_rows else None, self._is_split)

    def result(self, hidden_SH: Tensor) -> Tensor:
        if self._num_rows == 0:
            return torch.zeros_like(hidden_SH)
        if self._sum is None:  # no row has a gradient, or the shard is padding
            self._start()
        assert self._sum is not None
        gradient = self._sum.wait()
        if self._has_repeats and not self._is_split:  # added up before it is rounded
            return _spread(gradient, self._rows_R, self._num_tokens, has_repeats=True).to(hidden_SH.dtype)
        gradient = gradient.to(hidden_SH.dtype)
        return gradient if self._is_split else _spread(gradient, self._rows_R, self._num_tokens)


def _sequence(hidden_SH: Tensor, num_rows: int, call: HeadCall) -> Tensor:
    """The hidden states of all tokens. Nobody exchanges anything where there are no rows."""
    if not call.is_sequence_split or num_rows == 0:
        return hidden_SH
    assert call.tp_group is not None
    return gather_sequence(hidden_SH, call.tp_group)


def _rows_with_gradient(gradients: RowGradients) -> Tensor | None:
    """Indices of the rows that have one; None: all, on a GPU without a look, since the host would wait for it."""
    if gradients.grad_log_probs_R.is_cuda:
        return None
    is_active_R = gradients.grad_log_probs_R != 0
    if gradients.grad_entropies_R is not None:
        is_active_R |= gradients.grad_entropies_R != 0
    active_A = is_active_R.nonzero()[:, 0]
    return None if len(active_A) == len(is_active_R) else active_A


def _grad_tile(
    tiles: _Tiles,
    chunk: _Chunk,
    rows: slice,
    kept: KeptChunk | None,
    active_A: Tensor | None,
    columns_R: Tensor,
    gradients: RowGradients,
    ops: TileOps,
) -> Tensor:
    """d loss / d logits of one tile, as a GEMM operand."""
    of_rows = (columns_R[rows], gradients, tiles.operand_dtype, chunk.first)
    if kept is None:
        return ops.grad_logits(tiles.logits(rows, chunk), *of_rows)
    kept = kept.of(rows if active_A is None else active_A[rows])
    if kept.max_R is None:
        return ops.grad_logits(kept.values_RC, *of_rows)
    return ops.grad_logits_from_stash(kept.values_RC, kept.max_R, *of_rows)


def _spread(rows_XH: Tensor, index_X: Tensor | None, num_rows: int, has_repeats: bool = False) -> Tensor:
    """[X, H] -> [num_rows, H], zero where `index_X` does not point; None: already all of them."""
    if index_X is None:
        return rows_XH
    whole = rows_XH.new_zeros(num_rows, rows_XH.shape[1])
    return whole.index_add_(0, index_X, rows_XH) if has_repeats else whole.index_copy_(0, index_X, rows_XH)
