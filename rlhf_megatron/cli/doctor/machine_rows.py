"""The machine, the engines and what stands around the trainer, as rows of the doctor's table."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.cli.doctor.machine_facts import HostLimits, MachineFacts, read_tool_output
from rlhf_megatron.cli.doctor.trainer_rows import DoctorRow, PathState
from rlhf_megatron.config.rules.engine_rules import OLDEST_RAY
from rlhf_megatron.install_hints import format_install_command, format_sglang_cpu_hint
from rlhf_megatron.ranks.parallel.optional_packages import OptionalPackage
from rlhf_megatron.rollout.sglang.sglang_environment import check_sglang_version

GIB = 1 << 30
MIN_SHM_BYTES = GIB  # two buffers of rollout.update_weights_bucket_megabytes as it is by default
MIN_OPEN_FILES = 4096  # sockets of many requests at a time, files of sharded checkpoints
_SGLANG_VERSION_PROGRAM = "import importlib.metadata as m; print(m.version('sglang'))"
_ROUTER_VERSION_PROGRAM = "import importlib.metadata as m; print(m.version('sglang-router'))"
_ARCHITECTURE_PATTERN = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
# as docs/install.md and `make sglang-cpu` name it
SGLANG_ENVIRONMENT_PYTHON = Path(".venv-sglang/bin/python")


def make_device_rows(facts: MachineFacts) -> list[DoctorRow]:
    """Return the rows on torch, accelerators, collectives and the links between GPUs."""
    torch = facts.torch
    if torch is None:
        fix = "install torch for this machine: https://pytorch.org/get-started/locally"
        return [DoctorRow("device", "torch", "broken", "nothing can run", facts.torch_error, fix)]
    if torch.why_no_cuda:
        built = f"for CUDA {torch.cuda_version}" if torch.cuda_version else "without CUDA"
        return [
            DoctorRow("device", "torch", "live", f"{torch.version}, built {built}"),
            DoctorRow(
                "device",
                "accelerator",
                "not live",
                "ranks are CPU processes",
                *_explain_missing_device(facts),
            ),
            DoctorRow("device", "collectives", "live", "gloo", "NCCL needs GPUs"),
        ]
    devices = (
        f"{len(torch.device_names)} x {torch.device_names[0]}, driver {torch.driver_version or '?'}"
    )
    return [
        _make_torch_row(facts),
        DoctorRow("device", "accelerator", "live", devices),
        _make_bfloat16_row(torch.has_bfloat16),
        _make_nccl_row(torch.nccl_version),
        _make_interconnect_row(facts.host, len(torch.device_names)),
        _make_overlap_row(facts.host, torch.capability),
    ]


def make_engine_rows(python_path: str | None) -> list[DoctorRow]:
    """Return the rows on the bundled engine, and on SGLang and its router in the interpreter that
    starts servers. Where `python_path` is None, that is .venv-sglang's interpreter if it exists,
    else this one.
    """
    chosen = python_path or (
        str(SGLANG_ENVIRONMENT_PYTHON) if SGLANG_ENVIRONMENT_PYTHON.exists() else sys.executable
    )
    found = shutil.which(chosen)
    bundled = DoctorRow("engines", "bundled engine", "live", "rollout.engine: local (transformers)")
    install = (
        "python3 -m venv .venv-sglang && .venv-sglang/bin/python -m pip install 'sglang>=0.5.21'"
        f" (without a GPU: {format_sglang_cpu_hint()}), then rollout.sglang.python:"
        " .venv-sglang/bin/python"
    )
    if found is None:
        return [
            bundled,
            DoctorRow("engines", "SGLang", "broken", chosen, "it is not an executable", install),
        ]
    version = read_tool_output([found, "-c", _SGLANG_VERSION_PROGRAM]).strip()
    router = read_tool_output([found, "-c", _ROUTER_VERSION_PROGRAM]).strip()
    return [bundled, _make_sglang_row(version, chosen, install), _make_router_row(router, chosen)]


def make_launcher_and_logger_rows(facts: MachineFacts) -> list[DoctorRow]:
    """Return the rows on torchrun, Ray, TensorBoard and Weights & Biases."""
    ray = facts.packages["ray"]
    return [
        DoctorRow("around", "torchrun", "live", "the launcher of several ranks"),
        _make_ray_row(ray),
        _make_package_row("around", facts.packages["tensorboard"], "pip install tensorboard"),
        _make_package_row("around", facts.packages["wandb"], format_install_command("wandb")),
    ]


def _make_ray_row(ray: OptionalPackage) -> DoctorRow:
    """Return the row on Ray: not live if it is missing, broken if it is too old. The launcher
    itself explains in full what it needs (`runtime.ray.ray_environment`).
    """
    wanted = ".".join(map(str, OLDEST_RAY))
    install = f'pip install "ray>={wanted}"'
    if not ray.is_present:
        return DoctorRow(
            "around", "Ray", "not live", "not installed", "trainer.runtime: ray needs it", install
        )
    if tuple(int(part) for part in ray.version.split(".")[:2]) < OLDEST_RAY:
        return DoctorRow(
            "around",
            "Ray",
            "broken",
            ray.version,
            f"trainer.runtime: ray needs {wanted} or newer",
            install,
        )
    return DoctorRow("around", "Ray", "live", f"{ray.version}, trainer.runtime: ray")


def make_host_rows(host: HostLimits) -> list[DoctorRow]:
    """Return the rows on threads, shared memory and open files."""
    threads = f"{host.num_cpus} CPUs, OMP_NUM_THREADS {host.omp_num_threads or 'not set'}"
    note = (
        ""
        if host.omp_num_threads
        else "one node: set to CPUs / ranks; torchrun over several nodes: 1"
    )
    return [
        DoctorRow("host", "threads", "live", threads, note),
        _make_shared_memory_row(host),
        _make_open_files_row(host),
    ]


def _explain_missing_device(facts: MachineFacts) -> tuple[str, str]:
    """Return (the reason why torch sees no GPU, a fix or ""). torch must be importable."""
    assert facts.torch is not None
    if facts.host.visible_devices == "":
        return "CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"
    has_gpu = bool(facts.torch.driver_version) or Path("/dev/nvidiactl").exists()
    if not facts.torch.cuda_version:
        fix = (
            "install torch's CUDA build: docs/install.md, A GPU machine that brings its own torch"
            if has_gpu
            else ""
        )
        return facts.torch.why_no_cuda, fix
    fix = (
        "nvidia-smi must work: install or update the driver, or pass the GPUs to the container"
        " (--gpus all)"
    )
    return facts.torch.why_no_cuda, fix


def _make_torch_row(facts: MachineFacts) -> DoctorRow:
    """Return the row on torch on a machine with a GPU; broken if torch has no code for the GPU,
    which would fail with "no kernel image is available".
    """
    torch = facts.torch
    assert torch is not None
    major, minor = torch.capability
    taken = (
        f"{torch.version}, built for CUDA {torch.cuda_version} ({' '.join(torch.architectures)})"
    )
    if has_code_for_capability(torch.architectures, torch.capability):
        return DoctorRow("device", "torch", "live", taken)
    why = f"it has no code for compute capability {major}.{minor}"
    return DoctorRow(
        "device", "torch", "broken", taken, why, f"install a build of torch with sm_{major}{minor}"
    )


def has_code_for_capability(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether code for these architectures runs on a GPU of this compute capability.

    Code for a GPU ("sm_80") runs on later GPUs of its generation, that for "sm_90a" on no other,
    and code that the driver compiles ("compute_80") on any later one.
    """
    for name in architectures:
        match = _ARCHITECTURE_PATTERN.fullmatch(name)
        if match is None:
            continue
        built = (int(match[2]), int(match[3]))
        if match[4] == "a":
            fits = built == capability
        else:
            fits = built <= capability and (match[1] == "compute" or built[0] == capability[0])
        if fits:
            return True
    return False


