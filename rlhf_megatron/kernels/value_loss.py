"""The critic's loss of a micro-batch's rows with its gradient and metrics in one pass. See `row_loss`."""

# R rows

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses.base import ExplicitOutputs
from rlhf_megatron.algorithms.losses.scratch import Scratch
from rlhf_megatron.algorithms.losses.value_loss import value_loss_explicit
from rlhf_megatron.kernels.row_loss import Block, KnownGradient, sum_rows, with_gradients


def fused_value_loss(
    values_R: Tensor,
    old_values_R: Tensor,
    returns_R: Tensor,
    cliprange_value: float,
    loss_weights_R: Tensor,
    metric_weights_R: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the sum of `value_loss` with `loss_weights_R`, with grad in `values_R`; the sum of each of its metrics with
    `metric_weights_R`)."""
    dtype = values_R.dtype

    def token_loss(block: Block, scratch: Scratch) -> ExplicitOutputs:
        values_T, old_values_T, returns_T = block
        assert values_T is not None and old_values_T is not None and returns_T is not None
        return value_loss_explicit(values_T, old_values_T, returns_T, cliprange_value, scratch)

    with torch.no_grad():
        columns = [values_R.detach(), old_values_R.to(dtype), returns_R.to(dtype)]
        sums = sum_rows(token_loss, columns, loss_weights_R.to(dtype), metric_weights_R.to(dtype))
    return with_gradients(sums.value, KnownGradient(values_R, sums.grad_R)), sums.metrics
