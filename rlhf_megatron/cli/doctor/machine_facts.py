"""What is on this machine: packages, devices, limits.

What only an import can tell is found out in processes of their own, all at
once (`python -m ... NAME [ARGUMENT]`):
a broken package may raise anything, hang, or end its process. The last line of their output is
one JSON object.
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

from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.ranks.parallel.optional_packages import (
    DEEP_EP,
    OptionalPackage,
    explain_missing_compiler,
    find_apex,
    find_package,
    find_transformer_engine,
    has_gradient_extension,
)

_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")

# of a probe: a first import from a network file system, a kernel that is compiled
PROBE_TIMEOUT_S = 120.0
FLASH_PACKAGES = {
    "flash_attn_3": (
        "flash_attn_interface",
        ("flash-attn-3", "flash_attn_3"),
        "flash_attn_varlen_func",
    ),
    "flash_attn_2": ("flash_attn", ("flash-attn",), "flash_attn_varlen_func"),
}
_IMPORTS_BY_PACKAGE = {  # what is taken of a package
    "transformer_engine": (
        "transformer_engine.pytorch:Linear,transformer_engine.pytorch.optimizers:FusedAdam"
    ),
    "apex": "amp_C:multi_tensor_adam,apex.optimizers:FusedAdam",
    DEEP_EP: "deep_ep:Buffer",
}


@dataclass(frozen=True)
class TorchFacts:
    """The abilities of torch on this machine, and the devices that it sees."""

    version: str
    cuda_version: str  # that it was built with; empty: none
    why_no_cuda: str  # empty where a device can be used
    device_names: tuple[str, ...]  # "NVIDIA H200, 139 GiB"
    capability: tuple[int, int]  # of the first; (0, 0) without one
    architectures: tuple[str, ...]  # "sm_90", or "compute_90" for code that the driver compiles
    driver_version: str
    nccl_version: str
    has_bfloat16: bool
    has_float32_product: bool
    has_norm_kernel: bool
    flash_why_not: str  # torch's own flash attention over packed documents
    triton_why_not: str  # for the head's kernels
    triton_version: str
    explicit_losses: tuple[str, ...]  # policy losses that tell their gradient


@dataclass(frozen=True)
class MegatronFacts:
    """The abilities of megatron-core on this machine,
    after it was prepared as a rank prepares it.
    """

    version: str
    adam_name: str
    has_transformer_engine: bool


def probe_torch() -> TorchFacts:
    """Import torch and return its abilities and devices on this machine. A broken torch may raise
    any exception.
    """
    import torch

    from rlhf_megatron.algorithms.losses import POLICY_LOSSES
    from rlhf_megatron.algorithms.losses.policy_loss import LOSSES_WITH_GRADIENT
    from rlhf_megatron.ranks.kernels.triton_support import query_triton_support, try_triton_kernel
    from rlhf_megatron.ranks.models.rms_norm_layer import has_torch_rms_norm_kernel
    from rlhf_megatron.ranks.parallel.weight_grad import has_float32_accumulating_product

    is_usable, why_no_cuda = _check_cuda()
    device = torch.device("cuda", 0) if is_usable else torch.device("cpu")
    support = query_triton_support(device)
    places = range(torch.cuda.device_count()) if is_usable else ()
    names = [torch.cuda.get_device_properties(place) for place in places]
    return TorchFacts(
        version=torch.__version__,
        cuda_version=torch.version.cuda or "",
        why_no_cuda=why_no_cuda,
        device_names=tuple(
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in names
        ),
        capability=torch.cuda.get_device_capability(0) if is_usable else (0, 0),
        architectures=tuple(torch.cuda.get_arch_list()) if is_usable else (),
        driver_version=read_tool_output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
        .strip()
        .partition("\n")[0],
        nccl_version=".".join(map(str, torch.cuda.nccl.version()))
        if is_usable and torch.distributed.is_nccl_available()
        else "",
        has_bfloat16=is_usable and torch.cuda.is_bf16_supported(),
        has_float32_product=has_float32_accumulating_product(),
        has_norm_kernel=has_torch_rms_norm_kernel(),
        flash_why_not=_explain_missing_flash_attention(),
        triton_why_not=try_triton_kernel(device) if is_usable else support.why_not,
        triton_version=support.version,
        explicit_losses=tuple(
            name for name in POLICY_LOSSES if POLICY_LOSSES.get(name).build in LOSSES_WITH_GRADIENT
        ),
    )


def probe_megatron() -> MegatronFacts:
    """Prepare megatron-core as a rank does, and return its abilities on this machine. A broken
    package may raise any exception.
    """
    import importlib.metadata

    from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron

    prepare_megatron()
    from rlhf_megatron.ranks.models.layer_specs import has_transformer_engine
    from rlhf_megatron.ranks.workers.megatron_optimizer import detect_megatron_adam

    return MegatronFacts(
        importlib.metadata.version("megatron-core"),
        detect_megatron_adam(),
        has_transformer_engine(),
    )


def probe_imports(import_paths: str) -> dict[str, str]:
    """Import each attribute of "module:attribute,module:attribute", and return {}. A broken package
    may raise any exception.
    """
    for name in import_paths.split(","):
        module, _, attribute = name.partition(":")
        getattr(importlib.import_module(module), attribute)
    return {}


def _check_cuda() -> tuple[bool, str]:
    """Return whether torch can use a CUDA device, and the reason where it cannot."""
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


def _explain_missing_flash_attention() -> str:
    """Return why torch's own flash attention over packed documents is not usable; "" if it is."""
    import torch

    from rlhf_megatron.ranks.models.flash_attention import SOURCES
    from rlhf_megatron.ranks.parallel.optional_packages import try_import_attribute

    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return try_import_attribute(*SOURCES["torch"])[1]


