"""The weighted sums of a loss that tells its gradient: value, gradient and metrics of rows in one pass.

On a CPU the rows are taken in blocks whose temporaries stay in the cache. Nothing waits for a device, and the backward
pass only multiplies.
"""

# R rows, T rows of a block

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_megatron.algorithms.losses.base import PolicyLossOutputs
from rlhf_megatron.algorithms.losses.value_loss import value_loss

CPU_BLOCK = 65_536  # rows; a dozen temporaries of 256 KiB
Columns = Mapping[str, Tensor]
"""Name of a mini-batch column -> its values at the rows' target tokens, [R]."""
Sums = tuple[Tensor, dict[str, Tensor]]
"""(the rows' share of the loss, with grad; their share of each metric)."""
Block = slice | None
"""Rows that are taken at once; None: all of them, without a view of each column."""


def rows(column_R: Tensor, block: Block) -> Tensor:
    """[T] the rows of a block."""
    return column_R if block is None else column_R[block]


@dataclass(frozen=True)
class RowSums:
    """Sums over all rows. Nothing has grad."""

    value: Tensor  # scalar: sum of loss * loss weight
    grad_R: Tensor  # d value / d log-probs (or values)
    metrics: dict[str, Tensor]  # scalars: sum of metric * metric weight


class Summing:
    """Adds up what a loss returns for one block of rows after the other."""

    def __init__(self, loss_weights_R: Tensor, metric_weights_R: Tensor) -> None:
        self._loss_weights_R = loss_weights_R
        self._metric_weights_R = metric_weights_R
        self._grad_R = torch.empty_like(loss_weights_R)
        self._names: tuple[str, ...] = ()
        self._block_sums: list[Tensor] = []

    def blocks(self) -> Sequence[Block]:
        """All rows in order; one block on other devices than a CPU, and of few rows."""
        num_rows = self._grad_R.numel()
        if num_rows <= CPU_BLOCK or self._grad_R.device.type != "cpu":
            return (None,)
        return [slice(begin, begin + CPU_BLOCK) for begin in range(0, num_rows, CPU_BLOCK)]

    def add(self, block: Block, found: PolicyLossOutputs) -> None:
        """`found`: of these rows."""
        assert found.grad_T is not None, "the loss tells its gradient"
        loss_weights_T, metric_weights_T = rows(self._loss_weights_R, block), rows(self._metric_weights_R, block)
        torch.mul(found.grad_T, loss_weights_T, out=rows(self._grad_R, block))
        self._names = tuple(found.metrics)
        self._block_sums.append(torch.dot(found.token_loss_T, loss_weights_T))
        self._block_sums += [torch.dot(metric_T, metric_weights_T) for metric_T in found.metrics.values()]

    def sums(self) -> RowSums:
        """Return the sums of all blocks."""
        num_sums = 1 + len(self._names)
        if len(self._block_sums) == num_sums:
            value, *metrics = self._block_sums
            return RowSums(value, self._grad_R, dict(zip(self._names, metrics, strict=True)))
        return row_sums(torch.stack(self._block_sums).view(-1, num_sums), self._grad_R, self._names)


def row_sums(block_sums: Tensor, grad_R: Tensor, names: Sequence[str]) -> RowSums:
    """[blocks, 1 + metrics] partial sums, the loss first -> their sums over the blocks, always in the same order."""
    totals = block_sums.sum(0, dtype=torch.float64).to(grad_R.dtype)
    value, *metrics = totals.unbind()
    return RowSums(value, grad_R, dict(zip(names, metrics, strict=True)))


def weighted(terms: PolicyLossOutputs, columns: Columns) -> Sums:
    """The sums, with the weights of the columns, of a loss that leaves its gradient to autograd."""
    value = (terms.token_loss_T * columns["loss_weights"]).sum()
    weights_R = columns["metric_weights"]
    return value, {name: torch.dot(metric_R.to(weights_R.dtype), weights_R) for name, metric_R in terms.metrics.items()}


def value_sums(values_R: Tensor, columns: Columns, cliprange_value: float) -> Sums:
    """The sums of the critic's loss, with the weights of the columns."""
    dtype = values_R.dtype
    old_R, returns_R, weights_R, metric_weights_R = (
        columns[name].to(dtype) for name in ("old_values", "returns", "loss_weights", "metric_weights")
    )
    with torch.no_grad():
        summing = Summing(weights_R, metric_weights_R)
        for block in summing.blocks():
            values_T, old_T, returns_T = rows(values_R, block), rows(old_R, block), rows(returns_R, block)
            summing.add(block, value_loss(values_T, old_T, returns_T, cliprange_value))
        sums = summing.sums()
    return with_gradients(sums.value, (values_R, sums.grad_R, 1.0)), sums.metrics


def with_gradients(value: Tensor, *known: tuple[Tensor, Tensor, float]) -> Tensor:
    """A copy of the scalar `value`. `known`: (tensor, gradient, factor), whose product is the tensor's gradient."""
    tensors = [tensor for of, grad_R, _ in known for tensor in (of, grad_R)]
    return _WithGradients.apply(value, [factor for _, _, factor in known], *tensors)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factors: Sequence[float], *tensors: Tensor) -> Tensor:
        ctx.factors = factors
        ctx.save_for_backward(*tensors[1::2])
        return value.clone()  # of its own memory: pipeline schedules scale it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None, None]
        for index, (grad_R, factor) in enumerate(zip(ctx.saved_tensors, ctx.factors, strict=True)):
            if not ctx.needs_input_grad[2 + 2 * index]:
                grads += [None, None]
                continue
            grads += [grad_R * (upstream[0] if factor == 1 else upstream[0] * factor), None]
        return tuple(grads)
