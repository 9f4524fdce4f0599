"""The machine, the engines and what stands around the trainer, as rows of the doctor's table."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.cli.doctor.facts import Facts, Host, run_tool
from rlhf_megatron.cli.doctor.rows import Row, State
from rlhf_megatron.config.rules.engines import OLDEST_RAY
from rlhf_megatron.parallel.packages import Package
from rlhf_megatron.rollout.sglang.environment import check_version

GIB = 1 << 30
SHM_WANTED = GIB  # two buffers of rollout.update_weights_bucket_megabytes as it is by default
FILES_WANTED = 4096  # sockets of many requests at a time, files of sharded checkpoints
_SGLANG_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"
_ROUTER_VERSION = "import importlib.metadata as m; print(m.version('sglang-router'))"
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
OWN_ENVIRONMENT = Path(".venv-sglang/bin/python")  # as docs/install.md and `make sglang-cpu` name it


def device_rows(facts: Facts) -> list[Row]:
    """Return the rows on accelerators, torch and what moves data between ranks."""
    torch = facts.torch
    if torch is None:
        fix = "install torch for this machine: https://pytorch.org/get-started/locally"
        return [Row("device", "torch", "broken", "nothing can run", facts.torch_error, fix)]
    if torch.why_no_cuda:
        built = f"for CUDA {torch.cuda}" if torch.cuda else "without CUDA"
        return [
            Row("device", "torch", "live", f"{torch.version}, built {built}"),
            Row("device", "accelerator", "not live", "ranks are CPU processes", *_why_no_device(facts)),
            Row("device", "collectives", "live", "gloo", "NCCL needs GPUs"),
        ]
    devices = f"{len(torch.devices)} x {torch.devices[0]}, driver {torch.driver or '?'}"
    return [
        _torch_row(facts),
        Row("device", "accelerator", "live", devices),
        _bfloat16_row(torch.has_bfloat16),
        _nccl_row(torch.nccl),
        _links_row(facts.host, len(torch.devices)),
        _connections_row(facts.host, torch.capability),
    ]


def engine_rows(python: str | None) -> list[Row]:
    """SGLang and its router in the interpreter that starts servers. `python` None: this one, or .venv-sglang's."""
    chosen = python or (str(OWN_ENVIRONMENT) if OWN_ENVIRONMENT.exists() else sys.executable)
    found = shutil.which(chosen)
    bundled = Row("engines", "bundled engine", "live", "rollout.engine: local (transformers)")
    install = (
        "python3 -m venv .venv-sglang && .venv-sglang/bin/python -m pip install 'sglang>=0.5.21' (without a GPU:"
        " make sglang-cpu), then rollout.sglang.python: .venv-sglang/bin/python"
    )
    if found is None:
        return [bundled, Row("engines", "SGLang", "broken", chosen, "it is not an executable", install)]
    version = run_tool([found, "-c", _SGLANG_VERSION]).strip()
    router = run_tool([found, "-c", _ROUTER_VERSION]).strip()
    return [bundled, _sglang_row(version, chosen, install), _router_row(router, chosen)]


def around_rows(facts: Facts) -> list[Row]:
    """Return the rows on launchers and loggers."""
    ray = facts.packages["ray"]
    return [
        Row("around", "torchrun", "live", "the launcher of several ranks"),
        _ray_row(ray),
        _package_row("around", facts.packages["tensorboard"], "pip install tensorboard"),
        _package_row("around", facts.packages["wandb"], "pip install 'rlhf-megatron[wandb]'"),
    ]


def _ray_row(ray: Package) -> Row:
    """The launcher says in full what it needs (`runtime.ray.environment`)."""
    wanted = ".".join(map(str, OLDEST_RAY))
    install = f'pip install "ray>={wanted}"'
    if not ray.is_present:
        return Row("around", "Ray", "not live", "not installed", "trainer.runtime: ray needs it", install)
    if tuple(int(part) for part in ray.version.split(".")[:2]) < OLDEST_RAY:
        return Row("around", "Ray", "broken", ray.version, f"trainer.runtime: ray needs {wanted} or newer", install)
    return Row("around", "Ray", "live", f"{ray.version}, trainer.runtime: ray")


def host_rows(host: Host) -> list[Row]:
    """Return the rows on threads, shared memory and limits."""
    threads = f"{host.num_cpus} CPUs, OMP_NUM_THREADS {host.omp_num_threads or 'not set'}"
    note = "" if host.omp_num_threads else "one node: set to CPUs / ranks; torchrun over several nodes: 1"
    return [Row("host", "threads", "live", threads, note), _shm_row(host), _files_row(host)]


def _why_no_device(facts: Facts) -> tuple[str, str]:
    """(why, fix)"""
    assert facts.torch is not None
    if facts.host.visible_devices == "":
        return "CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"
    has_gpu = bool(facts.torch.driver) or Path("/dev/nvidiactl").exists()
    if not facts.torch.cuda:
        fix = "install torch's CUDA build: docs/install.md, A GPU machine that brings its own torch" if has_gpu else ""
        return facts.torch.why_no_cuda, fix
    fix = "nvidia-smi must work: install or update the driver, or pass the GPUs to the container (--gpus all)"
    return facts.torch.why_no_cuda, fix


