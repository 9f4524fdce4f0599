"""RMSNorm for layer specs without Transformer Engine: megatron's own torch wrapper refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. State dict: `weight` [hidden_size]."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Ranks that split the sequence have each a part of this gradient; finalize_model_grads sums what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _RMSNorm.apply(x, weight, eps)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """torch has no fused kernel for the CPU: its decomposition takes two to five times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = (grad * normed).flatten(0, -2)
        # d/dx of x * scale: scale * (g - normed * mean(g * normed)), with g = grad * weight
        mean = torch.mv(product, weight).view(scale.shape).div_(-x.shape[-1])
        return (grad * weight).addcmul_(normed, mean).mul_(scale), product.sum(0), None