def _make_bfloat16_row(has_bfloat16: bool) -> DoctorRow:
    """Return the row on bfloat16; not live where the GPU emulates it."""
    if has_bfloat16:
        return DoctorRow("device", "bfloat16", "live", "in hardware")
    return DoctorRow(
        "device",
        "bfloat16",
        "not live",
        "emulated",
        "the GPU is older than Ampere",
        "model.dtype: float32",
    )


def _make_nccl_row(nccl_version: str) -> DoctorRow:
    """Return the row on collectives over GPUs; broken if torch has no NCCL (version "")."""
    if nccl_version:
        return DoctorRow("device", "collectives", "live", f"NCCL {nccl_version}")
    return DoctorRow(
        "device",
        "collectives",
        "broken",
        "none",
        "this build of torch has no NCCL",
        "install torch's own build",
    )


def _make_interconnect_row(host: HostLimits, num_devices: int) -> DoctorRow:
    """Return the row on the links between GPUs and on InfiniBand adapters; not live if some pairs
    of GPUs lack NVLink or the links are unknown.
    """
    adapters = (
        f"InfiniBand {', '.join(host.infiniband_adapters)}"
        if host.infiniband_adapters
        else "no InfiniBand adapter"
    )
    if num_devices < 2:
        return DoctorRow("device", "interconnect", "live", f"one GPU; {adapters}")
    if not host.gpu_links:
        return DoctorRow(
            "device", "interconnect", "not live", adapters, "nvidia-smi topo -m tells nothing"
        )
    has_nvlink = all(kind.startswith("NV") for kind in host.gpu_links.split(", "))
    why = (
        ""
        if has_nvlink
        else (
            "some pairs of GPUs have no NVLink: keep tensor_model_parallel_size within"
            " those that do"
        )
    )
    return DoctorRow(
        "device",
        "interconnect",
        "live" if has_nvlink else "not live",
        f"{host.gpu_links}; {adapters}",
        why,
    )


