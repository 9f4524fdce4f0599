"""EXPERIMENTAL, not a backend: the head's statistics in one persistent kernel that never writes a logit.

A GEMM whose epilogue takes each block of logits into the row statistics (see `tile_ops`) while it is in registers. A
program takes BLOCK_R rows and a split of the columns, keeps the statistics of both in registers, and writes them once;
the splits are merged in a fixed order, so that the same input gives the same bits. Operands come by TMA.

Nothing in the trainer calls this: `TritonTileOps` after a library's GEMM is the path, and this becomes it only if it is
faster on a GPU (benchmarks/gpu compares both). Forward only; the entropy's sum and the squares are always made.
"""

# R rows, H hidden, V rows of the weight, K hidden at a time, C columns of a block, S splits of the columns

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlhf_megatron.kernels.tile_ops import MIN_LOGIT, RowStatistics

BLOCK_R, BLOCK_C, BLOCK_K = 128, 256, 64  # what a Hopper SM multiplies at full rate, in 8 warps
BLOCKS_OF_A_SPLIT = 8  # 2048 columns: thousands of programs' worth of work, and 20 bytes a row to write for each
ROW_BLOCKS_OF_A_GROUP = 16  # go over the same columns at the same time; their rows stay in the L2 cache meanwhile
_OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}

_MIN = tl.constexpr(MIN_LOGIT)


