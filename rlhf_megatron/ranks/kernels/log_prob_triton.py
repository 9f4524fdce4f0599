"""`TritonTileOps`: the operations of `TorchTileOps` on a tile of logits, in Triton kernels that
read the tile once.

A program has one row (a few, of a narrow tile) and goes over its columns in blocks; where the whole
row fits in one block it stays in registers. Nothing is shared between programs and no sum depends
on their order: the same input gives the same bits. Of what differs from call to call only the sizes
of the blocks are compile-time constants; `num_rows` is not specialised at all, so that other
numbers of rows and tokens compile nothing.

All arithmetic is float32, without contraction to fused multiply-adds: e^(z - m) of the largest z
must be exactly 1.
"""

# R rows of a tile or of a program, C columns of a tile, B columns of a block

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.ranks.kernels.logit_tile_ops import (
    MIN_LOGIT,
    STASH_SCALE,
    RowGradientInputs,
    RowStatistics,
    TorchTileOps,
)

MAX_BLOCK = 8192  # columns held in registers at a time: 32 float32 a thread in 8 warps
MIN_ELEMENTS = 1024  # of a program: narrow tiles have several rows in one
_COLUMNS_OF_A_WARP = 1024

_MIN = tl.constexpr(MIN_LOGIT)
_SCALE = tl.constexpr(STASH_SCALE)
_LOG_SCALE = tl.constexpr(math.log(STASH_SCALE))
_SMALLEST = tl.constexpr(2.0**-24)  # above 0 in float16

# A row's numbers are read one by one, so their alignment, which the number of rows decides, makes
# no other kernel.
_UPDATE_ROWS = [
    "inv_temperatures",
    "columns",
    "stash_maxima",
    "maxima",
    "sums",
    "targets",
    "weighteds",
    "squares",
]
_GRAD_ROWS = [
    *_UPDATE_ROWS[:3],
    "log_zs",
    "log_z_rests",
    "grad_log_probs",
    "entropies",
    "grad_entropies",
]


