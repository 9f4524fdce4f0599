"""`compute_linear_log_probs` in tiles: GEMMs with float32 results, and passes over a tile by
`TileOps`.

The vocabulary is the outer loop, so that each row of the weight's gradient is written once for each
block of rows. The forward keeps a few numbers a row (see `logit_tile_ops`) and the tiles that fit
into the stash; the backward computes the other tiles again. Under tensor parallelism one all-gather
of the packed statistics is the only exchange of the forward, and one sum of the hidden states'
gradient the only one of the backward: it starts before the last tile's product for the weight's
gradient, which hides it. A split sequence is gathered on the way into both.
"""

# S tokens (of this rank's part), R rows, A rows with a gradient, V vocabulary shard (with padding)
# C columns of a tile, H hidden

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rlhf_megatron.ranks.kernels.head_exchange import (
    PackedStatistics,
    PendingGradientSum,
    gather_sequence,
)
from rlhf_megatron.ranks.kernels.logit_tile_ops import RowGradientInputs, RowStatistics, TileOps
from rlhf_megatron.ranks.kernels.matrix_products import (
    WeightGradientAccumulator,
    WeightGradSink,
    add_matrix_product,
    choose_accumulator_dtype,
    choose_operand_dtype,
    multiply_matrices,
)
from rlhf_megatron.ranks.kernels.tile_stash import StashBudget, StashedChunk, TileStash

# cache-sized on a CPU; on a GPU enough to keep the GEMM at full rate
_TILE_ROWS = {"cpu": 1024, "cuda": 8192}
_TILE_COLUMNS = {"cpu": 2048}  # at most; elsewhere as many as `chunk_size` says


def choose_tile_shape(
    num_rows: int, num_columns: int, chunk_size: int, device_type: str
) -> tuple[int, int]:
    """Return (rows, columns) of the largest tile for this many rows and columns of the shard."""
    columns = min(chunk_size, _TILE_COLUMNS.get(device_type, chunk_size), num_columns)
    return max(1, min(_TILE_ROWS.get(device_type, num_rows), num_rows)), max(1, columns)


@dataclass(frozen=True)
class HeadCallSettings:
    """The settings of one call of the head, beside its tensors."""

    num_columns: int  # of the shard; the rest of its rows are padding
    tp_group: ProcessGroup | None  # of at least two ranks
    is_sequence_split: bool
    has_repeated_rows: bool  # several rows may be one token
    chunk_size: int
    with_entropy: bool
    with_sum_squares: bool
    weight_grad_sink: WeightGradSink | None
    stash_bytes: int
    needs_gradient: bool  # else nothing is kept
    tile_ops: TileOps


