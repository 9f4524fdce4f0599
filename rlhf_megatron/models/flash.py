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
from typing import Any, NamedTuple, Protocol

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


SinkCall = Callable[..., Tensor]
"""The same, and further `window`, in tokens, a query's own with them (None: none), and `sinks` [N]."""


@dataclass(frozen=True)
class FlashKernel:
    choice: Choice
    call: Call | None  # None: no flash attention here
    with_sinks: SinkCall | None = None  # of a kernel that was asked for it, in place of `call`


@functools.cache
def flash_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, has_sinks: bool = False) -> FlashKernel:
    """Choose the kernel of `device` for queries of this kind. Packages are tried once a process. `has_sinks`: each head
    has a logit of its own in the softmax."""
    if device.type == "cpu":  # no package is imported in vain
        return FlashKernel(choose_attention("cpu", "", head_dim, (0, 0), {}), None)
    capability, name_of_dtype = torch.cuda.get_device_capability(device), str(dtype).removeprefix("torch.")
    choice = choose_attention("cuda", name_of_dtype, head_dim, capability, absent_kernels(), has_sinks)
    if has_sinks and choice.name == "torch":
        return FlashKernel(choice, None, with_sinks(TorchPasses()))
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


class Passes(Protocol):
    """The two passes of a kernel apart. Logarithms of sums of exponentials are [N, T] float32."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, borders: Borders, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """(output [T, N, d], logarithms)."""

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, logs: Tensor, borders: Borders,
        scale: float, window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of query, key and value. The kernel must take its shares from `logs`, exp(logit - log), and the
        mean of their gradients from the output."""


class TorchPasses:
    """Flash Attention 2 inside of torch."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, borders: Borders, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        output, logs, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *borders, 0.0, window is None, False, scale=scale, **_sides(window)
        )
        return output, logs

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, logs: Tensor, borders: Borders,
        scale: float, window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_dropout = (torch.zeros(2, dtype=torch.uint64, device=grad.device), grad.new_empty(0))
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            grad, *inputs, output, logs, *borders, 0.0, window is None, *no_dropout, scale=scale, **_sides(window)
        )
        return of_query, of_key, of_value


def _sides(window: int | None) -> dict[str, int]:
    """Kernels count the tokens beside a query."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def with_sinks(passes: Passes) -> SinkCall:
    """Attention whose softmax has one more logit a head, made of a kernel that has none."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, borders: Borders, scale: float, window: int | None, sinks: Tensor
    ) -> Tensor:
        given = (query.contiguous(), key.contiguous(), value.contiguous())
        output: Tensor = _WithSinks.apply(*given, sinks, passes, borders, scale, window)
        return output

    return call


class _WithSinks(torch.autograd.Function):
    """A sink adds to the sum that shares are divided by: s = log(exp(log) + exp(sink)), and the output is scaled by
    exp(log - s). Given s and that output the kernel's own backward pass makes the right gradients: all that it takes
    from its forward pass are the shares exp(logit - s) and their mean gradient, the product of output and gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, passes: Passes, borders: Borders,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        plain, logs_NT = passes.forward(query, key, value, borders, scale, window)
        sums_NT = torch.logaddexp(logs_NT, sinks.float()[:, None])
        output = (plain * torch.exp(logs_NT - sums_NT).T[..., None]).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, sums_NT)
        ctx.settings = (passes, borders, scale, window)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, sums_NT = ctx.saved_tensors
        passes, borders, scale, window = ctx.settings
        grad = grad.contiguous()
        of_inputs = passes.backward(grad, (query, key, value), output, sums_NT, borders, scale, window)
        means_NT = (grad.float() * output.float()).sum(-1).T
        of_sinks = -(torch.exp(sinks.float()[:, None] - sums_NT) * means_NT).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), None, None, None, None


def _first(out: Any) -> Tensor:
    """Some versions return the sums of the softmax as well."""
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result