class TritonTileOps:
    """`logit_tile_ops.TileOps` in Triton kernels. Tiles in float64 go to `TorchTileOps`, because
    these kernels compute in float32.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap
        self._torch_tile_ops = TorchTileOps(softcap)

    def update_statistics(
        self,
        logits_RC: Tensor,
        inv_temperature_R: Tensor | None,
        columns_R: Tensor,
        statistics: RowStatistics,
        stash_RC: Tensor | None = None,
        stash_max_R: Tensor | None = None,
        first_column: int = 0,
    ) -> None:
        """Merge a tile into `statistics`, in place: see `TileOps`. `logits_RC` is left as it is,
        and may also be bfloat16 or float16: a tile that another GEMM rounded.
        """
        if logits_RC.dtype == torch.float64:
            self._torch_tile_ops.update_statistics(
                logits_RC,
                inv_temperature_R,
                columns_R,
                statistics,
                stash_RC,
                stash_max_R,
                first_column,
            )
            return
        if logits_RC.numel() == 0:
            return
        logits_RC = _make_rows_contiguous(logits_RC)
        grid, sizes = _choose_launch_sizes(logits_RC)
        running_rows = (
            statistics.max_R,
            statistics.sum_R,
            statistics.target_R,
            statistics.weighted_R,
            statistics.squares_R,
        )
        assert len({(row.stride(0), row.dtype) for row in running_rows if row is not None}) == 1, (
            "statistics are rows of one tensor"
        )
        assert (stash_RC is None) == (stash_max_R is None), "a stash comes with its maxima"
        assert stash_RC is None or (stash_RC.dtype == torch.float16 and stash_RC.stride(1) == 1), (
            "no such stash"
        )
        _update_statistics_kernel[grid](
            logits_RC,
            logits_RC.stride(0),
            _make_contiguous(inv_temperature_R),
            _make_contiguous(columns_R),
            first_column,
            statistics.max_R,
            statistics.sum_R,
            statistics.target_R,
            statistics.weighted_R,
            statistics.squares_R,
            statistics.max_R.stride(0),
            stash_RC,
            0 if stash_RC is None else stash_RC.stride(0),
            stash_max_R,
            0 if stash_max_R is None else stash_max_R.stride(0),
            *logits_RC.shape,
            self.softcap,
            **sizes,
        )

    def compute_logit_gradient(
        self,
        logits_RC: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        """Return the gradient of a tile's logits in `dtype`, in the memory of `logits_RC` where
        that has `dtype`.
        """
        if logits_RC.dtype == torch.float64:
            return self._torch_tile_ops.compute_logit_gradient(
                logits_RC, columns_R, gradient_inputs, dtype, first_column
            )
        logits_RC = _make_rows_contiguous(logits_RC)
        grad_RC = (
            logits_RC if logits_RC.dtype == dtype else torch.empty_like(logits_RC, dtype=dtype)
        )
        _launch_gradient_kernel(
            logits_RC, None, columns_R, first_column, gradient_inputs, grad_RC, self.softcap
        )
        return grad_RC

    def compute_logit_gradient_from_stash(
        self,
        stash_RC: Tensor,
        stash_max_R: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        """Return the gradient of a tile's logits from the stash, in the memory of `stash_RC` where
        `dtype` has 16 bits.
        """
        if gradient_inputs.log_z_R.dtype == torch.float64:
            return self._torch_tile_ops.compute_logit_gradient_from_stash(
                stash_RC, stash_max_R, columns_R, gradient_inputs, dtype, first_column
            )
        assert stash_RC.stride(1) == 1, "rows of a stash are dense"
        grad_RC = (
            stash_RC.view(dtype) if dtype.itemsize == 2 else torch.empty_like(stash_RC, dtype=dtype)
        )
        _launch_gradient_kernel(
            stash_RC, stash_max_R, columns_R, first_column, gradient_inputs, grad_RC
        )
        return grad_RC


def is_triton_interpreted() -> bool:
    """Return whether TRITON_INTERPRET was set when this module was imported, so that kernels run in
    Python, on the CPU's memory.
    """
    return not isinstance(_update_statistics_kernel, triton.JITFunction)


def measure_smallest_tile_error(device: torch.device) -> float:
    """Return the largest error of the statistics kernel on a tile of three logits, against results
    by hand, for `triton_support.try_triton_kernel`: compile and launch one kernel.
    """
    logits_RC = torch.tensor([[1.0, 2.0, 5.0]], device=device).log()  # probabilities 1/8, 2/8, 5/8
    max_R, sum_R, target_R = torch.tensor(
        [[MIN_LOGIT], [0.0], [-torch.inf]], device=device
    ).unbind()
    columns_R = torch.tensor([1], device=device)
    TritonTileOps().update_statistics(
        logits_RC, None, columns_R, RowStatistics(max_R, sum_R, target_R, None, None)
    )
    found = torch.cat([max_R.exp() * sum_R, target_R.exp()])
    return float((found - torch.tensor([8.0, 2.0], device=device)).abs().max())


def _launch_gradient_kernel(
    tile_RC: Tensor,
    stash_max_R: Tensor | None,
    columns_R: Tensor,
    first_column: int,
    gradient_inputs: RowGradientInputs,
    grad_RC: Tensor,
    softcap: float | None = None,
) -> None:
    """Write the gradient of a tile of logits, or of a stashed tile where `stash_max_R` is not None,
    to `grad_RC`.
    """
    if tile_RC.numel() == 0:
        return
    grid, sizes = _choose_launch_sizes(tile_RC)
    is_entropy_used = (
        gradient_inputs.entropies_R is not None and gradient_inputs.grad_entropies_R is not None
    )
    _logit_gradient_kernel[grid](
        tile_RC,
        tile_RC.stride(0),
        _make_contiguous(stash_max_R),
        _make_contiguous(columns_R),
        first_column,
        _make_contiguous(gradient_inputs.log_z_R),
        _make_contiguous(gradient_inputs.log_z_rest_R),
        _make_contiguous(gradient_inputs.inv_temperature_R),
        _make_contiguous(gradient_inputs.grad_log_probs_R),
        _make_contiguous(gradient_inputs.entropies_R) if is_entropy_used else None,
        _make_contiguous(gradient_inputs.grad_entropies_R) if is_entropy_used else None,
        grad_RC,
        grad_RC.stride(0),
        *tile_RC.shape,
        softcap,
        **sizes,
    )


def _choose_launch_sizes(tile_RC: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return (grid, constants) of a launch. The constants depend on the number of columns alone, by
    powers of two, so few kernels are compiled.
    """
    num_rows, num_columns = tile_RC.shape
    block = min(triton.next_power_of_2(num_columns), MAX_BLOCK)
    rows_of_program = max(MIN_ELEMENTS // block, 1)
    sizes = {
        "NUM_ROWS": rows_of_program,
        "BLOCK": block,
        "IS_ONE_BLOCK": num_columns <= block,
        "num_warps": max(block * rows_of_program // _COLUMNS_OF_A_WARP, 1),
        "enable_fp_fusion": False,
    }
    return (triton.cdiv(num_rows, rows_of_program),), sizes


def _make_contiguous(values_R: Tensor | None) -> Tensor | None:
    """Return a row column with its numbers next to each other in memory, or None for None: a
    temperature may be one number expanded to all rows.
    """
    return None if values_R is None else values_R.contiguous()


def _make_rows_contiguous(tile_RC: Tensor) -> Tensor:
    """Return the tile with the columns of a row next to each other in memory."""
    return tile_RC if tile_RC.stride(1) == 1 else tile_RC.contiguous()


@triton.jit
def _compute_tile_pointers(tile, stride, rows_R, columns_B):
    """Return the pointers [R, B] to these rows and columns of a tile."""
    return tile + rows_R[:, None] * stride + columns_B[None, :]


@triton.jit
def _compute_tanh(x):
    """Compute tanh by e^(-2 |x|), which does not overflow; exact to the last bits of 1."""
    below = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - below) / (1.0 + below)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load_scaled_logits(
    logits, stride, rows_R, is_row_R, columns_B, num_columns, softcap, inv_temperature_R
):
    """Return z (capped logits / temperature) of a block, float32; the least float where there is no
    logit, so that it has no probability.
    """
    is_here_RB = is_row_R[:, None] & (columns_B < num_columns)[None, :]
    logits_RB = tl.load(
        _compute_tile_pointers(logits, stride, rows_R, columns_B), mask=is_here_RB, other=0.0
    ).to(tl.float32)
    if softcap is not None:
        logits_RB = softcap * _compute_tanh(logits_RB / softcap)
    return tl.where(is_here_RB, logits_RB * inv_temperature_R[:, None], _MIN)


@triton.jit
def _store_stash_block(stash, stride, rows_R, is_row_R, columns_B, num_columns, exp_RB):
    """Store STASH_SCALE e^(z - max) of a block in the stash as float16."""
    is_here_RB = is_row_R[:, None] & (columns_B < num_columns)[None, :]
    tl.store(
        _compute_tile_pointers(stash, stride, rows_R, columns_B),
        (exp_RB * _SCALE).to(tl.float16),
        mask=is_here_RB,
    )


@triton.jit(
    do_not_specialize=["first", "num_rows", "running_stride", "stash_max_stride"],
    do_not_specialize_on_alignment=_UPDATE_ROWS,
)
def _update_statistics_kernel(
    logits,
    logits_stride,
    inv_temperatures,
    columns,
    first,
    maxima,
    sums,
    targets,
    weighteds,
    squares,
    running_stride,
    stash,
    stash_stride,
    stash_maxima,
    stash_max_stride,
    num_rows,
    num_columns,
    softcap,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr,
):
    """Merge the statistics of a tile's rows into the running ones, and fill the stash where there
    is one.
    """
    # 64 bits: row * stride passes 2^31
    rows_R = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    is_row_R = rows_R < num_rows
    inv_temperature_R = tl.full([NUM_ROWS], 1.0, tl.float32)
    if inv_temperatures is not None:
        inv_temperature_R = tl.load(inv_temperatures + rows_R, mask=is_row_R, other=1.0)
    running_R = rows_R * running_stride

    # The statistics of this tile alone, then one merge into the running ones: the stash wants the
    # tile's own maximum.
    max_R = tl.full([NUM_ROWS], _MIN, tl.float32)
    sum_R = tl.zeros([NUM_ROWS], tl.float32)
    weighted_R = tl.zeros([NUM_ROWS], tl.float32)
    square_R = tl.zeros([NUM_ROWS], tl.float32)
    for start in range(0, 1 if IS_ONE_BLOCK else num_columns, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        z_RB = _load_scaled_logits(
            logits,
            logits_stride,
            rows_R,
            is_row_R,
            columns_B,
            num_columns,
            softcap,
            inv_temperature_R,
        )
        new_max_R = tl.maximum(max_R, tl.max(z_RB, 1))
        shift_R = max_R - new_max_R
        scale_R = tl.exp(shift_R)
        below_RB = z_RB - new_max_R[:, None]
        exp_RB = tl.exp(below_RB)
        if weighteds is not None:
            weighted_R = (weighted_R + shift_R * sum_R) * scale_R + tl.sum(below_RB * exp_RB, 1)
        if squares is not None:
            square_R = square_R * (scale_R * scale_R) + tl.sum(exp_RB * exp_RB, 1)
        sum_R = sum_R * scale_R + tl.sum(exp_RB, 1)
        max_R = new_max_R
        if IS_ONE_BLOCK:  # noqa: SIM102
            if stash is not None:
                _store_stash_block(
                    stash, stash_stride, rows_R, is_row_R, columns_B, num_columns, exp_RB
                )

    if stash is not None:
        tl.store(stash_maxima + rows_R * stash_max_stride, max_R, mask=is_row_R)
        if not IS_ONE_BLOCK:  # only now is the maximum known; the row is still in the cache
            for start in range(0, num_columns, BLOCK):
                columns_B = start + tl.arange(0, BLOCK)
                z_RB = _load_scaled_logits(
                    logits,
                    logits_stride,
                    rows_R,
                    is_row_R,
                    columns_B,
                    num_columns,
                    softcap,
                    inv_temperature_R,
                )
                exp_RB = tl.exp(z_RB - max_R[:, None])
                _store_stash_block(
                    stash, stash_stride, rows_R, is_row_R, columns_B, num_columns, exp_RB
                )

    column_R = tl.load(columns + rows_R, mask=is_row_R, other=-1) - first
    is_target_R = is_row_R & (column_R >= 0) & (column_R < num_columns)
    target_R = tl.load(logits + rows_R * logits_stride + column_R, mask=is_target_R, other=0.0).to(
        tl.float32
    )
    if softcap is not None:
        target_R = softcap * _compute_tanh(target_R / softcap)
    tl.store(targets + running_R, target_R * inv_temperature_R, mask=is_target_R)

    old_max_R = tl.load(maxima + running_R, mask=is_row_R, other=_MIN)
    old_sum_R = tl.load(sums + running_R, mask=is_row_R, other=0.0)
    new_max_R = tl.maximum(old_max_R, max_R)
    old_shift_R = old_max_R - new_max_R
    shift_R = max_R - new_max_R
    old_scale_R = tl.exp(old_shift_R)
    scale_R = tl.exp(shift_R)
    if weighteds is not None:
        old_weighted_R = tl.load(weighteds + running_R, mask=is_row_R, other=0.0)
        old_weighted_R = (old_weighted_R + old_shift_R * old_sum_R) * old_scale_R
        weighted_R = (weighted_R + shift_R * sum_R) * scale_R
        tl.store(weighteds + running_R, old_weighted_R + weighted_R, mask=is_row_R)
    if squares is not None:
        old_square_R = tl.load(squares + running_R, mask=is_row_R, other=0.0) * (
            old_scale_R * old_scale_R
        )
        tl.store(squares + running_R, old_square_R + square_R * (scale_R * scale_R), mask=is_row_R)
    tl.store(sums + running_R, old_sum_R * old_scale_R + sum_R * scale_R, mask=is_row_R)
    tl.store(maxima + running_R, new_max_R, mask=is_row_R)


@triton.jit(do_not_specialize=["first", "num_rows"], do_not_specialize_on_alignment=_GRAD_ROWS)
def _logit_gradient_kernel(
    tile,
    tile_stride,
    stash_maxima,
    columns,
    first,
    log_zs,
    log_z_rests,
    inv_temperatures,
    grad_log_probs,
    entropies,
    grad_entropies,
    grads,
    grad_stride,
    num_rows,
    num_columns,
    softcap,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr,
):
    """Store d loss / d logit of a tile of logits, or of a stash where `stash_maxima` is not None.
    `grads` may be the tile's memory: a program stores only elements that it has loaded.
    """
    rows_R = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    is_row_R = rows_R < num_rows
    log_z_R = tl.load(log_zs + rows_R, mask=is_row_R, other=0.0)
    rest_R = tl.zeros([NUM_ROWS], tl.float32)
    if log_z_rests is not None:
        rest_R = tl.load(log_z_rests + rows_R, mask=is_row_R, other=0.0)
    inv_temperature_R = tl.full([NUM_ROWS], 1.0, tl.float32)
    if inv_temperatures is not None:
        inv_temperature_R = tl.load(inv_temperatures + rows_R, mask=is_row_R, other=1.0)
    # fits: of a vocabulary
    column_R = (tl.load(columns + rows_R, mask=is_row_R, other=-1) - first).to(tl.int32)
    target_R = tl.load(grad_log_probs + rows_R, mask=is_row_R, other=0.0) * inv_temperature_R

    # x is e^(y), and p = factor x: of logits y = z - log Z, of a stash y = log(stash). All else
    # goes into the row's numbers: the gradient is (constant + slope y) x, and what is added
    # at the target.
    if stash_maxima is None:
        shift_R = -rest_R
        factor_R = tl.exp(shift_R)
    else:
        log_scale_R = tl.load(stash_maxima + rows_R, mask=is_row_R, other=0.0) - log_z_R - rest_R
        shift_R = log_scale_R - _LOG_SCALE
        factor_R = tl.exp(log_scale_R) / _SCALE
    constant_R = -target_R * factor_R
    if entropies is not None:
        entropy_R = tl.load(entropies + rows_R, mask=is_row_R, other=0.0)
        slope_R = (
            -tl.load(grad_entropies + rows_R, mask=is_row_R, other=0.0)
            * inv_temperature_R
            * factor_R
        )
        constant_R += slope_R * (entropy_R + shift_R)

    for start in range(0, 1 if IS_ONE_BLOCK else num_columns, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        is_here_RB = is_row_R[:, None] & (columns_B < num_columns)[None, :]
        if stash_maxima is None:
            z_RB = _load_scaled_logits(
                tile,
                tile_stride,
                rows_R,
                is_row_R,
                columns_B,
                num_columns,
                softcap,
                inv_temperature_R,
            )
            y_RB = z_RB - log_z_R[:, None]
            x_RB = tl.exp(y_RB)
        else:
            x_RB = tl.load(
                _compute_tile_pointers(tile, tile_stride, rows_R, columns_B),
                mask=is_here_RB,
                other=0.0,
            )
            x_RB = x_RB.to(tl.float32)
            y_RB = tl.log(tl.maximum(x_RB, _SMALLEST))
        if entropies is None:
            grad_RB = constant_R[:, None] * x_RB
        else:
            grad_RB = (constant_R[:, None] + slope_R[:, None] * y_RB) * x_RB
        grad_RB += tl.where(columns_B[None, :] == column_R[:, None], target_R[:, None], 0.0)
        if softcap is not None:
            logits_RB = tl.load(
                _compute_tile_pointers(tile, tile_stride, rows_R, columns_B),
                mask=is_here_RB,
                other=0.0,
            )
            tanh_RB = _compute_tanh(logits_RB.to(tl.float32) / softcap)
            grad_RB = grad_RB * (1.0 - tanh_RB * tanh_RB)
        pointers_RB = _compute_tile_pointers(grads, grad_stride, rows_R, columns_B)
        tl.store(pointers_RB, grad_RB.to(grads.dtype.element_ty), mask=is_here_RB)
