"""The weighted sum of a loss over rows, its gradient and its metrics in one pass, for losses that tell their gradient.

On a CPU the rows are taken in blocks whose temporaries stay in the cache, and no pass makes a new tensor. Nothing waits
for a device, and the backward pass only multiplies. What is summed is specified by the losses' plain form
(algorithms/losses), which leaves the gradient to autograd.
"""

# R rows, T rows of a block

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_megatron.algorithms.losses.base import ExplicitOutputs
from rlhf_megatron.algorithms.losses.scratch import Scratch

CPU_BLOCK = 32_768  # rows; a dozen temporaries of 128 KiB

Block = Sequence[Tensor | None]
TokenLoss = Callable[[Block, Scratch], ExplicitOutputs]
"""(the rows of a block of each column, scratch memory) -> loss, gradient and metrics a row."""


@dataclass(frozen=True)
class RowSums:
    """Of all rows. Nothing has grad."""

    value: Tensor  # scalar: sum of loss * loss weight
    grad_R: Tensor  # d value / d log-probs (or values)
    metrics: dict[str, Tensor]  # scalars: sum of metric * metric weight


def sum_rows(
    token_loss: TokenLoss, columns: Sequence[Tensor | None], loss_weights_R: Tensor, metric_weights_R: Tensor
) -> RowSums:
    """`columns`: [R] each, without grad, or None for one that is not there."""
    scratch = _scratch(loss_weights_R)
    grad_R = torch.empty_like(loss_weights_R)
    given = [column for column in (*columns, loss_weights_R, metric_weights_R, grad_R) if column is not None]
    block_sums: list[Tensor] = []
    names: tuple[str, ...] = ()
    for parts in _blocks(given, scratch.length):
        *rest, loss_weights_T, metric_weights_T, grad_T = parts
        scratch.start(grad_T.numel())
        present = iter(rest)
        found = token_loss([None if column is None else next(present) for column in columns], scratch)
        torch.mul(found.grad_T, loss_weights_T, out=grad_T)
        names = tuple(found.metrics)
        block_sums.append(torch.dot(found.token_loss_T, loss_weights_T))
        block_sums += [torch.dot(metric_T, metric_weights_T) for metric_T in found.metrics.values()]
    num_sums = 1 + len(names)
    if len(block_sums) == num_sums:
        return RowSums(block_sums[0], grad_R, dict(zip(names, block_sums[1:], strict=True)))
    return row_sums(torch.stack(block_sums).view(-1, num_sums), grad_R, names)


def _blocks(columns: Sequence[Tensor], length: int) -> Iterable[Sequence[Tensor]]:
    """The columns' rows, `length` at a time; of no rows one block without rows."""
    if columns[0].numel() <= length:
        return [columns]
    return zip(*(column.split(length) for column in columns), strict=True)


def _scratch(like_R: Tensor) -> Scratch:
    """For blocks of rows on a CPU, kept by each thread: fresh memory costs more there than what is done with it. For
    all rows at once on another device, where a pass is a launch and the allocator keeps the memory."""
    if like_R.device.type != "cpu":
        return Scratch(like_R, max(like_R.numel(), 1))
    kept = _kept.by_dtype.get(like_R.dtype)
    if kept is None or kept.length < min(like_R.numel(), CPU_BLOCK):
        length = min(1 << max(like_R.numel() - 1, 0).bit_length(), CPU_BLOCK)  # no more than micro-batches here need
        kept = _kept.by_dtype[like_R.dtype] = Scratch(like_R.new_empty(0), length)
    return kept


class _Kept(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Scratch] = {}


_kept = _Kept()


def row_sums(block_sums: Tensor, grad_R: Tensor, names: Sequence[str]) -> RowSums:
    """[blocks, 1 + metrics] partial sums, the loss first -> their sums over the blocks, always in the same order."""
    totals = block_sums.sum(0, dtype=torch.float64).to(grad_R.dtype)
    value, *metrics = totals.unbind()
    return RowSums(value, grad_R, dict(zip(names, metrics, strict=True)))


@dataclass(frozen=True)
class KnownGradient:
    """`of` gets `grad_R` x `factor` x the upstream gradient."""

    of: Tensor
    grad_R: Tensor
    factor: float = 1.0


def with_gradients(value: Tensor, *known: KnownGradient) -> Tensor:
    """A copy of the scalar `value` whose gradients are those."""
    tensors = [tensor for one in known for tensor in (one.of, one.grad_R)]
    return _WithGradients.apply(value, tuple(one.factor for one in known), *tensors)  # type: ignore[no-any-return]


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factors: tuple[float, ...], *tensors: Tensor) -> Tensor:
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
