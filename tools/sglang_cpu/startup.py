"""What has to be different for stock SGLang 0.5.21 to start on a CPU without AMX. Each change
names its reason.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton_stub


class _DeclareVisionOps:
    """torchvision's wheel cannot load its CUDA-linked library beside the CPU torch and then fails
    to register a fake of `torchvision::nms`; declaring the schema first lets the import proceed.
    """

    done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and not self.done:
            self.done = True
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                self.library.define(
                    op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


class _AfterImport:
    """Runs a function on a module right after it was imported."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self.hooks = hooks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        hook = self.hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            hook(module)

        spec.loader.exec_module = exec_module
        return spec


def _allow_seeds_with_torch_attention(module: Any) -> None:
    """`sampling_seed` counts only in deterministic mode, which refuses the torch_native attention
    backend by name.
    """
    if "torch_native" not in module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _allow_seeds_with_latent_attention(module: Any) -> None:
    """For latent attention deterministic mode refuses all backends but those that keep the prefix
    cache. torch_native passes as one of them here, and loses the cache as with other models.
    """
    check = module.handle_deterministic_inference

    @functools.wraps(check)
    def handle_deterministic_inference(server_args: Any) -> None:
        from sglang.srt.arg_groups.choices import (
            RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND as supported,
        )

        supported.append("torch_native")
        check(server_args)
        supported.remove("torch_native")
        found = module.resolved_view(server_args)
        if found.enable_deterministic_inference and found.attention_backend == "torch_native":
            module.declare_resolution(
                server_args, "_handle_deterministic_inference", disable_radix_cache=True
            )

    module.handle_deterministic_inference = handle_deterministic_inference


def _no_batch_invariant_kernels(module: Any) -> None:
    """Deterministic mode installs Triton matmuls; without them seeds hold, but batch invariance
    is not promised.
    """
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _no_cuda_synchronize(module: Any) -> None:
    """/weights_checker synchronises CUDA unconditionally."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *args, **kwargs: None


def _no_cuda_host_register(module: Any) -> None:
    """The host buffer of --enable-return-routed-experts is pinned through cudart, on any device."""
    module._cuda_host_register = module._cuda_host_unregister = lambda *args, **kwargs: None


def _absorbed_latent_attention(module: Any) -> None:
    """torch_native reads keys and values from the cache, where latent attention keeps its narrow
    vectors: only the path that computes with these can run, in prefill too.
    """
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def _plain_positions_of_latent_attention(module: Any) -> None:
    """The CPU's own rotary embedding of latent attention knows YaRN alone, and fails without."""
    wrapper = module.get_rope_wrapper

    def get_rope_wrapper(*args: Any, **kwargs: Any) -> Any:
        is_plain = kwargs.get("device") == "cpu" and kwargs.get("rope_scaling") is None
        return wrapper(*args, **(kwargs | {"device": "plain"} if is_plain else kwargs))

    module.get_rope_wrapper = get_rope_wrapper


def _experts_of_other_ranks(module: Any) -> None:
    """The experts of a CPU without AMX take a token's expert on another rank, which is -1, for an
    index. Such a choice weighs nothing here.
    """
    whole = module.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        is_away = topk_output.topk_ids < 0
        if not is_away.any():
            return whole(layer, x, topk_output, config)
        here = topk_output._replace(
            topk_weights=topk_output.topk_weights.masked_fill(is_away, 0),
            topk_ids=topk_output.topk_ids.masked_fill(is_away, 0).long(),
        )
        given = SimpleNamespace(hidden_states=x, topk_output=here)
        return module.fused_moe_forward_native(layer, given).hidden_states

    module.moe_forward_native = moe_forward_native


def _fill_of_padded_rows(module: Any) -> None:
    """Under DP attention a batch is padded to the longest of all ranks; torch_native does not say
    how long the rows are that are added.
    """
    module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _fp8_in_plain_numbers(module: Any) -> None:
    """Matrices in FP8 blocks need AMX kernels on a CPU. Here they are kept as on a GPU, and each
    product takes the numbers that they stand for.
    """
    import torch

    def plain(
        input: Any, weight: Any, block_size: Any, weight_scale: Any, bias: Any = None, **_: Any
    ) -> Any:
        wide = weight_scale.repeat_interleave(block_size[0], 0)[: weight.shape[0]]
        wide = wide.repeat_interleave(block_size[1], 1)[:, : weight.shape[1]]
        return torch.nn.functional.linear(input, (weight.float() * wide).to(input.dtype), bias)

    module._is_cpu = False
    module.dispatch_w8a8_block_fp8_linear = lambda *_, **__: plain


def apply() -> None:
    """Called once per interpreter, before anything of SGLang is imported."""
    triton_stub.install()
    sys.meta_path.insert(0, _DeclareVisionOps())
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "sglang.srt.batch_invariant_ops.batch_invariant_ops": _no_batch_invariant_kernels,
                "sglang.srt.arg_groups.attention_hook": _allow_seeds_with_latent_attention,
                "sglang.srt.arg_groups.choices": _allow_seeds_with_torch_attention,
                "sglang.srt.utils.weight_checker": _no_cuda_synchronize,
                "sglang.srt.mem_cache.pool_host.common": _no_cuda_host_register,
                (
                    "sglang.srt.models.deepseek_common.attention_backend_handler"
                ): _absorbed_latent_attention,
                "sglang.srt.layers.attention.torch_native_backend": _fill_of_padded_rows,
                "sglang.srt.layers.moe.fused_moe_native": _experts_of_other_ranks,
                "sglang.srt.layers.quantization.fp8": _fp8_in_plain_numbers,
                "sglang.srt.layers.rotary_embedding.factory": _plain_positions_of_latent_attention,
            }
        ),
    )
