"""Rotary position embeddings for packed documents: angles once a micro-batch, not once a
layer and document.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.config.rope import Llama3Scaling, RotaryConfig, YarnScaling

__all__ = ["RotaryConfig", "compute_inverse_frequencies", "make_rotary_tables", "rotate_pairs"]


def compute_inverse_frequencies(
    rotary: RotaryConfig, head_dim: int, device: torch.device
) -> Tensor:
    """Return [head_dim / 2] float32: base^(-2i / head_dim), rescaled as `rotary` says, and rounded
    as transformers rounds, to the last bit.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / rotary.base ** (steps / head_dim)
    scaling = rotary.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, Llama3Scaling):
        return _rescale_llama3_frequencies(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return _compute_yarn_frequencies(rotary.base, steps, head_dim, scaling)
    return frequencies / scaling.factor


def _rescale_llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return the frequencies rescaled as `apply_scaling` of Meta's reference code for Llama 3.1
    does.
    """
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    original = scaling.original_max_positions
    waves = 2 * math.pi / frequencies  # positions of a full turn
    smooth = (original / waves - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_long = waves > original / low
    is_short = waves < original / high
    return torch.where(
        is_long, frequencies / scaling.factor, torch.where(is_short, frequencies, blended)
    )


def _compute_yarn_frequencies(
    base: float, steps: Tensor, head_dim: int, scaling: YarnScaling
) -> Tensor:
    """Return the inverse frequencies by YaRN's interpolation by parts, with a ramp that is linear
    in the dimension, as in the authors' code.
    """

    def find_dimension_of_turns(num_turns: float) -> float:
        """Return the (fractional) dimension that makes `num_turns` turns within the original
        context.
        """
        return (
            head_dim
            * math.log(scaling.original_max_positions / (num_turns * 2 * math.pi))
            / (2 * math.log(base))
        )

    low = find_dimension_of_turns(scaling.beta_fast)
    high = find_dimension_of_turns(scaling.beta_slow)
    if scaling.is_truncated:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp without length
    ramp = torch.arange(head_dim // 2, dtype=torch.float32, device=steps.device)
    keep = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    waves = base ** (steps / head_dim)
    return 1.0 / (scaling.factor * waves) * (1 - keep) + 1.0 / waves * keep


def make_rotary_tables(
    positions: Tensor, head_dim: int, rotary: RotaryConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of position * inverse frequency, each [T, 1, head_dim / 2] in `dtype`;
    positions [T].
    """
    angles = positions.float()[:, None] * compute_inverse_frequencies(
        rotary, head_dim, positions.device
    )
    cos = angles.cos()
    sin = angles.sin()
    if isinstance(rotary.scaling, YarnScaling):
        cos = cos * rotary.scaling.attention_factor
        sin = sin * rotary.scaling.attention_factor
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, d] with the pairs (x_i, x_{i + d/2}) rotated by their angle, the layout
    of Hugging Face's Llama.
    """
    return _RotatePairs.apply(x, cos, sin)


class _RotatePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x rotated by the angles."""
        ctx.save_for_backward(cos, sin)
        return _apply_rotation(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient rotated back by the angles."""
        cos, sin = ctx.saved_tensors
        return _apply_rotation(grad, cos, sin, -1), None, None


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return x rotated by the angles, forward with `direction` 1, back with -1."""
    first, second = x.chunk(2, -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, -1)
    # both halves at once
    torch.mul(x.unflatten(-1, (2, -1)), cos[..., None, :], out=out.unflatten(-1, (2, -1)))
    out_first.addcmul_(second, sin, value=-direction)
    out_second.addcmul_(first, sin, value=direction)
    return out
