"""RMSNorm for layer specs without Transformer Engine: megatron's own torch wrapper refuses
sequence parallelism.

On CUDA one kernel, torch's where it has one (2.9 and newer), else Apex's; on a CPU one with its
gradient written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.ranks.models.fused_kernel_choice import (
    DeviceType,
    KernelChoice,
    choose_norm_kernel,
)
from rlhf_megatron.ranks.parallel.optional_packages import find_apex, try_import_attribute
from rlhf_megatron.weights.weight_table import LayerImpl


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. State dict:
    `weight` [hidden_size].
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Ranks that split the sequence have each a part of this gradient; finalize_model_grads sums
        # what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x, in the shape of x."""
        return apply_rms_norm(x, self.weight, self.eps)


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, by the fastest kernel of
    the device.
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _RMSNormFunction.apply(x, weight, eps)
    if x.device.type == "cuda" and resolve_norm_kernel("local", x.device).name == "apex":
        return _get_apex_norm()(x, weight, weight.shape, eps)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@functools.cache
def resolve_norm_kernel(impl: LayerImpl, device: torch.device) -> KernelChoice:
    """Return the kernel that the norms of these layers run on, and why no faster one; "local"
    layers run `apply_rms_norm`.
    """
    apex = find_apex()
    has_norm = (
        apex.is_usable and not has_torch_rms_norm_kernel() and _import_apex_norm()[0] is not None
    )
    kind: DeviceType = "cuda" if device.type == "cuda" else "cpu"
    return choose_norm_kernel(kind, impl, has_torch_rms_norm_kernel(), apex.why_not, has_norm)


def has_torch_rms_norm_kernel() -> bool:
    """Return whether torch's rms_norm is one kernel on CUDA, forward and backward."""
    return hasattr(torch.ops.aten, "_fused_rms_norm_backward")


def _import_apex_norm() -> tuple[Any, str]:
    """Return (Apex's fused RMSNorm function, ""), or (None, the import error in one line)."""
    extension, why_not = try_import_attribute("fused_layer_norm_cuda", "rms_forward_affine")
    return (
        (None, why_not)
        if extension is None
        else try_import_attribute("apex.normalization", "fused_rms_norm_affine")
    )


def _get_apex_norm() -> Callable[..., Tensor]:
    """Return Apex's fused RMSNorm function, which must be importable."""
    function: Callable[..., Tensor] = _import_apex_norm()[0]
    return function


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm with a gradient written by hand: torch has no fused kernel for the CPU, and its
    decomposition takes two to five times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        scale = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of the weight."""
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = (grad * normed).flatten(0, -2)
        # d/dx of x * scale: scale * (g - normed * mean(g * normed)), with g = grad * weight
        mean = torch.mv(product, weight).view(scale.shape).div_(-x.shape[-1])
        return (grad * weight).addcmul_(normed, mean).mul_(scale), product.sum(0), None