def fused_forward(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    columns_R: Tensor,
    inv_temperature_R: Tensor | None,
    num_columns: int,
    blocks: tuple[int, int, int] = (BLOCK_R, BLOCK_C, BLOCK_K),
) -> RowStatistics:
    """Statistics of the first `num_columns` columns of hidden @ weight.T, the rest being padding.

    `columns_R`: int64, the target's row of the weight, or outside of [0, num_columns). Raises ValueError for inputs
    that a TMA cannot load: both must be bfloat16 or float16 with dense rows that begin at multiples of 16 bytes.
    """
    for name, x in (("hidden", hidden_RH), ("weight", weight_VH)):
        if x.dtype not in (torch.bfloat16, torch.float16) or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError(
                f"{name} ({x.dtype}, strides {tuple(x.stride())}) must be bfloat16 or float16 with rows that begin at"
                " multiples of 16 bytes; use TritonTileOps for others."
            )
    block_r, block_c, block_k = blocks
    num_rows, num_hidden = hidden_RH.shape
    num_splits = triton.cdiv(num_columns, block_c * BLOCKS_OF_A_SPLIT)
    parts_5SR = torch.empty(5, num_splits, num_rows, dtype=torch.float32, device=hidden_RH.device)
    num_tiles = num_splits * triton.cdiv(num_rows, block_r)
    if num_tiles:
        _fused_kernel[(min(num_tiles, _num_processors(hidden_RH.device)),)](
            TensorDescriptor.from_tensor(hidden_RH, [block_r, block_k]),
            TensorDescriptor.from_tensor(weight_VH, [block_c, block_k]),
            columns_R.contiguous(),
            None if inv_temperature_R is None else inv_temperature_R.contiguous(),
            parts_5SR,
            num_rows,
            num_columns,
            num_hidden,
            num_splits,
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            BLOCK_K=block_k,
            BLOCKS=BLOCKS_OF_A_SPLIT,
            GROUP=ROW_BLOCKS_OF_A_GROUP,
            IS_INTERPRETED=not hidden_RH.is_cuda,
            **_OPTIONS,
        )
    return _merged(parts_5SR)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _merged(parts_5SR: Tensor) -> RowStatistics:
    max_SR, sum_SR, target_SR, weighted_SR, squares_SR = parts_5SR
    if not len(max_SR):  # a shard of padding only
        nothing_R = parts_5SR.new_zeros(parts_5SR.shape[2])
        return RowStatistics(nothing_R + MIN_LOGIT, nothing_R, nothing_R - torch.inf, nothing_R, nothing_R)
    max_R = max_SR.amax(0)
    shift_SR = max_SR - max_R
    scale_SR = shift_SR.exp()
    return RowStatistics(
        max_R,
        (sum_SR * scale_SR).sum(0),
        target_SR.amax(0),
        ((weighted_SR + shift_SR * sum_SR) * scale_SR).sum(0),
        (squares_SR * scale_SR.square()).sum(0),
    )


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_splits"])
def _fused_kernel(
    hidden,
    weight,
    columns,
    inv_temperatures,
    parts,
    num_rows,
    num_columns,
    num_hidden,
    num_splits,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    num_row_blocks = tl.cdiv(num_rows, BLOCK_R)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_splits, tl.num_programs(0)):
        # Tiles go down the row blocks of a group, then on to the next split, then on to the next group.
        first_block = tile // (GROUP * num_splits) * GROUP
        size = tl.minimum(num_row_blocks - first_block, GROUP)
        within = tile % (GROUP * num_splits)
        first_row = (first_block + within % size) * BLOCK_R
        split = within // size

        rows_R = first_row + tl.arange(0, BLOCK_R)
        is_row_R = rows_R < num_rows
        column_R = tl.load(columns + rows_R, mask=is_row_R, other=-1)
        column_R = tl.where((column_R >= 0) & (column_R < num_columns), column_R, -1).to(tl.int32)
        inv_temperature_R = tl.full([BLOCK_R], 1.0, tl.float32)
        if inv_temperatures is not None:
            inv_temperature_R = tl.load(inv_temperatures + rows_R, mask=is_row_R, other=1.0)

        max_R = tl.full([BLOCK_R], _MIN, tl.float32)
        target_R = tl.full([BLOCK_R], -float("inf"), tl.float32)
        sum_R = tl.zeros([BLOCK_R], tl.float32)
        weighted_R = tl.zeros([BLOCK_R], tl.float32)
        square_R = tl.zeros([BLOCK_R], tl.float32)
        for block in range(BLOCKS):
            first = (split * BLOCKS + block) * BLOCK_C
            if first < num_columns:
                z_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
                for k in range(0, num_hidden, BLOCK_K):
                    hidden_RK = hidden.load([first_row, k])
                    weight_CK = weight.load([first, k])
                    if IS_INTERPRETED:  # its 16-bit arithmetic is that of the bit patterns
                        hidden_RK = hidden_RK.to(tl.float32)
                        weight_CK = weight_CK.to(tl.float32)
                    z_RC = tl.dot(hidden_RK, weight_CK.T, z_RC)
                columns_C = first + tl.arange(0, BLOCK_C)
                z_RC = tl.where((columns_C < num_columns)[None, :], z_RC * inv_temperature_R[:, None], _MIN)
                found_R = tl.max(tl.where(columns_C[None, :] == column_R[:, None], z_RC, -float("inf")), 1)
                target_R = tl.maximum(target_R, found_R)
                new_max_R = tl.maximum(max_R, tl.max(z_RC, 1))
                shift_R = max_R - new_max_R
                scale_R = tl.exp(shift_R)
                below_RC = z_RC - new_max_R[:, None]
                exp_RC = tl.exp(below_RC)
                weighted_R = (weighted_R + shift_R * sum_R) * scale_R + tl.sum(below_RC * exp_RC, 1)
                square_R = square_R * (scale_R * scale_R) + tl.sum(exp_RC * exp_RC, 1)
                sum_R = sum_R * scale_R + tl.sum(exp_RC, 1)
                max_R = new_max_R

        plane = num_splits.to(tl.int64) * num_rows
        out_R = parts + split.to(tl.int64) * num_rows + rows_R
        tl.store(out_R, max_R, mask=is_row_R)
        tl.store(out_R + plane, sum_R, mask=is_row_R)
        tl.store(out_R + 2 * plane, target_R, mask=is_row_R)
        tl.store(out_R + 3 * plane, weighted_R, mask=is_row_R)
        tl.store(out_R + 4 * plane, square_R, mask=is_row_R)