PROBES: dict[str, Callable[..., Any]] = {
    "torch": probe_torch,
    "megatron": probe_megatron,
    "import": probe_imports,
}


def main(arguments: list[str]) -> None:
    """Run the probe that the first argument names, with the other arguments, and print its result
    as a JSON line. An exception of the probe ends the process with a traceback.
    """
    found = PROBES[arguments[0]](*arguments[1:])
    record = (
        dataclasses.asdict(found)  # type: ignore[arg-type]
        if dataclasses.is_dataclass(found)
        else found
    )
    sys.stdout.write("\n" + json.dumps(record) + "\n")


Record = TypeVar("Record", TorchFacts, MegatronFacts)


@dataclass(frozen=True)
class HostLimits:
    num_cpus: int  # that this process may use
    omp_num_threads: str  # empty: not set
    shm_free_bytes: int | None  # free in /dev/shm; None: there is none
    shm_total_bytes: int | None
    open_file_limits: tuple[int, int]  # soft and hard limit
    infiniband_adapters: tuple[str, ...]  # names of adapters
    gpu_links: str  # between the GPUs, in nvidia-smi's words; empty: it tells nothing
    max_connections: str  # CUDA_DEVICE_MAX_CONNECTIONS
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class MachineFacts:
    host: HostLimits
    torch: TorchFacts | None
    torch_error: str
    megatron: MegatronFacts | None  # None: not tried, or broken
    megatron_error: str
    megatron_version: str  # empty: not installed
    packages: Mapping[str, OptionalPackage] = field(default_factory=dict)
    has_gradient_extension: bool = False
    compiler_why_not: str = ""

    @property
    def has_cuda(self) -> bool:
        """Return whether torch can be imported and can use a CUDA device."""
        return self.torch is not None and not self.torch.why_no_cuda


