"""Makes stock megatron-core run without CUDA, over gloo. Applied only there. `PATCHES` is
the whole list.

Inside every loaded megatron.core module the name `torch` is bound to a proxy that forwards to
torch, so that torch itself stays as it is: wrapping torch.zeros or torch.cuda in place breaks
`import torch._dynamo`, which every torch optimizer needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.mcore_patch import (
    MegatronPatch,
    apply_needed_patches,
    replace_symbol,
)

CPU = torch.device("cpu")
FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)
MODULES = (  # loaded before the names in them are bound; megatron imports some of these late
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)


class _CpuEvent:
    """A stand-in for torch.cuda.Event: CPU work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        """Return 0.0: nothing is timed on a CPU."""
        return 0.0

    def query(self) -> bool:
        """Return True: CPU work is always done."""
        return True

    def record(self, *args: Any) -> None:
        """Do nothing."""

    wait = synchronize = record


class _CpuStream:
    """A stand-in for torch.cuda.Stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: _CpuEvent | None = None) -> _CpuEvent:
        """Return `event`, or a new `_CpuEvent`."""
        return event or _CpuEvent()

    def wait_stream(self, *args: Any) -> None:
        """Do nothing."""

    wait_event = synchronize = wait_stream


class _ModuleProxy(types.ModuleType):
    """A module with some names replaced; all other names are those of `target_module`."""

    def __init__(self, target_module: types.ModuleType, **replacements: Any) -> None:
        super().__init__(target_module.__name__)
        self.__dict__.update(replacements, _target=target_module)

    def __getattr__(self, name: str) -> Any:
        """Return the target module's attribute."""
        return getattr(self.__dict__["_target"], name)