def compute_chunked_log_probs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    columns_R: Tensor,
    rows_R: Tensor | None,
    inv_temperature_R: Tensor | None,
    settings: HeadCallSettings,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (log-probs, entropies or None, sums of squared probabilities or None) of the rows: see
    `log_prob.compute_linear_log_probs`, which checks the arguments.

    `columns_R` holds the target's column in this shard, outside of [0, num_columns) where another
    shard has the target. `inv_temperature_R` is None for temperature 1.
    """
    out: tuple[Tensor, Tensor | None, Tensor | None] = _ChunkedLogProbFunction.apply(
        hidden_SH, weight_VH, columns_R, rows_R, inv_temperature_R, settings
    )
    return out


class _ChunkedLogProbFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        columns_R: Tensor,
        rows_R: Tensor | None,
        inv_temperature_R: Tensor | None,
        settings: HeadCallSettings,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, entropies and sums of squares tile by tile; keep log Z, and what fits
        into the stash.
        """
        num_rows = len(columns_R)
        tiles = _LogitTiles(
            _gather_hidden_states(hidden_SH, num_rows, settings),
            weight_VH,
            rows_R,
            inv_temperature_R,
            num_rows,
            settings,
        )
        budget = (
            StashBudget.make_for_device(hidden_SH.device.type, settings.stash_bytes)
            if settings.needs_gradient
            else StashBudget(0, 0)
        )
        stash = TileStash(budget)
        packed = PackedStatistics.make_empty(
            num_rows,
            settings.with_entropy,
            settings.with_sum_squares,
            tiles.dtype,
            hidden_SH.device,
        )
        for chunk in tiles.iter_weight_chunks():
            kept = stash.allocate_chunk(
                chunk.first_row, num_rows, chunk.end_row - chunk.first_row, packed.values_KR
            )
            for rows in tiles.iter_row_blocks():
                logits_RC = tiles.compute_logits(rows, chunk)
                stash_RC = max_R = None
                if kept is not None and kept.max_R is not None:
                    stash_RC = kept.values_RC[rows]
                    max_R = kept.max_R[rows]
                elif kept is not None:
                    kept.values_RC[rows] = logits_RC
                inverse_R = (
                    None if tiles.inv_temperature_R is None else tiles.inv_temperature_R[rows]
                )
                statistics = packed.select_rows(rows)
                settings.tile_ops.update_statistics(
                    logits_RC,
                    inverse_R,
                    columns_R[rows],
                    statistics,
                    stash_RC,
                    max_R,
                    chunk.first_row,
                )
        group = settings.tp_group if num_rows > 0 else None
        outcome = _finish_row_statistics(
            packed.select_rows() if group is None else packed.combine_over_group(group)
        )
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
        ctx.call = settings
        ctx.stash = stash
        ctx.set_materialize_grads(False)
        if outcome.sum_squares_R is not None:
            ctx.mark_non_differentiable(outcome.sum_squares_R)
        return outcome.log_probs_R, outcome.entropies_R, outcome.sum_squares_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropies_R: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states and of the weight, tile by tile, from stashed
        or recomputed logits. A sink takes the weight's gradient instead.
        """
        hidden_SH, weight_VH, columns_R, rows_R, inv_temperature_R, log_z_R, rest_R, entropies_R = (
            ctx.saved_tensors
        )
        call = ctx.call
        stash = ctx.stash
        num_rows = len(columns_R)
        gradients = RowGradientInputs(
            log_z_R,
            inv_temperature_R,
            torch.zeros_like(log_z_R)
            if grad_log_probs_R is None
            else grad_log_probs_R.contiguous(),
            None if grad_entropies_R is None else entropies_R,
            None if grad_entropies_R is None else grad_entropies_R.contiguous(),
            rest_R,
        )
        # A rows have a gradient. What the ranks exchange has a shape that does not depend on which.
        active_A = _find_rows_with_gradient(gradients)
        if active_A is not None:
            columns_R = columns_R[active_A]
            gradients = gradients.select_rows(active_A)
        if active_A is None:
            head_rows_A = rows_R
        else:
            head_rows_A = active_A if rows_R is None else rows_R[active_A]
        sequence_SH = _gather_hidden_states(hidden_SH, num_rows, call)
        tiles = _LogitTiles(
            sequence_SH, weight_VH, head_rows_A, gradients.inv_temperature_R, len(columns_R), call
        )
        if tiles.inv_temperature_R is None:
            gradients = replace(gradients, inv_temperature_R=None)

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = (
            _HiddenGradientAccumulator(tiles, active_A, rows_R, num_rows, len(sequence_SH), call)
            if needs_hidden
            else None
        )
        grad_weight = (
            WeightGradientAccumulator(weight_VH, call.weight_grad_sink, tiles.dtype)
            if needs_weight
            else None
        )
        del sequence_SH
        for chunk in tiles.iter_weight_chunks():
            kept = stash.pop_chunk(chunk.first_row)
            for rows in tiles.iter_row_blocks():
                grad_RC = _compute_tile_gradient(
                    tiles,
                    chunk,
                    rows,
                    kept,
                    active_A,
                    columns_R,
                    gradients.select_rows(rows),
                    call.tile_ops,
                )
                if grad_hidden is not None:
                    grad_hidden.add_tile(rows, grad_RC, chunk)
                if grad_weight is not None:
                    grad_weight.add_tile_product(
                        chunk.first_row, chunk.end_row, grad_RC, tiles.hidden_RH[rows]
                    )
                del grad_RC  # before the next one is made
            if grad_weight is not None:
                grad_weight.finish_chunk(chunk.end_row)
        return (
            None if grad_hidden is None else grad_hidden.finish_gradient(hidden_SH),
            None if grad_weight is None else grad_weight.finish_gradient(),
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True)
class _HeadRowResults:
    log_probs_R: Tensor
    log_z_R: Tensor
    log_z_rest_R: Tensor  # what rounding left out
    entropies_R: Tensor | None
    sum_squares_R: Tensor | None


def _finish_row_statistics(statistics: RowStatistics) -> _HeadRowResults:
    """Return log-probs, log Z (and its rounding rest), entropies and sums of squares from the
    statistics over the whole vocabulary.
    """
    log_sum_R = statistics.sum_R.log()
    log_z_R = statistics.max_R + log_sum_R
    return _HeadRowResults(
        (statistics.target_R - statistics.max_R) - log_sum_R,
        log_z_R,
        (statistics.max_R - log_z_R) + log_sum_R,
        None
        if statistics.weighted_R is None
        else log_sum_R - statistics.weighted_R / statistics.sum_R,
        None if statistics.squares_R is None else statistics.squares_R / statistics.sum_R.square(),
    )


@dataclass(frozen=True)
class _WeightChunk:
    """Rows first:last of the weight, as a GEMM operand."""

    first_row: int
    end_row: int
    weight_CH: Tensor
    is_last: bool


class _LogitTiles:
    """The rows and the weight of a pass, as operands of products, and the tiles of their logits.

    The rows are multiplied by the inverse temperature where they keep float32 and no softcap acts
    before the temperature; else the passes over the tiles apply the temperature.
    """

    def __init__(
        self,
        sequence_SH: Tensor,
        weight_VH: Tensor,
        rows_R: Tensor | None,
        inv_temperature_R: Tensor | None,
        num_rows: int,
        settings: HeadCallSettings,
    ) -> None:
        self.dtype = choose_accumulator_dtype(sequence_SH, weight_VH)
        self.operand_dtype = choose_operand_dtype(sequence_SH, weight_VH)
        hidden_RH = sequence_SH if rows_R is None else sequence_SH.index_select(0, rows_R)
        self.hidden_RH = hidden_RH.to(self.operand_dtype)
        self.row_scale_R: Tensor | None = None  # what the rows were multiplied with
        # what the logits are still to be multiplied with
        self.inv_temperature_R = inv_temperature_R
        if (
            inv_temperature_R is not None
            and self.operand_dtype == self.dtype
            and settings.tile_ops.softcap is None
        ):
            self.hidden_RH = self.hidden_RH * inv_temperature_R[:, None]
            self.row_scale_R = inv_temperature_R
            self.inv_temperature_R = None
        self._weight_VH = weight_VH
        self._num_columns = settings.num_columns
        self._rows_per_block, self._columns_per_chunk = choose_tile_shape(
            num_rows, settings.num_columns, settings.chunk_size, sequence_SH.device.type
        )
        self._num_rows = num_rows
        self._logits_buffer = self.hidden_RH.new_empty(
            self._rows_per_block * self._columns_per_chunk, dtype=self.dtype
        )

    def iter_weight_chunks(self) -> Iterator[_WeightChunk]:
        """Yield the weight's unpadded rows in chunks, cast to the operand type; nothing where there
        are no rows of hidden states.
        """
        for first in range(0, self._num_columns if self._num_rows else 0, self._columns_per_chunk):
            last = min(first + self._columns_per_chunk, self._num_columns)
            weight_CH = self._weight_VH[first:last].to(self.operand_dtype)
            yield _WeightChunk(first, last, weight_CH, last == self._num_columns)

    def iter_row_blocks(self) -> Iterator[slice]:
        """Yield slices that cover all rows of hidden states."""
        for first in range(0, self._num_rows, self._rows_per_block):
            yield slice(first, min(first + self._rows_per_block, self._num_rows))

    def compute_logits(self, rows: slice, chunk: _WeightChunk) -> Tensor:
        """Return the logits of a tile, in memory that the next tile overwrites."""
        shape = (rows.stop - rows.start, chunk.end_row - chunk.first_row)
        return multiply_matrices(
            self.hidden_RH[rows],
            chunk.weight_CH.T,
            self._logits_buffer[: shape[0] * shape[1]].view(shape),
        )


class _HiddenGradientAccumulator:
    """The hidden states' gradient of one backward pass: added up over tiles, summed over the tp
    group, and spread over the tokens.
    """

    def __init__(
        self,
        tiles: _LogitTiles,
        active_A: Tensor | None,
        rows_R: Tensor | None,
        num_rows: int,
        num_tokens: int,
        settings: HeadCallSettings,
    ) -> None:
        """Allocate the sum. `active_A` names which of the `num_rows` rows `tiles` has, `rows_R`
        which of the `num_tokens` tokens the rows are.
        """
        self._gradient_AH = torch.zeros_like(tiles.hidden_RH, dtype=tiles.dtype)
        self._row_scale_A = tiles.row_scale_R
        self._active_A = active_A
        self._rows_R = rows_R
        self._num_rows = num_rows
        self._num_tokens = num_tokens
        self._tp_group = settings.tp_group
        self._is_sequence_split = settings.is_sequence_split
        self._has_repeated_rows = settings.has_repeated_rows
        self._pending_sum: PendingGradientSum | None = None

    def add_tile(self, rows: slice, grad_RC: Tensor, chunk: _WeightChunk) -> None:
        """Add a tile's product to the gradient; the last tile starts the reduction over the tp
        group.
        """
        add_matrix_product(self._gradient_AH[rows], grad_RC, chunk.weight_CH)
        if chunk.is_last and rows.stop == len(self._gradient_AH):
            self._start_reduction()

    def _start_reduction(self) -> None:
        """Rescale and spread the gradient, and start its sum over the tp group."""
        gradient = self._gradient_AH
        if self._row_scale_A is not None:
            gradient.mul_(self._row_scale_A[:, None])
        gradient = _scatter_rows(gradient, self._active_A, self._num_rows)
        if self._is_sequence_split:
            gradient = _scatter_rows(
                gradient, self._rows_R, self._num_tokens, self._has_repeated_rows
            )
        self._pending_sum = PendingGradientSum.start_reduction(
            gradient, self._tp_group if self._num_rows else None, self._is_sequence_split
        )

    def finish_gradient(self, hidden_SH: Tensor) -> Tensor:
        """Wait for the sum and return the gradient in the shape and type of `hidden_SH`."""
        if self._num_rows == 0:
            return torch.zeros_like(hidden_SH)
        if self._pending_sum is None:  # no row has a gradient, or the shard is padding
            self._start_reduction()
        assert self._pending_sum is not None
        gradient = self._pending_sum.wait_for_sum()
        if self._has_repeated_rows and not self._is_sequence_split:  # added up before it is rounded
            return _scatter_rows(
                gradient, self._rows_R, self._num_tokens, has_repeated_rows=True
            ).to(hidden_SH.dtype)
        gradient = gradient.to(hidden_SH.dtype)
        return (
            gradient
            if self._is_sequence_split
            else _scatter_rows(gradient, self._rows_R, self._num_tokens)
        )


def _gather_hidden_states(hidden_SH: Tensor, num_rows: int, settings: HeadCallSettings) -> Tensor:
    """Return the hidden states of all tokens, gathered where the sequence is split. Without rows no
    rank exchanges anything, and the part is returned.
    """
    if not settings.is_sequence_split or num_rows == 0:
        return hidden_SH
    assert settings.tp_group is not None
    return gather_sequence(hidden_SH, settings.tp_group)


def _find_rows_with_gradient(gradient_inputs: RowGradientInputs) -> Tensor | None:
    """Return the indices of the rows with a nonzero upstream gradient; None for all rows, on a GPU
    always, because a look at the values would wait for the GPU.
    """
    if gradient_inputs.grad_log_probs_R.is_cuda:
        return None
    is_active_R = gradient_inputs.grad_log_probs_R != 0
    if gradient_inputs.grad_entropies_R is not None:
        is_active_R |= gradient_inputs.grad_entropies_R != 0
    active_A = is_active_R.nonzero()[:, 0]
    return None if len(active_A) == len(is_active_R) else active_A


def _compute_tile_gradient(
    tiles: _LogitTiles,
    chunk: _WeightChunk,
    rows: slice,
    stashed_chunk: StashedChunk | None,
    active_A: Tensor | None,
    columns_R: Tensor,
    gradient_inputs: RowGradientInputs,
    tile_ops: TileOps,
) -> Tensor:
    """Return d loss / d logits of one tile, as a GEMM operand, from the stashed chunk where there
    is one, else from recomputed logits.
    """
    compute_gradient = partial(
        tile_ops.compute_logit_gradient,
        columns_R=columns_R[rows],
        gradient_inputs=gradient_inputs,
        dtype=tiles.operand_dtype,
        first_column=chunk.first_row,
    )
    if stashed_chunk is None:
        return compute_gradient(tiles.compute_logits(rows, chunk))
    stashed_chunk = stashed_chunk.select_rows(rows if active_A is None else active_A[rows])
    if stashed_chunk.max_R is None:
        return compute_gradient(stashed_chunk.values_RC)
    return tile_ops.compute_logit_gradient_from_stash(
        stashed_chunk.values_RC,
        stashed_chunk.max_R,
        columns_R[rows],
        gradient_inputs,
        tiles.operand_dtype,
        chunk.first_row,
    )


def _scatter_rows(
    rows_XH: Tensor, index_X: Tensor | None, num_rows: int, has_repeated_rows: bool = False
) -> Tensor:
    """Return [num_rows, H] with the rows [X, H] at `index_X` and zeros elsewhere; with
    `has_repeated_rows` rows of one index are added up. Return the rows as they are where `index_X`
    is None.
    """
    if index_X is None:
        return rows_XH
    whole = rows_XH.new_zeros(num_rows, rows_XH.shape[1])
    return (
        whole.index_add_(0, index_X, rows_XH)
        if has_repeated_rows
        else whole.index_copy_(0, index_X, rows_XH)
    )
