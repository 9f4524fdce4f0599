"""Chooses the fused paths of a model and says why not a faster one. Pure: what is installed
comes as arguments.

Megatron-core offers more than is taken here, and says nothing where it takes something else: its
rotary fusion (our attention turns queries and keys itself), its softmax and attention (ours knows
packed documents), its persistent layer norm (the models have RMSNorm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf_megatron.ranks.parallel.optional_packages import INSTALL

if TYPE_CHECKING:
    from rlhf_megatron.weights.weight_table import LayerImpl

DeviceType = Literal["cpu", "cuda"]
AttentionKernel = Literal["flash_attn_3", "torch", "flash_attn_2", "by_length"]
NormKernel = Literal["transformer_engine", "torch", "apex", "plain"]
AdamKernel = Literal["transformer_engine", "apex", "torch"]
_HALF = ("bfloat16", "float16")
_NO_SINKS = "its two passes are not called apart, as sinks need them"
_LARGEST_HEAD = 256  # of all flash kernels
_HEAD_MULTIPLE = 8
# beyond, the backward pass needs the shared memory of data-center GPUs
_LARGEST_HEAD_OF_ALL_GPUS = 192
_DATA_CENTER_GPUS = ((8, 0), (9, 0), (10, 0), (10, 3))  # their compute capabilities


@dataclass(frozen=True)
class KernelChoice:
    """A chosen kernel. `why_not` says in one sentence why no faster kernel is in use; empty when
    there is none faster.
    """

    name: str
    why_not: str = ""
    fix: str = ""  # what to install or set for the faster one; empty where nothing helps here


def choose_attention_kernel(
    device: DeviceType,
    dtype: str,
    head_dim: int,
    capability: tuple[int, int],
    absence_reasons: Mapping[AttentionKernel, str],
    has_sinks: bool = False,
) -> KernelChoice:
    """Return the fastest attention kernel for packed documents: Flash Attention 3 (Hopper only),
    torch's own, which is Flash Attention 2 inside, then the package flash-attn 2. "by_length"
    remains where none can be used: scaled_dot_product_attention for all documents of a length at
    once, which takes any type and head, and waits for the device.

    `capability` is (0, 0) on a CPU. `absence_reasons` has an entry for each kernel that cannot be
    used here. With `has_sinks` each head has a logit of its own in the softmax, which only torch's
    kernel supports.
    """
    if device == "cpu":
        return KernelChoice("by_length", "flash attention runs on CUDA only")
    if dtype not in _HALF:
        return KernelChoice(
            "by_length", f"flash attention takes half precision only, and the model is {dtype}"
        )
    if head_dim > _LARGEST_HEAD or head_dim % _HEAD_MULTIPLE:
        why_not = (
            f"the head dimension ({head_dim}) is not a multiple of {_HEAD_MULTIPLE} up"
            f" to {_LARGEST_HEAD}"
        )
        return KernelChoice("by_length", why_not)
    if capability < (8, 0):
        return KernelChoice(
            "by_length",
            (
                "flash attention needs compute capability 8.0, and the device"
                f" has {_format_capability(capability)}"
            ),
        )
    if head_dim > _LARGEST_HEAD_OF_ALL_GPUS and capability not in _DATA_CENTER_GPUS:
        return KernelChoice(
            "by_length",
            (
                f"heads of {head_dim} need another GPU than one of"
                f" capability {_format_capability(capability)}"
            ),
        )
    if has_sinks:
        absence_reasons = {**absence_reasons, "flash_attn_3": _NO_SINKS, "flash_attn_2": _NO_SINKS}
    is_hopper = capability[0] == 9
    if is_hopper and "flash_attn_3" not in absence_reasons:
        return KernelChoice("flash_attn_3")
    faster = f"flash attention 3: {absence_reasons['flash_attn_3']}" if is_hopper else ""
    fix = INSTALL["flash_attn_interface"] if faster and not has_sinks else ""
    names: tuple[AttentionKernel, ...] = ("torch", "flash_attn_2")
    for name in names:
        if name not in absence_reasons:
            return KernelChoice(name, faster, fix)
    why_not = f"torch's: {absence_reasons['torch']}; flash-attn: {absence_reasons['flash_attn_2']}"
    other = "" if has_sinks else f", or {INSTALL['flash_attn']}"
    return KernelChoice("by_length", why_not, f"torch 2.11 or newer{other}")


def choose_norm_kernel(
    device: DeviceType,
    impl: LayerImpl,
    has_torch_kernel: bool,
    apex_why_not: str,
    has_apex_norm: bool,
) -> KernelChoice:
    """Return the kernel for RMSNorm in a model's layers. `has_torch_kernel` says that torch's
    rms_norm is one kernel on CUDA (2.9 and newer).
    """
    if device == "cpu":
        return KernelChoice(
            "plain", "fused norms run on CUDA only; here its gradient is written out by hand"
        )
    if impl == "transformer_engine":
        return KernelChoice("transformer_engine")
    if has_torch_kernel:
        return KernelChoice("torch")
    if not apex_why_not and has_apex_norm:
        return KernelChoice("apex")
    why_not = (
        "this torch has no kernel for RMSNorm;"
        f" Apex: {apex_why_not or 'it was built without its norms'}"
    )
    return KernelChoice("plain", why_not, "torch 2.9 or newer")


def choose_adam_kernel(device: DeviceType, imported_adam: AdamKernel) -> KernelChoice:
    """Return the Adam that steps run: torch's on a CPU, else `imported_adam`, which megatron-core
    picked when it was imported (Transformer Engine's, else Apex's, else torch's).
    """
    if device == "cpu":
        return KernelChoice(
            "torch",
            "fused Adams of other packages run on CUDA only; torch's fused AdamW runs here too",
        )
    return KernelChoice(imported_adam)


def choose_gradient_fusion(
    setting: bool | None,
    device: DeviceType,
    impl: LayerImpl,
    dtype: str,
    has_extension: bool,
    has_float32_product: bool,
) -> KernelChoice:
    """Return "off", or who adds weight gradients to the float32 buffers: "transformer_engine",
    "apex" or "torch".

    Raise ValueError where `setting` is True and no installed package can do it.
    """
    if setting is False:
        return KernelChoice("off", "gradient_accumulation_fusion is false")
    if device == "cpu":
        if setting is None:
            return KernelChoice(
                "off",
                "it saves next to nothing on a CPU",
                "gradient_accumulation_fusion: true runs it here too",
            )
        return KernelChoice("torch")
    if impl == "transformer_engine":
        return KernelChoice("transformer_engine")
    # the extension knows no other than half precision and float32
    if has_extension and dtype != "float64":
        return KernelChoice("apex")
    if has_float32_product or dtype not in _HALF:
        return KernelChoice("torch")
    fix = "install torch 2.10 or newer, Transformer Engine, or Apex with its CUDA extensions"
    why_not = f"in {dtype} it needs a matrix product into float32, which this torch has not"
    if setting:
        raise ValueError(
            f"gradient_accumulation_fusion (true) is not possible: {why_not}; {fix}, or"
            " leave it null."
        )
    return KernelChoice("off", why_not, fix)


def choose_compiled_activation(device: DeviceType, compiler_why_not: str) -> KernelChoice:
    """Return "compiled" where torch.compile can run megatron-core's bias + SwiGLU and bias +
    dropout + add, else "plain".
    """
    if device == "cpu":
        return KernelChoice("plain", "compiling it on a CPU costs minutes and gains nothing")
    if compiler_why_not:
        return KernelChoice(
            "plain",
            f"torch.compile cannot run: {compiler_why_not}",
            INSTALL["triton"] + "; apt install gcc",
        )
    return KernelChoice("compiled")


def _format_capability(capability: tuple[int, int]) -> str:
    """Return a compute capability as text, such as 9.0."""
    return f"{capability[0]}.{capability[1]}"