class ProbeProcess:
    """A child process that was started; `wait_for_result` waits for it."""

    def __init__(self, *arguments: str) -> None:
        """Start the probe with these arguments in a process of its own."""
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "rlhf_megatron.cli.doctor.machine_facts",
            *arguments,
        ]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=make_import_environment(os.environ),
        )

    def wait_for_result(self) -> tuple[dict[str, Any], str]:
        """Wait for the probe, and return (its result, "") or ({}, the reason of its failure in one
        line). Kill a probe that takes too long. Never raise for a failed probe.
        """
        try:
            output, errors = self._process.communicate(timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {}, f"did not finish in {PROBE_TIMEOUT_S:.0f} s"
        if self._process.returncode == 0:
            try:
                return json.loads(output.strip().splitlines()[-1]), ""
            except (IndexError, ValueError):
                return {}, "ended without an answer"
        if self._process.returncode < 0:
            return {}, f"ended its process by signal {-self._process.returncode}"
        return {}, _find_last_error_line(
            errors
        ) or f"ended its process with exit code {self._process.returncode}"


def gather_machine_facts() -> MachineFacts:
    """Return all facts of this machine. The probes run at the same time, so this takes about as
    long as importing torch, or longer where more packages can be tried.
    """
    found = {package.module: package for package in (find_transformer_engine(), find_apex())}
    for module, names, _ in FLASH_PACKAGES.values():
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
    torch_probe = ProbeProcess("torch")
    imports = {
        module: names for module, names in _IMPORTS_BY_PACKAGE.items() if found[module].is_usable
    }
    imports |= {
        module: f"{module}:{name}"
        for module, _, name in FLASH_PACKAGES.values()
        if found[module].is_usable
    }
    tried = {module: ProbeProcess("import", names) for module, names in imports.items()}
    megatron_package = find_package("megatron", ("megatron-core",))
    # megatron-core takes seconds, and without a GPU and these packages there is nothing about
    # it to find out.
    is_tried = megatron_package.version and (
        any(module in imports for module in _IMPORTS_BY_PACKAGE) or _may_have_gpu()
    )
    megatron_probe = ProbeProcess("megatron") if is_tried else None
    torch, torch_error = _read_probe_record(TorchFacts, torch_probe)
    megatron, megatron_error = _read_probe_record(MegatronFacts, megatron_probe)
    for module, probe in tried.items():
        error = probe.wait_for_result()[1]
        if error:
            found[module] = OptionalPackage(
                module, True, found[module].version, f"cannot be imported: {error}"
            )
    return MachineFacts(
        host=read_host_limits(),
        torch=torch,
        torch_error=torch_error,
        megatron=megatron,
        megatron_error=megatron_error,
        megatron_version=megatron_package.version,
        packages=found,
        has_gradient_extension=has_gradient_extension(),
        compiler_why_not=explain_missing_compiler(),
    )


def read_host_limits() -> HostLimits:
    """Return the limits of this machine and this process."""
    shm = Path("/dev/shm")
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    adapters = Path("/sys/class/infiniband")
    return HostLimits(
        num_cpus=len(os.sched_getaffinity(0)),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        shm_free_bytes=usage.free if usage else None,
        shm_total_bytes=usage.total if usage else None,
        open_file_limits=resource.getrlimit(resource.RLIMIT_NOFILE),
        infiniband_adapters=tuple(sorted(path.name for path in adapters.iterdir()))
        if adapters.is_dir()
        else (),
        gpu_links=parse_gpu_links(read_tool_output(["nvidia-smi", "topo", "-m"])),
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def parse_gpu_links(topology_text: str) -> str:
    """Return the kinds of links in the matrix of `nvidia-smi topo -m`, as in "NV18" or "NV4, SYS";
    "" with fewer than two GPUs.
    """
    rows = [line.split() for line in topology_text.splitlines()]
    rows = [row for row in rows if row and row[0].startswith("GPU") and "X" in row]
    kinds = {cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"}
    return ", ".join(sorted(kinds)) if len(rows) > 1 else ""


def read_tool_output(command: Sequence[str]) -> str:
    """Return the standard output of a tool; "" if the tool is missing, fails, or takes more than 20
    seconds.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            env=make_import_environment(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _may_have_gpu() -> bool:
    """Return whether this machine shows signs of an NVIDIA driver; cheap, without torch."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _read_probe_record(
    record_type: type[Record], probe: ProbeProcess | None
) -> tuple[Record | None, str]:
    """Wait for a probe, and return (its result as this record, "") or (None, the reason of its
    failure); (None, "") where no probe was started.
    """
    if probe is None:
        return None, ""
    found, error = probe.wait_for_result()
    if error:
        return None, error
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    return record_type(**values), ""


def _find_last_error_line(stderr_text: str) -> str:
    """Return the line of a traceback that says what was raised; of a message with several lines,
    the first.
    """
    lines = stderr_text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    after = lines[starts[-1] + 1 :] if starts else lines[-1:]
    return next(
        (line for line in after if line and not line.startswith(" ")), lines[-1] if lines else ""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
