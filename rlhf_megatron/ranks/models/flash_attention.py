"""Kernels of flash attention over packed documents: those of torch and of two packages,
behind one call.

They differ in the names of their options from version to version; what a function takes is looked
at, not its version.
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

from rlhf_megatron.ranks.models.fused_kernel_choice import (
    AttentionKernel,
    KernelChoice,
    choose_attention_kernel,
)
from rlhf_megatron.ranks.parallel.optional_packages import try_import_attribute

SOURCES: dict[AttentionKernel, tuple[str, str]] = {
    "flash_attn_3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "torch": ("torch.nn.attention.varlen", "varlen_attn"),
    "flash_attn_2": ("flash_attn", "flash_attn_varlen_func"),
}


class SequenceBorders(NamedTuple):
    """Borders of sequences that attend to themselves; a sequence's last query sees its last key."""

    query_borders: Tensor  # [D + 1] int32
    key_borders: Tensor  # [D + 1] int32
    longest_query: int
    longest_key: int


FlashAttentionCall = Callable[[Tensor, Tensor, Tensor, SequenceBorders, float], Tensor]
"""(query [T, N, d], key and value [T', N / group, d], borders,
softmax scale) -> [T, N, d], causal.
"""


SinkAttentionCall = Callable[..., Tensor]
"""The same, and further `window`, in tokens, a query's own with them (None:
none), and `sinks` [N].
"""


@dataclass(frozen=True)
class FlashKernel:
    choice: KernelChoice
    attention_call: FlashAttentionCall | None  # None: no flash attention here
    # where sinks were requested, in place of `attention_call`
    sink_attention_call: SinkAttentionCall | None = None


@functools.cache
def choose_flash_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, has_sinks: bool = False
) -> FlashKernel:
    """Return the flash attention kernel of `device` for queries of this type and head dimension;
    its call is None where none can be used. With `has_sinks` each head has a logit of its own in
    the softmax, and the call is `sink_attention_call`. Packages are tried once in a process.
    """
    if device.type == "cpu":  # no package is imported in vain
        return FlashKernel(choose_attention_kernel("cpu", "", head_dim, (0, 0), {}), None)
    capability = torch.cuda.get_device_capability(device)
    name_of_dtype = str(dtype).removeprefix("torch.")
    choice = choose_attention_kernel(
        "cuda", name_of_dtype, head_dim, capability, explain_absent_kernels(), has_sinks
    )
    if has_sinks and choice.name == "torch":
        return FlashKernel(choice, None, make_sink_attention(TorchAttentionPasses()))
    for name, (module, attribute) in SOURCES.items():
        if name == choice.name:
            function = try_import_attribute(module, attribute)[0]
            return FlashKernel(
                choice,
                wrap_torch_varlen(function)
                if name == "torch"
                else wrap_flash_attn_package(function),
            )
    return FlashKernel(choice, None)


def explain_absent_kernels() -> dict[AttentionKernel, str]:
    """Return the reason for each kernel that cannot be used. Import the packages."""
    absent = {
        name: why_not
        for name, (module, attribute) in SOURCES.items()
        if (why_not := try_import_attribute(module, attribute)[1])
    }
    if not torch.backends.cuda.is_flash_attention_available():
        absent["torch"] = "this build of torch has no flash attention"
    return absent


def wrap_torch_varlen(varlen_attn: Callable[..., Any]) -> FlashAttentionCall:
    """Return torch's function as a `FlashAttentionCall`; its options differ in each of torch 2.10
    to 2.13.
    """
    options = inspect.signature(varlen_attn).parameters

    def attend_with_torch(
        query: Tensor, key: Tensor, value: Tensor, borders: SequenceBorders, scale: float
    ) -> Tensor:
        """Return causal attention [T, N, d] by torch's function."""
        chosen: dict[str, Any] = (
            {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}
        )
        if "scale" in options:
            chosen["scale"] = scale
        elif not math.isclose(factor := scale * math.sqrt(query.shape[-1]), 1.0):
            query = query * factor
        if "enable_gqa" in options:  # without it, fewer heads of keys are taken as they are
            chosen["enable_gqa"] = query.shape[1] != key.shape[1]
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            borders.query_borders,
            borders.key_borders,
            borders.longest_query,
            borders.longest_key,
            **chosen,
        )
        return _take_first_output(out)

    return attend_with_torch


