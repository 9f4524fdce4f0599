"""Kernels of flash attention over packed documents: those of torch and of two packages, behind one call.

They differ in the names of their options from version to version; what a function takes is looked at, not its version.
"""

# T tokens, N heads, d head dimension, D documents

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_megatron.models.fused import Attention, Choice, choose_attention
from rlhf_megatron.parallel.packages import try_import

SOURCES: dict[Attention, tuple[str, str]] = {
    "flash_attn_3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "torch": ("torch.nn.attention.varlen", "varlen_attn"),
    "flash_attn_2": ("flash_attn", "flash_attn_varlen_func"),
}


class Borders(NamedTuple):
    """Borders of sequences that attend to themselves; a sequence's last query sees its last key."""

    queries: Tensor  # [D + 1] int32
    keys: Tensor  # [D + 1] int32
    longest_query: int
    longest_key: int


Call = Callable[[Tensor, Tensor, Tensor, Borders, float], Tensor]
"""(query [T, N, d], key and value [T', N / group, d], borders, softmax scale) -> [T, N, d], causal."""


@dataclass(frozen=True)
class FlashKernel:
    choice: Choice
    call: Call | None  # None: no flash attention here


@functools.cache
def flash_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> FlashKernel:
    """Choose the kernel of `device` for queries of this kind. Packages are tried once a process."""
    if device.type == "cpu":  # no package is imported in vain
        return FlashKernel(choose_attention("cpu", "", head_dim, (0, 0), {}), None)
    capability, name_of_dtype = torch.cuda.get_device_capability(device), str(dtype).removeprefix("torch.")
    choice = choose_attention("cuda", name_of_dtype, head_dim, capability, absent_kernels())
    for name, source in SOURCES.items():
        if name == choice.name:
            function = try_import(*source)[0]
            return FlashKernel(choice, call_torch(function) if name == "torch" else call_package(function))
    return FlashKernel(choice, None)


def absent_kernels() -> dict[Attention, str]:
    """Say why kernels cannot be used, for those that cannot. Imports the packages."""
    absent = {name: why_not for name, source in SOURCES.items() if (why_not := try_import(*source)[1])}
    if not torch.backends.cuda.is_flash_attention_available():
        absent["torch"] = "this build of torch has no flash attention"
    return absent


def call_torch(varlen_attn: Callable[..., Any]) -> Call:
    """torch's function as a `Call`. Of torch 2.10 to 2.13 each has other options."""
    options = inspect.signature(varlen_attn).parameters

    def call(query: Tensor, key: Tensor, value: Tensor, borders: Borders, scale: float) -> Tensor:
        chosen: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}
        if "scale" in options:
            chosen["scale"] = scale
        elif not math.isclose(factor := scale * math.sqrt(query.shape[-1]), 1.0):
            query = query * factor
        if "enable_gqa" in options:  # without it, fewer heads of keys are taken as they are
            chosen["enable_gqa"] = query.shape[1] != key.shape[1]
        out = varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), *borders, **chosen)
        return _first(out)

    return call


def call_package(flash_attn_varlen_func: Callable[..., Any]) -> Call:
    """The function of flash-attn 2 or 3 as a `Call`. Its gradients repeat bit for bit where torch is told to."""
    options = inspect.signature(flash_attn_varlen_func).parameters

    def call(query: Tensor, key: Tensor, value: Tensor, borders: Borders, scale: float) -> Tensor:
        chosen: dict[str, Any] = {"softmax_scale": scale, "causal": True}
        if "deterministic" in options:
            chosen["deterministic"] = torch.are_deterministic_algorithms_enabled()
        out = flash_attn_varlen_func(query.contiguous(), key.contiguous(), value.contiguous(), *borders, **chosen)
        return _first(out)

    return call


def _first(out: Any) -> Tensor:
    """Some versions return the sums of the softmax as well."""
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result
