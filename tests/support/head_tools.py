"""What tests of the head share: a problem, a sink,
and a mode that records the largest temporary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WHOLE: dict[str, Any] = {
    "temperature": 1.0,
    "vocab_start": 0,
    "tp_group": None,
    "with_entropy": True,
}


def problem(
    num_tokens: int, hidden: int, rows: int, vocab_size: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens + rows)
    hidden_TH = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(rows, hidden, generator=generator, dtype=torch.float64) * (
        scale / math.sqrt(hidden)
    )
    targets_T = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return hidden_TH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_(), targets_T


class Sink:
    """A weight's gradient buffer, as megatron's: `make_autograd_gradient` hands out the weight, or
    None for a tied one.
    """

    def __init__(
        self, weight_VH: Tensor, dtype: torch.dtype = torch.float32, start: float = 0.0
    ) -> None:
        self.buffer = torch.full(weight_VH.shape, start, dtype=dtype)
        self.weight_VH = weight_VH
        self.is_tied = False
        self.num_asked = 0

    def get_buffer_VH(self) -> Tensor:
        return self.buffer

    def make_autograd_gradient(self) -> Tensor | None:
        self.num_asked += 1
        return None if self.is_tied else self.weight_VH.detach()


class LargestFloat(TorchDispatchMode):
    """Records the most elements of any floating-point tensor that is made
    inside, views left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and memory(leaf) not in known:
                self.largest = max(self.largest, leaf.numel())
        return out


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
