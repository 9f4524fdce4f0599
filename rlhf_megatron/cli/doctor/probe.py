"""What can only be told by importing a package, found out in a process of its own: `python -m ... NAME [ARGUMENT]`.

A broken package may raise anything, hang, or end its process. The last line of the output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TorchFacts:
    """Of torch, and of the devices that it sees."""

    version: str
    cuda: str  # that it was built with; empty: none
    why_no_cuda: str  # empty where a device can be used
    devices: tuple[str, ...]  # "NVIDIA H200, 139 GiB"
    capability: tuple[int, int]  # of the first; (0, 0) without one
    architectures: tuple[str, ...]  # "sm_90", or "compute_90" for code that the driver compiles
    driver: str
    nccl: str
    has_bfloat16: bool
    has_float32_product: bool
    has_norm_kernel: bool
    flash_why_not: str  # torch's own flash attention over packed documents
    triton_why_not: str  # for the head's kernels
    triton_version: str
    explicit_losses: tuple[str, ...]  # policy losses that tell their gradient


@dataclass(frozen=True)
class MegatronFacts:
    """Of megatron-core as it stands after it was made ready."""

    version: str
    adam: str
    has_transformer_engine: bool


def torch_facts() -> TorchFacts:
    """Raises what a broken torch raises."""
    import torch

    from rlhf_megatron.algorithms.losses import POLICY_LOSSES
    from rlhf_megatron.algorithms.losses.base import TELL_GRADIENT
    from rlhf_megatron.kernels.triton_support import triton_support, try_triton
    from rlhf_megatron.models.norm import has_torch_kernel
    from rlhf_megatron.parallel.weight_grad import has_float32_product

    is_usable, why_no_cuda = _cuda()
    device = torch.device("cuda", 0) if is_usable else torch.device("cpu")
    support = triton_support(device)
    places = range(torch.cuda.device_count()) if is_usable else ()
    names = [torch.cuda.get_device_properties(place) for place in places]
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        why_no_cuda=why_no_cuda,
        devices=tuple(f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in names),
        capability=torch.cuda.get_device_capability(0) if is_usable else (0, 0),
        architectures=tuple(torch.cuda.get_arch_list()) if is_usable else (),
        driver=_driver(),
        nccl=".".join(map(str, torch.cuda.nccl.version()))
        if is_usable and torch.distributed.is_nccl_available()
        else "",
        has_bfloat16=is_usable and torch.cuda.is_bf16_supported(),
        has_float32_product=has_float32_product(),
        has_norm_kernel=has_torch_kernel(),
        flash_why_not=_flash(),
        triton_why_not=try_triton(device) if is_usable else support.why_not,
        triton_version=support.version,
        explicit_losses=tuple(name for name in POLICY_LOSSES if POLICY_LOSSES.get(name).build in TELL_GRADIENT),
    )


def megatron_facts() -> MegatronFacts:
    """Makes megatron-core ready as a rank does. Raises what that raises."""
    import importlib.metadata

    from rlhf_megatron.parallel.prepare import prepare_megatron

    prepare_megatron()
    from rlhf_megatron.models.backend import has_transformer_engine
    from rlhf_megatron.workers.optimizer import adam_of_megatron

    return MegatronFacts(importlib.metadata.version("megatron-core"), adam_of_megatron(), has_transformer_engine())


def imported(names: str) -> dict[str, str]:
    """ "module:attribute,module:attribute" can be imported; raises what they raise."""
    for name in names.split(","):
        module, _, attribute = name.partition(":")
        getattr(importlib.import_module(module), attribute)
    return {}


def _cuda() -> tuple[bool, str]:
    import torch

    if torch.version.cuda is None:
        return False, "this build of torch has no CUDA"
    if torch.cuda.is_available():
        return True, ""
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError with the driver's words, AssertionError
        return False, str(error).splitlines()[0]
    return False, "torch finds no CUDA device"


def _flash() -> str:
    import torch

    from rlhf_megatron.models.flash import SOURCES
    from rlhf_megatron.parallel.packages import try_import

    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return try_import(*SOURCES["torch"])[1]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


PROBES: dict[str, Callable[..., Any]] = {"torch": torch_facts, "megatron": megatron_facts, "import": imported}


def main(arguments: list[str]) -> None:
    """Prints what a probe found; a traceback and exit code 1 where it failed."""
    found = PROBES[arguments[0]](*arguments[1:])
    sys.stdout.write("\n" + json.dumps(dataclasses.asdict(found) if dataclasses.is_dataclass(found) else found) + "\n")  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
