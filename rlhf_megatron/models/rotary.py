"""Rotary position embeddings for packed documents: angles once a micro-batch, not once a layer and document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Which angles a model's positions turn by. Hashable: tables are cached by it."""

    base: float


def inverse_frequencies(rotary: Rotary, head_dim: int, device: torch.device) -> Tensor:
    """[head_dim / 2] float32: base^(-2i / head_dim)."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    return 1.0 / rotary.base ** (steps / head_dim)


def rotary_tables(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inverse frequency, both [T, 1, head_dim / 2] in `dtype`; positions [T]."""
    angles = positions.float()[:, None] * inverse_frequencies(rotary, head_dim, positions.device)
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (x_i, x_{i + d/2}) of x [T, heads, d] turned by their angle; the layout of Hugging Face's Llama."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out