def _wrap_factory_for_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return `factory` that creates tensors on the CPU where CUDA is requested, and never in pinned
    memory.
    """

    @functools.wraps(factory)
    def create_on_cpu(*args: Any, **kwargs: Any) -> Any:
        """Create the tensor on the CPU and not in pinned memory."""
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create_on_cpu


def _all_gather_uneven(
    outputs: list[Any], tensor: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Gather tensors that may differ in their number of rows into `outputs`. Unlike torch's
    function, return None (the gather is done) where the shapes differ.
    """
    if len({output.shape for output in outputs}) == 1:
        return dist.all_gather(outputs, tensor, group=group, async_op=async_op)
    rows = max(output.size(0) for output in outputs)
    padded = torch.cat([tensor, tensor.new_zeros(rows - tensor.size(0), *tensor.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(gathered, padded, group=group)
    for output, part in zip(outputs, gathered, strict=True):
        output.copy_(part[: output.size(0)])
    return None


def _reduce_scatter_uneven(
    output: Any,
    inputs: list[Any],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce `inputs`, which may differ in their number of rows, and write this rank's part to
    `output`. Where the shapes differ, return None (the work is done).
    """
    if len({part.shape for part in inputs}) == 1:
        return dist.reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    whole = torch.cat(inputs)
    dist.all_reduce(whole, op=op, group=group)
    output.copy_(whole.split([part.size(0) for part in inputs])[dist.get_rank(group)])
    return None


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing."""


def _make_torch_proxy() -> _ModuleProxy:
    """Return the proxy of torch that megatron's modules get in place of torch: tensors on the CPU,
    and CUDA's streams, events and calls without effect.
    """
    stream = _CpuStream()
    cuda = _ModuleProxy(
        torch.cuda,
        current_device=lambda: CPU,
        synchronize=_do_nothing,
        empty_cache=_do_nothing,
        set_device=_do_nothing,
        Stream=_CpuStream,
        Event=_CpuEvent,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda stream: contextlib.nullcontext(),
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
    )
    distributed = _ModuleProxy(
        dist, all_gather=_all_gather_uneven, reduce_scatter=_reduce_scatter_uneven
    )
    factories = {name: _wrap_factory_for_cpu(getattr(torch, name)) for name in FACTORIES}
    return _ModuleProxy(torch, cuda=cuda, distributed=distributed, **factories)


_PROXY = _make_torch_proxy()


def rebind_torch() -> None:
    """Replace `torch` by the CPU proxy in all loaded megatron.core modules, and undo torch.compile
    on their functions. Call it again after importing another megatron.core module.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core"):
            continue
        if getattr(module, "torch", None) is torch:
            module.torch = _PROXY  # type: ignore[attr-defined]
        _restore_uncompiled_functions(module)
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == name:
                _restore_uncompiled_functions(value)


def _skip_compilation(function: Any = None, **options: Any) -> Any:
    """Return the function uncompiled; takes the place of torch.compile, as a function and as a
    decorator with options.
    """
    return (lambda decorated: decorated) if function is None else function


def _restore_uncompiled_functions(owner: Any) -> None:
    """Replace the compiled functions in a module or class by their originals."""
    for name, value in list(vars(owner).items()):
        original = getattr(value, "_torchdynamo_orig_callable", None)
        if original is not None and inspect.isfunction(value):
            setattr(owner, name, original)


def _patch_tensor_cuda() -> None:
    """Make `Tensor.cuda()` return the tensor itself."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_tensor_type() -> None:
    """Make `Tensor.type()` without arguments report the CUDA name of a CPU type."""
    real = torch.Tensor.type

    def report_cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor's type with "cuda" in its name, or convert where arguments say so."""
        if args or kwargs:
            return real(self, *args, **kwargs)
        return real(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = report_cuda_type  # type: ignore[method-assign]


def _patch_rng_state() -> None:
    """Make megatron's functions for CUDA's random state read and set torch's CPU generator."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_cpu_rng_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> Any:
        """Return the state of torch's CPU generator, whatever the arguments."""
        return torch.get_rng_state()

    def set_cpu_rng_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        """Set the state of torch's CPU generator, whatever the device."""
        torch.set_rng_state(state)

    replace_symbol(random, "_get_cuda_rng_state", get_cpu_rng_state)
    replace_symbol(random, "_set_cuda_rng_state", set_cpu_rng_state)


def _patch_moe_split_sizes() -> None:
    """Make the MoE dispatcher turn CPU split sizes into numpy arrays too."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def convert_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Return the tensor as a numpy array with `as_numpy`, else as it is."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    replace_symbol(dispatcher, "maybe_move_tensor_to_cpu", convert_to_numpy)


def _has_picked_fused_adam() -> bool:
    """Return whether megatron picked the optimizers of Transformer Engine or Apex."""
    return not importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER


def _use_torch_optimizers() -> None:
    """Make megatron use torch's AdamW and SGD and its own plain scaling and norm functions."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    utils: Any = importlib.import_module("megatron.core.utils")
    replace_symbol(optimizer, "USING_PYTORCH_OPTIMIZER", True)
    replace_symbol(optimizer, "Adam", torch.optim.AdamW)
    replace_symbol(optimizer, "SGD", torch.optim.SGD)
    clip_grads: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    for module in (importlib.import_module("megatron.core.optimizer.optimizer"), clip_grads):
        replace_symbol(module, "multi_tensor_applier", utils.local_multi_tensor_applier)
        replace_symbol(module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    replace_symbol(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):  # from 0.19 on
        clip_grads.multi_tensor_scale_tensor_impl = None


PATCHES = (
    MegatronPatch(
        (
            "torch in megatron.core.*: cuda.{current_device, synchronize, empty_cache, set_device,"
            " Stream, Event, stream, current_stream, default_stream, get_rng_state, manual_seed};"
            " tensor factories with device='cuda' or pin_memory=True; distributed.{all_gather,"
            " reduce_scatter} of uneven parts; functions under torch.compile"
        ),
        (
            "about 175 uses of torch.cuda.current_device() and 60 of 'cuda' literals; gloo takes"
            " equal parts only; torch.compile of small fused functions would run a C++ compiler at"
            " the first call"
        ),
        rebind_torch,
    ),
    MegatronPatch(
        "torch.Tensor.cuda",
        "tied embeddings, RoPE under CP and checkpoint exchange call tensor.cuda()",
        _patch_tensor_cuda,
    ),
    MegatronPatch(
        "torch.Tensor.type",
        "optimizers and gradient clipping compare type() with 'torch.cuda.FloatTensor'",
        _patch_tensor_type,
    ),
    MegatronPatch(
        "tensor_parallel.random.{_get,_set}_cuda_rng_state",
        "the CPU generator stands for the CUDA one in the RNG tracker and in recompute",
        _patch_rng_state,
    ),
    MegatronPatch(
        "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "split sizes become numbers only for CUDA tensors; all_to_all_single refuses a tensor",
        _patch_moe_split_sizes,
    ),
    MegatronPatch(
        (
            "optimizer.{USING_PYTORCH_OPTIMIZER, Adam, SGD}; {multi_tensor_applier,"
            " multi_tensor_scale_impl, l2_norm_impl} of optimizer.{optimizer, clip_grads}"
        ),
        (
            "those of Transformer Engine or Apex are taken wherever they can be imported, and run"
            " on CUDA only"
        ),
        _use_torch_optimizers,
        is_needed=_has_picked_fused_adam,
    ),
)

_state = {"is_applied": False}


def apply_cpu_platform() -> None:
    """Make megatron-core run without CUDA, once in this process; later calls only rebind torch in
    the modules imported since. Do nothing where CUDA is available.
    """
    if torch.cuda.is_available():
        return
    if _state["is_applied"]:
        rebind_torch()
        return
    _state["is_applied"] = True
    compile_function = torch.compile
    # else each decorator imports inductor: 2 s a process
    torch.compile = _skip_compilation  # type: ignore[assignment]
    try:
        for name in MODULES:
            importlib.import_module(name)
    finally:
        torch.compile = compile_function
    apply_needed_patches(PATCHES)