def _make_overlap_row(host: HostLimits, capability: tuple[int, int]) -> DoctorRow:
    """Return the row on CUDA_DEVICE_MAX_CONNECTIONS: before Blackwell, megatron-core needs 1, so
    that kernels start in the order of their calls and communication overlaps.
    """
    value = host.max_connections or "not set"
    if capability[0] >= 10 or host.max_connections == "1":
        return DoctorRow(
            "device", "overlap under tp", "live", f"CUDA_DEVICE_MAX_CONNECTIONS {value}"
        )
    fix = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    why = (
        "before Blackwell, collectives of tensor parallelism may start behind the products that"
        " should hide them"
    )
    return DoctorRow(
        "device", "overlap under tp", "not live", f"CUDA_DEVICE_MAX_CONNECTIONS {value}", why, fix
    )


def _make_sglang_row(version: str, python_path: str, install_command: str) -> DoctorRow:
    """Return the row on SGLang; not live if it is missing (version ""), broken if its version is
    not supported.
    """
    if not version:
        return DoctorRow(
            "engines",
            "SGLang",
            "not live",
            "not used",
            f"{python_path} has no sglang",
            install_command,
        )
    try:
        warning = check_sglang_version(version, python_path)
    except ValueError as error:
        return DoctorRow(
            "engines",
            "SGLang",
            "broken",
            f"{version} in {python_path}",
            str(error),
            install_command,
        )
    return DoctorRow("engines", "SGLang", "live", f"{version} in {python_path}", warning or "")


def _make_router_row(version: str, python_path: str) -> DoctorRow:
    """Return the row on sglang-router; not live if it is missing (version "")."""
    install = f"{python_path} -m pip install --no-deps 'sglang-router>=0.3.2,<0.4'"
    if not version:
        why = f"{python_path} has no sglang-router; the run spreads requests itself"
        return DoctorRow(
            "engines", "sglang-router", "not live", "rollout.router: balancer", why, install
        )
    return DoctorRow("engines", "sglang-router", "live", f"{version} in {python_path}")


def _make_package_row(area: str, package: OptionalPackage, install_command: str) -> DoctorRow:
    """Return the row on an optional package, with the command that installs it where it is missing
    or broken.
    """
    if package.is_usable:
        return DoctorRow(area, package.module, "live", package.version)
    state: PathState = "broken" if package.is_present else "not live"
    return DoctorRow(area, package.module, state, "not used", package.why_not, install_command)


def _make_shared_memory_row(host: HostLimits) -> DoctorRow:
    """Return the row on /dev/shm; not live if it is missing or has too little free space."""
    if host.shm_free_bytes is None or host.shm_total_bytes is None:
        why = "weights reach the engines through files in the temporary directory"
        return DoctorRow(
            "host", "/dev/shm", "not live", "not there", why, "mount it: docker run --shm-size=16g"
        )
    taken = f"{host.shm_free_bytes / GIB:.1f} of {host.shm_total_bytes / GIB:.1f} GiB free"
    if host.shm_free_bytes < MIN_SHM_BYTES:
        why = f"weight buffers and data loaders want {MIN_SHM_BYTES / GIB:.0f} GiB or more"
        return DoctorRow(
            "host",
            "/dev/shm",
            "not live",
            taken,
            why,
            "docker run --shm-size=16g, or rollout.transfer_dir",
        )
    return DoctorRow("host", "/dev/shm", "live", taken)


def _make_open_files_row(host: HostLimits) -> DoctorRow:
    """Return the row on the limit of open files; not live if the limit is low."""
    soft, hard = host.open_file_limits
    if soft < MIN_OPEN_FILES:
        why = f"below {MIN_OPEN_FILES}, many engines or ranks run out of sockets"
        return DoctorRow(
            "host",
            "open files",
            "not live",
            f"{soft} (hard limit {hard})",
            why,
            f"ulimit -n {min(65536, hard)}",
        )
    return DoctorRow("host", "open files", "live", str(soft))
