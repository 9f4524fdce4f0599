"""Memory that the head takes for a micro-batch beyond its inputs: the most that `log_prob_chunked`
holds at one time.
"""

# S tokens of the whole sequence, R rows, H hidden, a tile is [B rows, C columns]

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend
from rlhf_megatron.ranks.kernels.log_prob_chunked import choose_tile_shape
from rlhf_megatron.ranks.kernels.logit_tile_ops import choose_rows_per_block
from rlhf_megatron.ranks.kernels.tile_stash import StashBudget

_STATISTICS = 32  # numbers a row, at most


@dataclass(frozen=True)
class HeadCallShape:
    """A call of the head on one rank, with gradient, a weight that goes into a sink, and
    a temperature.
    """

    num_tokens: int  # S
    num_rows: int  # R
    hidden_size: int
    num_columns: int  # of the rank's vocabulary shard, padding left out
    chunk_size: int
    dtype: torch.dtype  # of hidden states and weight
    device_type: str
    num_sequence_parts: int  # ranks that share the sequence; 1: it is not split
    stash_bytes: int
    backend: LogProbBackend  # chunked or triton


@dataclass(frozen=True)
class HeadMemoryBound:
    """Upper bounds in bytes. Not everything is held at the same time: `peak_bytes` is less than the
    sum.
    """

    tile_bytes: int  # logits of a tile, and their gradient
    hidden_gradient_bytes: int  # accumulated in float32, then as the model gets it
    stash_bytes: int
    peak_bytes: int


def compute_head_memory_bound(shape: HeadCallShape) -> HeadMemoryBound:
    """Return an upper bound of the head's memory for a call with gradient; rows without gradient
    need less. The reference backend, which makes all logits, is not covered.
    """
    size = shape.dtype.itemsize
    total = max(size, 4)  # of what products are added up in
    # 16-bit operands keep a float32 accumulator on a GPU only; elsewhere copies in float32 go
    # into the products.
    operand = size if shape.device_type == "cuda" else total
    tokens = shape.num_tokens * shape.hidden_size
    rows = shape.num_rows * shape.hidden_size
    num_rows, num_columns = choose_tile_shape(
        shape.num_rows, shape.num_columns, shape.chunk_size, shape.device_type
    )
    logits = num_rows * num_columns * total
    rounded, exact = _count_stash_bytes(shape, num_columns, total)
    stash = rounded + exact
    # A gradient of the operands' type takes the place of the logits, or of the stash, where it has
    # as many bytes.
    gradient = (
        num_rows * num_columns * operand * max(operand != total, bool(rounded) and operand != 2)
    )
    # of this chunk and the one before
    casts = 2 * num_columns * shape.hidden_size * operand * (operand != size)
    block = (
        choose_rows_per_block(num_rows, num_columns, shape.device_type)
        * num_columns
        * total
        * (shape.backend != "triton")
    )
    # products that a float32 sink cannot add up
    casts += num_columns * shape.hidden_size * total * (total != 4)
    gathered = tokens * size * (shape.num_sequence_parts > 1)
    always = logits + rows * operand + _STATISTICS * shape.num_rows * total
    moments = [
        gathered
        + rows * (size + operand * (operand != size))
        + always
        - logits,  # rows are taken out and scaled
        gathered + rows * total + always,
        rows * total + always + casts + gradient + (4 if rounded else 2) * block,
        rows * total
        + always
        + casts
        + gradient
        + block
        + _count_result_gradient_bytes(shape, total),
    ]
    return HeadMemoryBound(
        logits + gradient,
        rows * total + tokens * size // shape.num_sequence_parts,
        stash,
        stash + max(moments),
    )


def _count_stash_bytes(
    shape: HeadCallShape, num_columns: int, accumulator_bytes: int
) -> tuple[int, int]:
    """Return (the bytes of chunks stashed as float16, the bytes of chunks stashed as they are)."""
    budget = StashBudget.make_for_device(shape.device_type, shape.stash_bytes)
    rounded = exact = 0
    for first in range(0, shape.num_columns if shape.num_rows else 0, num_columns):
        columns = min(num_columns, shape.num_columns - first)
        if budget.reserve_float16_chunk(shape.num_rows, columns, accumulator_bytes):
            rounded += shape.num_rows * (2 * columns + accumulator_bytes)
        elif budget.reserve_logit_chunk(shape.num_rows, columns, accumulator_bytes):
            exact += shape.num_rows * columns * accumulator_bytes
    return rounded, exact


def _count_result_gradient_bytes(shape: HeadCallShape, accumulator_bytes: int) -> int:
    """Return the bytes of the step from the rows' gradient to the hidden states' gradient: spread
    over the tokens, and summed over the parts of the sequence.
    """
    tokens = shape.num_tokens * shape.hidden_size
    size = shape.dtype.itemsize
    if shape.num_sequence_parts > 1:
        return tokens * accumulator_bytes + tokens // shape.num_sequence_parts * accumulator_bytes
    return tokens * size + shape.num_rows * shape.hidden_size * size * (size != accumulator_bytes)
