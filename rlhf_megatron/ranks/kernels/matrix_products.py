"""Matrix products with float32 accumulators and results, also of 16-bit operands, and where the
weight's gradient goes.

Rounding logits to bfloat16 costs 2e-2 in the log-probability.
"""

# V vocabulary shard (with padding), C columns of a tile, R rows, H hidden

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HAS_OUT_DTYPE = _TORCH >= (2, 8)
# before, addmm refuses to add a product of 16-bit matrices to a float32 one
_ADDS_TO_FLOAT32 = _TORCH >= (2, 10)


class WeightGradSink(Protocol):
    """A buffer that takes the weight's gradient in place of a tensor that autograd adds up."""

    def get_buffer_VH(self) -> Tensor:
        """Return the float32 tensor to which the weight's gradient is added. Called in the backward
        pass.
        """
        ...

    def make_autograd_gradient(self) -> Tensor | None:
        """Return the tensor that autograd receives for the weight once the buffer has the whole
        gradient, or None. Called in every backward pass, also without rows, so that hooks fire.
        """
        ...


def choose_accumulator_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """Return float32, or float64 where an operand is float64."""
    return torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)


def choose_operand_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the type in which two tensors are multiplied: 16 bits only where the device has a
    float32 accumulator.
    """
    if a.dtype == b.dtype and a.dtype in _HALF and a.is_cuda and _HAS_OUT_DTYPE:
        return a.dtype
    return choose_accumulator_dtype(a, b)


def multiply_matrices(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write a @ b to `out` and return it; 16-bit operands need a float32 `out`."""
    if a.dtype in _HALF:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a, b, out=out)


def add_matrix_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `out` in place and return it; 16-bit operands need a float32 `out`."""
    if a.dtype not in _HALF:
        return out.addmm_(a, b)
    if _ADDS_TO_FLOAT32:
        return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    return out.add_(torch.mm(a, b, out_dtype=torch.float32))


class WeightGradientAccumulator:
    """Takes the weight's gradient of one backward pass chunk by chunk, without a temporary of the
    weight's size.
    """

    def __init__(
        self,
        weight_VH: Tensor,
        weight_grad_sink: WeightGradSink | None,
        accumulator_dtype: torch.dtype,
    ) -> None:
        """Take the sink's buffer, or allocate a gradient without a sink. `accumulator_dtype` is the
        type in which products are accumulated. Raise ValueError for a buffer of another shape.
        """
        self._weight_grad_sink = weight_grad_sink
        self._buffer_VH = (
            torch.empty_like(weight_VH)
            if weight_grad_sink is None
            else weight_grad_sink.get_buffer_VH()
        )
        if self._buffer_VH.shape != weight_VH.shape:
            raise ValueError(
                f"the gradient buffer {tuple(self._buffer_VH.shape)} must have the weight's shape"
                f" {tuple(weight_VH.shape)}; give the sink the buffer of this head."
            )
        self._accumulator_dtype = accumulator_dtype
        self._num_finished_rows = 0  # rows of the weight that are done
        # of the chunk under way: part of the buffer, or a temporary
        self._sum_CH: Tensor | None = None

    def add_tile_product(
        self, first_row: int, end_row: int, grad_RC: Tensor, hidden_RH: Tensor
    ) -> None:
        """Add grad.T @ hidden to rows first:end of the weight's gradient. Chunks must come in
        order, each with one or more calls and then `finish_chunk`.
        """
        assert first_row == self._num_finished_rows, "a chunk was left out"
        if self._sum_CH is None:
            rows_CH = self._buffer_VH[first_row:end_row]
            # else the buffer's type does not hold a sum of products
            is_direct = rows_CH.dtype == self._accumulator_dtype
            self._sum_CH = (
                rows_CH if is_direct else torch.empty_like(rows_CH, dtype=self._accumulator_dtype)
            )
            if self._weight_grad_sink is None or not is_direct:
                multiply_matrices(grad_RC.T, hidden_RH, self._sum_CH)
                return
        add_matrix_product(self._sum_CH, grad_RC.T, hidden_RH)

    def finish_chunk(self, end_row: int) -> None:
        """End the present chunk: move its sum into the buffer, where it is in a temporary."""
        assert self._sum_CH is not None, "no row was added"
        rows_CH = self._buffer_VH[self._num_finished_rows : end_row]
        if rows_CH.dtype != self._accumulator_dtype:
            rows_CH.copy_(self._sum_CH) if self._weight_grad_sink is None else rows_CH.add_(
                self._sum_CH
            )
        self._sum_CH = None
        self._num_finished_rows = end_row

    def finish_gradient(self) -> Tensor | None:
        """Return the tensor that autograd receives, or None. Rows without a chunk are padding and
        get zero.
        """
        if self._weight_grad_sink is not None:
            return self._weight_grad_sink.make_autograd_gradient()
        self._buffer_VH[self._num_finished_rows :].zero_()
        return self._buffer_VH
