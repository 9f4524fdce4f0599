"""The head's gradient goes straight into megatron's float32 main_grad: no tensor of the weight's size in between.

megatron's protocol for such a weight: whoever has added to `weight.main_grad` sets `weight.grad_added_to_main_grad`,
and gives autograd something of the weight's shape all the same, so that the hook of DistributedDataParallel fires. The
hook then drops it unread; with overlap_grad_reduce it insists on getting it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class MainGradSink:
    """A `kernels.log_prob.WeightGradSink`."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight: Any = weight  # with megatron's attributes

    def buffer_VH(self) -> Tensor:
        buffer: Tensor = self._weight.main_grad
        return buffer

    def gradient(self) -> Tensor | None:
        """The weight itself as the stand-in, which costs no memory: autograd takes it over as it is.

        None where the weight is also the embedding of this stage (megatron marks it with `zero_out_wgrad`): autograd
        would add the stand-in to the embedding's gradient, which is what the hook gets there, and adds.
        """
        if getattr(self._weight, "zero_out_wgrad", False):
            return None
        self._weight.grad_added_to_main_grad = True
        return self._weight.detach()


def sink_of(weight: nn.Parameter) -> MainGradSink | None:
    """None where nothing collects gradients: the weight of a frozen model."""
    return MainGradSink(weight) if hasattr(weight, "main_grad") else None
