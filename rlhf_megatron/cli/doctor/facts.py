"""What is on this machine: packages, devices, limits.

What only an import can tell is found out in processes of their own, all at once (`python -m ... NAME [ARGUMENT]`):
a broken package may raise anything, hang, or end its process. The last line of their output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_megatron.parallel.packages import (
    DEEP_EP,
    Package,
    find_apex,
    find_package,
    find_transformer_engine,
    has_gradient_extension,
    why_no_compiler,
)

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class TorchFacts:
    """The abilities of torch on this machine, and the devices that it sees."""

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
    """The abilities of megatron-core on this machine, after it was prepared as a rank prepares it."""

    version: str
    adam: str
    has_transformer_engine: bool


def torch_facts() -> TorchFacts:
    """Import torch and look at it. Raises what a broken torch raises."""
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
        driver=run_tool(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        .strip()
        .partition("\n")[0],
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
    """Make megatron-core ready as a rank does, and look at it. Raises what that raises."""
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


PROBES: dict[str, Callable[..., Any]] = {"torch": torch_facts, "megatron": megatron_facts, "import": imported}


def main(arguments: list[str]) -> None:
    """Prints what a probe found; a traceback and exit code 1 where it failed."""
    found = PROBES[arguments[0]](*arguments[1:])
    sys.stdout.write("\n" + json.dumps(dataclasses.asdict(found) if dataclasses.is_dataclass(found) else found) + "\n")  # type: ignore[arg-type]


TIMEOUT_S = 120.0  # of a probe: a first import from a network file system, a kernel that is compiled
FLASH = {
    "flash_attn_3": ("flash_attn_interface", ("flash-attn-3", "flash_attn_3"), "flash_attn_varlen_func"),
    "flash_attn_2": ("flash_attn", ("flash-attn",), "flash_attn_varlen_func"),
}
_IMPORTS = {  # what is taken of a package
    "transformer_engine": "transformer_engine.pytorch:Linear,transformer_engine.pytorch.optimizers:FusedAdam",
    "apex": "amp_C:multi_tensor_adam,apex.optimizers:FusedAdam",
    DEEP_EP: "deep_ep:Buffer",
}
Record = TypeVar("Record", TorchFacts, MegatronFacts)


@dataclass(frozen=True)
class Host:
    num_cpus: int  # that this process may use
    omp_num_threads: str  # empty: not set
    shm_bytes: int | None  # free in /dev/shm; None: there is none
    shm_total: int | None
    open_files: tuple[int, int]  # soft and hard limit
    infiniband: tuple[str, ...]  # names of adapters
    links: str  # between the GPUs, in nvidia-smi's words; empty: it tells nothing
    max_connections: str  # CUDA_DEVICE_MAX_CONNECTIONS
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class Facts:
    host: Host
    torch: TorchFacts | None
    torch_error: str
    megatron: MegatronFacts | None  # None: not tried, or broken
    megatron_error: str
    megatron_version: str  # empty: not installed
    packages: Mapping[str, Package] = field(default_factory=dict)
    has_gradient_extension: bool = False
    compiler_why_not: str = ""

    @property
    def has_cuda(self) -> bool:
        return self.torch is not None and not self.torch.why_no_cuda


class Probe:
    """A child process that was started; `result` waits for it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "rlhf_megatron.cli.doctor.facts", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> tuple[dict[str, Any], str]:
        """(what it found, "") or ({}, what went wrong in one line). Never raises."""
        try:
            output, errors = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {}, f"did not finish in {TIMEOUT_S:.0f} s"
        if self._process.returncode == 0:
            try:
                return json.loads(output.strip().splitlines()[-1]), ""
            except (IndexError, ValueError):
                return {}, "ended without an answer"
        if self._process.returncode < 0:
            return {}, f"ended its process by signal {-self._process.returncode}"
        return {}, _last_error(errors) or f"ended its process with exit code {self._process.returncode}"


def gather() -> Facts:
    """Gather everything, in about the time that importing torch takes; longer where there is more to try."""
    found = {package.module: package for package in (find_transformer_engine(), find_apex())}
    for module, names, _ in FLASH.values():
        found[module] = find_package(module, names)
    for module, names in (
        ("triton", ("triton", "pytorch-triton")),
        (DEEP_EP, ("deep-ep", "deep_ep")),
        ("tensorboard", ("tensorboard",)),
        ("wandb", ("wandb",)),
        ("ray", ("ray",)),
        ("transformers", ("transformers",)),
    ):
        found[module] = find_package(module, names)
    torch_probe = Probe("torch")
    imports = {module: names for module, names in _IMPORTS.items() if found[module].is_usable}
    imports |= {module: f"{module}:{name}" for module, _, name in FLASH.values() if found[module].is_usable}
    tried = {module: Probe("import", names) for module, names in imports.items()}
    megatron_package = find_package("megatron", ("megatron-core",))
    # megatron-core takes seconds, and without a GPU and these packages there is nothing about it to find out.
    is_tried = megatron_package.version and (any(module in imports for module in _IMPORTS) or _may_have_gpu())
    megatron_probe = Probe("megatron") if is_tried else None
    torch, torch_error = _record(TorchFacts, torch_probe)
    megatron, megatron_error = _record(MegatronFacts, megatron_probe)
    for module, probe in tried.items():
        error = probe.result()[1]
        if error:
            found[module] = Package(module, True, found[module].version, f"cannot be imported: {error}")
    return Facts(
        host=host(),
        torch=torch,
        torch_error=torch_error,
        megatron=megatron,
        megatron_error=megatron_error,
        megatron_version=megatron_package.version,
        packages=found,
        has_gradient_extension=has_gradient_extension(),
        compiler_why_not=why_no_compiler(),
    )


def host() -> Host:
    """Return the limits of this machine and this process."""
    shm = Path("/dev/shm")
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    adapters = Path("/sys/class/infiniband")
    return Host(
        num_cpus=len(os.sched_getaffinity(0)),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        shm_bytes=usage.free if usage else None,
        shm_total=usage.total if usage else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        infiniband=tuple(sorted(path.name for path in adapters.iterdir())) if adapters.is_dir() else (),
        links=links_between_gpus(run_tool(["nvidia-smi", "topo", "-m"])),
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def links_between_gpus(matrix: str) -> str:
    """The kinds of links in the matrix of `nvidia-smi topo -m`, "NV18" or "NV4, SYS"; empty without two GPUs."""
    rows = [line.split() for line in matrix.splitlines()]
    rows = [row for row in rows if row and row[0].startswith("GPU") and "X" in row]
    kinds = {cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"}
    return ", ".join(sorted(kinds)) if len(rows) > 1 else ""


def run_tool(command: Sequence[str]) -> str:
    """Return what a tool prints; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _may_have_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _record(kind: type[Record], probe: Probe | None) -> tuple[Record | None, str]:
    if probe is None:
        return None, ""
    found, error = probe.result()
    if error:
        return None, error
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return kind(**values), ""


def _last_error(text: str) -> str:
    """The line of a traceback that says what was raised, where its message has several lines the first."""
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    after = lines[starts[-1] + 1 :] if starts else lines[-1:]
    return next((line for line in after if line and not line.startswith(" ")), lines[-1] if lines else "")


if __name__ == "__main__":
    main(sys.argv[1:])
