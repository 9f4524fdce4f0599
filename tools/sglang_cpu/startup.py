"""What has to be different for stock SGLang 0.5.21 to start on a CPU without AMX. Each change names its reason."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

import triton_stub


class _DeclareVisionOps:
    """torchvision's wheel cannot load its CUDA-linked library beside the CPU torch and then fails to register a fake of
    `torchvision::nms`; declaring the schema first lets the import proceed."""

    done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and not self.done:
            self.done = True
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                self.library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


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
    """`sampling_seed` counts only in deterministic mode, which refuses the torch_native attention backend by name."""
    if "torch_native" not in module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _no_batch_invariant_kernels(module: Any) -> None:
    """Deterministic mode installs Triton matmuls; without them seeds hold, but batch invariance is not promised."""
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _no_cuda_synchronize(module: Any) -> None:
    """/weights_checker synchronises CUDA unconditionally."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *args, **kwargs: None


def _no_cuda_host_register(module: Any) -> None:
    """The host buffer of --enable-return-routed-experts is pinned through cudart, on any device."""
    module._cuda_host_register = module._cuda_host_unregister = lambda *args, **kwargs: None


def apply() -> None:
    """Called once per interpreter, before anything of SGLang is imported."""
    triton_stub.install()
    sys.meta_path.insert(0, _DeclareVisionOps())
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "sglang.srt.batch_invariant_ops.batch_invariant_ops": _no_batch_invariant_kernels,
                "sglang.srt.arg_groups.choices": _allow_seeds_with_torch_attention,
                "sglang.srt.utils.weight_checker": _no_cuda_synchronize,
                "sglang.srt.mem_cache.pool_host.common": _no_cuda_host_register,
            }
        ),
    )