def wrap_flash_attn_package(flash_attn_varlen_func: Callable[..., Any]) -> FlashAttentionCall:
    """Return the function of flash-attn 2 or 3 as a `FlashAttentionCall`. Its gradients repeat bit
    for bit where torch uses deterministic algorithms.
    """
    options = inspect.signature(flash_attn_varlen_func).parameters

    def attend_with_package(
        query: Tensor, key: Tensor, value: Tensor, borders: SequenceBorders, scale: float
    ) -> Tensor:
        """Return causal attention [T, N, d] by the package's function."""
        chosen: dict[str, Any] = {"softmax_scale": scale, "causal": True}
        if "deterministic" in options:
            chosen["deterministic"] = torch.are_deterministic_algorithms_enabled()
        out = flash_attn_varlen_func(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            borders.query_borders,
            borders.key_borders,
            borders.longest_query,
            borders.longest_key,
            **chosen,
        )
        return _take_first_output(out)

    return attend_with_package


class AttentionPasses(Protocol):
    """The forward and the backward pass of a kernel, called separately. Logarithms of sums of
    exponentials are [N, T] float32.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: SequenceBorders,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output [T, N, d], logarithms of the sums of exponentials [N, T])."""

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, log_sums: Tensor,
        borders: SequenceBorders,
        scale: float, window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of query, key and value. The kernel must compute its shares as
        exp(logit - log) from `log_sums`, and the mean of their gradients from the output.
        """


class TorchAttentionPasses:
    """Flash Attention 2 inside of torch."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: SequenceBorders,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output [T, N, d], logarithms of the sums of exponentials [N, T])."""
        output, logs, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            borders.query_borders,
            borders.key_borders,
            borders.longest_query,
            borders.longest_key,
            0.0,  # no dropout
            window is None,  # causal
            False,
            scale=scale,
            **_make_window_options(window),
        )
        return output, logs

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, log_sums: Tensor,
        borders: SequenceBorders,
        scale: float, window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of query, key and value."""
        query, key, value = inputs
        random_state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            log_sums,
            borders.query_borders,
            borders.key_borders,
            borders.longest_query,
            borders.longest_key,
            0.0,  # no dropout, so the random state is not read
            window is None,  # causal
            random_state,
            grad.new_empty(0),
            scale=scale,
            **_make_window_options(window),
        )
        return grad_query, grad_key, grad_value


def _make_window_options(window: int | None) -> dict[str, int]:
    """Return the kernel's options for a window, which count the tokens beside the query; {} for no
    window.
    """
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def make_sink_attention(attention_passes: AttentionPasses) -> SinkAttentionCall:
    """Return an attention function whose softmax has one more logit for each head, made from a
    kernel without such logits.
    """

    def attend_with_sinks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: SequenceBorders,
        scale: float,
        window: int | None,
        sinks: Tensor,
    ) -> Tensor:
        """Return causal attention [T, N, d] with one sink logit for each head."""
        output: Tensor = _SinkAttention.apply(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            sinks,
            attention_passes,
            borders,
            scale,
            window,
        )
        return output

    return attend_with_sinks


class _SinkAttention(torch.autograd.Function):
    """A sink adds to the sum that shares are divided by: s = log(exp(log) + exp(sink)), and the
    output is scaled by exp(log - s). Given s and that output the kernel's own backward pass makes
    the right gradients: all that it takes from its forward pass are the shares exp(logit - s) and
    their mean gradient, the product of output and gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor,
        attention_passes: AttentionPasses, borders: SequenceBorders,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """Return attention with sinks, by rescaling the output of the plain kernel."""
        plain, logs_NT = attention_passes.forward(query, key, value, borders, scale, window)
        sums_NT = torch.logaddexp(logs_NT, sinks.float()[:, None])
        output = (plain * torch.exp(logs_NT - sums_NT).T[..., None]).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, sums_NT)
        ctx.settings = (attention_passes, borders, scale, window)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        query, key, value, sinks, output, sums_NT = ctx.saved_tensors
        passes, borders, scale, window = ctx.settings
        grad = grad.contiguous()
        of_inputs = passes.backward(
            grad, (query, key, value), output, sums_NT, borders, scale, window
        )
        means_NT = (grad.float() * output.float()).sum(-1).T
        of_sinks = -(torch.exp(sinks.float()[:, None] - sums_NT) * means_NT).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), None, None, None, None


def _take_first_output(kernel_output: Any) -> Tensor:
    """Return the output of a kernel without the sums of the softmax, which some versions add."""
    result: Tensor = kernel_output[0] if isinstance(kernel_output, tuple) else kernel_output
    return result
