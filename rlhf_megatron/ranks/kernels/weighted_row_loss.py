"""The weighted sums of a loss that computes its own gradient: value, gradient and metrics of rows
in one pass.

On a CPU the rows are taken in blocks whose temporaries stay in the cache. Nothing waits for a
device, and the backward pass only multiplies.
"""

# R rows, T rows of a block

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossOutputs
from rlhf_megatron.algorithms.losses.value_loss import compute_value_loss

CPU_BLOCK = 65_536  # rows; a dozen temporaries of 256 KiB
ColumnsByName = Mapping[str, Tensor]
"""Name of a mini-batch column -> its values at the rows' target tokens, [R]."""
LossAndMetricSums = tuple[Tensor, dict[str, Tensor]]
"""(the rows' share of the loss, with grad; their share of each metric)."""
RowBlock = slice | None
"""Rows that are taken at once; None: all of them, without a view of each column."""


def slice_block_rows(column_R: Tensor, row_block: RowBlock) -> Tensor:
    """Return [T], the rows of a block; the whole column for a block of None."""
    return column_R if row_block is None else column_R[row_block]


@dataclass(frozen=True)
class RowLossSums:
    """Sums over all rows. Nothing has grad."""

    loss_sum: Tensor  # scalar: sum of loss * loss weight
    grad_R: Tensor  # d value / d log-probs (or values)
    metric_sums: dict[str, Tensor]  # scalars: sum of metric * metric weight


class RowLossAccumulator:
    """The sums and the gradient of a loss, added up over blocks of rows."""

    def __init__(self, loss_weights_R: Tensor, metric_weights_R: Tensor) -> None:
        self._loss_weights_R = loss_weights_R
        self._metric_weights_R = metric_weights_R
        self._grad_R = torch.empty_like(loss_weights_R)
        self._metric_names: tuple[str, ...] = ()
        self._block_sums: list[Tensor] = []

    def split_row_blocks(self) -> Sequence[RowBlock]:
        """Return blocks that cover all rows in order: one block off the CPU, or for few rows."""
        num_rows = self._grad_R.numel()
        if num_rows <= CPU_BLOCK or self._grad_R.device.type != "cpu":
            return (None,)
        return [slice(begin, begin + CPU_BLOCK) for begin in range(0, num_rows, CPU_BLOCK)]

    def add_block(self, row_block: RowBlock, loss_outputs: PolicyLossOutputs) -> None:
        """Add the loss and metrics of a block's rows to the sums, and store their weighted
        gradient.
        """
        assert loss_outputs.grad_T is not None, "the loss tells its gradient"
        loss_weights_T = slice_block_rows(self._loss_weights_R, row_block)
        metric_weights_T = slice_block_rows(self._metric_weights_R, row_block)
        torch.mul(
            loss_outputs.grad_T, loss_weights_T, out=slice_block_rows(self._grad_R, row_block)
        )
        self._metric_names = tuple(loss_outputs.metrics)
        self._block_sums.append(torch.dot(loss_outputs.token_loss_T, loss_weights_T))
        self._block_sums += [
            torch.dot(metric_T, metric_weights_T) for metric_T in loss_outputs.metrics.values()
        ]

    def finish_sums(self) -> RowLossSums:
        """Return the sums over all blocks."""
        num_sums = 1 + len(self._metric_names)
        if len(self._block_sums) == num_sums:
            value, *metrics = self._block_sums
            return RowLossSums(
                value, self._grad_R, dict(zip(self._metric_names, metrics, strict=True))
            )
        return sum_over_blocks(
            torch.stack(self._block_sums).view(-1, num_sums), self._grad_R, self._metric_names
        )


def sum_over_blocks(block_sums: Tensor, grad_R: Tensor, metric_names: Sequence[str]) -> RowLossSums:
    """Return the sums over the blocks, added in a fixed order, of partial sums [blocks, 1 +
    metrics], the loss first.
    """
    totals = block_sums.sum(0, dtype=torch.float64).to(grad_R.dtype)
    value, *metrics = totals.unbind()
    return RowLossSums(value, grad_R, dict(zip(metric_names, metrics, strict=True)))


def weigh_loss_terms(loss_outputs: PolicyLossOutputs, columns: ColumnsByName) -> LossAndMetricSums:
    """Return (the loss summed with the loss weights, each metric summed with the metric weights),
    for a loss that leaves its gradient to autograd.
    """
    value = (loss_outputs.token_loss_T * columns["loss_weights"]).sum()
    weights_R = columns["metric_weights"]
    return value, {
        name: torch.dot(metric_R.to(weights_R.dtype), weights_R)
        for name, metric_R in loss_outputs.metrics.items()
    }


def compute_value_loss_sums(
    values_R: Tensor, columns: ColumnsByName, cliprange_value: float
) -> LossAndMetricSums:
    """Return (the critic's loss summed with the loss weights, with grad; its metrics summed with
    the metric weights).
    """
    dtype = values_R.dtype
    old_R, returns_R, weights_R, metric_weights_R = (
        columns[name].to(dtype)
        for name in ("old_values", "returns", "loss_weights", "metric_weights")
    )
    with torch.no_grad():
        summing = RowLossAccumulator(weights_R, metric_weights_R)
        for block in summing.split_row_blocks():
            values_T = slice_block_rows(values_R, block)
            old_T = slice_block_rows(old_R, block)
            returns_T = slice_block_rows(returns_R, block)
            summing.add_block(
                block, compute_value_loss(values_T, old_T, returns_T, cliprange_value)
            )
        sums = summing.finish_sums()
    return attach_gradients(sums.loss_sum, [(values_R, sums.grad_R, 1.0)]), sums.metric_sums


def attach_gradients(
    loss: Tensor, known_gradients: Sequence[tuple[Tensor, Tensor, float]]
) -> Tensor:
    """Return a copy of the scalar `loss` with grad. `known_gradients` holds (tensor, gradient,
    factor) each; the backward pass gives the tensor gradient x factor x the upstream gradient.
    """
    tensors = [tensor for input_R, grad_R, _ in known_gradients for tensor in (input_R, grad_R)]
    return _AttachGradients.apply(loss, [factor for _, _, factor in known_gradients], *tensors)


class _AttachGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factors: Sequence[float], *tensors: Tensor) -> Tensor:
        """Return a copy of `loss`; `tensors` are pairs of an input and its gradient."""
        ctx.factors = factors
        ctx.save_for_backward(*tensors[1::2])
        return loss.clone()  # of its own memory: pipeline schedules scale it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return each input's known gradient times its factor and the upstream gradient."""
        grads: list[Tensor | None] = [None, None]
        for index, (grad_R, factor) in enumerate(zip(ctx.saved_tensors, ctx.factors, strict=True)):
            if not ctx.needs_input_grad[2 + 2 * index]:
                grads += [None, None]
                continue
            grads += [grad_R * (upstream[0] if factor == 1 else upstream[0] * factor), None]
        return tuple(grads)