def _torch_row(facts: Facts) -> Row:
    """Code for another GPU than the one that is there does not run: "no kernel image is available"."""
    torch = facts.torch
    assert torch is not None
    major, minor = torch.capability
    taken = f"{torch.version}, built for CUDA {torch.cuda} ({' '.join(torch.architectures)})"
    if runs_on(torch.architectures, torch.capability):
        return Row("device", "torch", "live", taken)
    why = f"it has no code for compute capability {major}.{minor}"
    return Row("device", "torch", "broken", taken, why, f"install a build of torch with sm_{major}{minor}")


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Code for a GPU ("sm_80") runs on later ones of its generation, that of "sm_90a" on no other, and what the driver
    compiles ("compute_80") on any later one."""
    for name in architectures:
        match = _ARCHITECTURE.fullmatch(name)
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


def _bfloat16_row(has_bfloat16: bool) -> Row:
    if has_bfloat16:
        return Row("device", "bfloat16", "live", "in hardware")
    return Row("device", "bfloat16", "not live", "emulated", "the GPU is older than Ampere", "model.dtype: float32")


def _nccl_row(nccl: str) -> Row:
    if nccl:
        return Row("device", "collectives", "live", f"NCCL {nccl}")
    return Row(
        "device", "collectives", "broken", "none", "this build of torch has no NCCL", "install torch's own build"
    )


def _links_row(host: Host, num_devices: int) -> Row:
    adapters = f"InfiniBand {', '.join(host.infiniband)}" if host.infiniband else "no InfiniBand adapter"
    if num_devices < 2:
        return Row("device", "interconnect", "live", f"one GPU; {adapters}")
    if not host.links:
        return Row("device", "interconnect", "not live", adapters, "nvidia-smi topo -m tells nothing")
    has_nvlink = all(kind.startswith("NV") for kind in host.links.split(", "))
    why = (
        "" if has_nvlink else "some pairs of GPUs have no NVLink: keep tensor_model_parallel_size within those that do"
    )
    return Row("device", "interconnect", "live" if has_nvlink else "not live", f"{host.links}; {adapters}", why)


def _connections_row(host: Host, capability: tuple[int, int]) -> Row:
    """megatron-core counts on kernels starting in the order of their calls, to overlap communication."""
    value = host.max_connections or "not set"
    if capability[0] >= 10 or host.max_connections == "1":
        return Row("device", "overlap under tp", "live", f"CUDA_DEVICE_MAX_CONNECTIONS {value}")
    fix = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    why = "before Blackwell, collectives of tensor parallelism may start behind the products that should hide them"
    return Row("device", "overlap under tp", "not live", f"CUDA_DEVICE_MAX_CONNECTIONS {value}", why, fix)


def _sglang_row(version: str, python: str, install: str) -> Row:
    if not version:
        return Row("engines", "SGLang", "not live", "not used", f"{python} has no sglang", install)
    try:
        warning = check_version(version, python)
    except ValueError as error:
        return Row("engines", "SGLang", "broken", f"{version} in {python}", str(error), install)
    return Row("engines", "SGLang", "live", f"{version} in {python}", warning or "")


def _router_row(version: str, python: str) -> Row:
    install = f"{python} -m pip install --no-deps 'sglang-router>=0.3.2,<0.4'"
    if not version:
        why = f"{python} has no sglang-router; the run spreads requests itself"
        return Row("engines", "sglang-router", "not live", "rollout.router: balancer", why, install)
    return Row("engines", "sglang-router", "live", f"{version} in {python}")


def _package_row(area: str, package: Package, install: str) -> Row:
    if package.is_usable:
        return Row(area, package.module, "live", package.version)
    state: State = "broken" if package.is_present else "not live"
    return Row(area, package.module, state, "not used", package.why_not, install)


def _shm_row(host: Host) -> Row:
    if host.shm_bytes is None or host.shm_total is None:
        why = "weights reach the engines through files in the temporary directory"
        return Row("host", "/dev/shm", "not live", "not there", why, "mount it: docker run --shm-size=16g")
    taken = f"{host.shm_bytes / GIB:.1f} of {host.shm_total / GIB:.1f} GiB free"
    if host.shm_bytes < SHM_WANTED:
        why = f"weight buffers and data loaders want {SHM_WANTED / GIB:.0f} GiB or more"
        return Row("host", "/dev/shm", "not live", taken, why, "docker run --shm-size=16g, or rollout.transfer_dir")
    return Row("host", "/dev/shm", "live", taken)


def _files_row(host: Host) -> Row:
    soft, hard = host.open_files
    if soft < FILES_WANTED:
        why = f"below {FILES_WANTED}, many engines or ranks run out of sockets"
        return Row(
            "host", "open files", "not live", f"{soft} (hard limit {hard})", why, f"ulimit -n {min(65536, hard)}"
        )
    return Row("host", "open files", "live", str(soft))
