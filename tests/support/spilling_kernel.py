"""A Triton kernel that no processor has the registers for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _shares(values, out, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    kept = tl.load(values + row)
    tl.store(out + row, kept / tl.sum(kept, 0))


def launch() -> None:
    """One warp keeps 512 numbers a thread."""
    values = torch.zeros(1 << 14, device="cuda")
    _shares[(1,)](values, torch.empty_like(values), SIZE=1 << 14, num_warps=1)
