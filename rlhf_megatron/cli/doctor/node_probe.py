"""What a rank tells of its node, and what nodes try on each other, before anything is asked
of NCCL or gloo.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_megatron.cli.doctor.machine_facts import read_tool_output
from rlhf_megatron.device import get_device_id, get_device_name, measure_device_memory
from rlhf_megatron.write_errors import write_text_file

GIB = 1 << 30
CONNECT_TIMEOUT_S = 3.0
NUM_CLOCK_SAMPLES = 5  # times; of a clock, the answer that came fastest counts
MAX_PARALLEL_NODES = 64  # nodes
FILE_VISIBLE_TIMEOUT_S = 10.0  # a network file system shows a new file late
COMPARED_PACKAGES = (
    "megatron-core",
    "transformers",
    "numpy",
    "triton",
    "transformer-engine",
    "rlhf-megatron",
)
COMPARED_VARIABLE_PREFIXES = (
    "NCCL_",
    "TORCH_",
    "CUDA_",
    "PYTORCH_",
    "NVTE_",
    "GLOO_",
    "UCX_",
    "CUBLAS_",
    "OMP_",
)
# may differ between nodes
NODE_SPECIFIC_VARIABLES = "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankFacts:
    """One rank's machine and software. `uniform_values`: values by name that should be the
    same on all ranks.
    """

    rank: int
    local_rank: int
    node: int
    host_name: str
    device: str  # "NVIDIA H200, 139 GiB"
    device_id: str  # of no other rank; "" of a CPU
    used_bytes: int  # of the device's memory, by all processes
    uniform_values: Mapping[str, str]


def collect_rank_facts(device: torch.device) -> RankFacts:
    """Return the facts of this process, its device and its software. `device` must be the current
    one.
    """
    stats = measure_device_memory(device)
    name = (
        f"{get_device_name(device)}, {stats.total_bytes / GIB:.0f} GiB"
        if device.type == "cuda"
        else "CPU"
    )
    return RankFacts(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        node=int(os.environ.get("GROUP_RANK", "0")),
        host_name=socket.gethostname(),
        device=name,
        device_id=get_device_id(device),
        used_bytes=stats.used_bytes,
        uniform_values={"device": name, **_collect_versions(device), **_collect_settings()},
    )


def _collect_versions(device: torch.device) -> dict[str, str]:
    """Return the versions that should be the same on all ranks, by name: Python, torch, kernel,
    packages, NCCL and the driver.
    """
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }
    for name in COMPARED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = read_tool_output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
        found["driver"] = query.strip().partition("\n")[0]
    return found


def _collect_settings() -> dict[str, str]:
    """Return the settings of a node that should be the same on all, by name: environment variables,
    number of CPUs, limit of open files, InfiniBand adapters.
    """
    adapters = Path("/sys/class/infiniband")
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(COMPARED_VARIABLE_PREFIXES) and name not in NODE_SPECIFIC_VARIABLES
    }
    found = {name: value for name, value in found.items() if not name.startswith("TORCHELASTIC_")}
    return found | {
        "CPUs": str(len(os.sched_getaffinity(0))),
        "open files": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "InfiniBand": ", ".join(sorted(path.name for path in adapters.iterdir()))
        if adapters.is_dir()
        else "none",
    }


@contextlib.contextmanager
def serve_clock(address: str) -> Iterator[int]:
    """Listen on a free port of `address` while the block runs, and send this machine's time to
    every client. Yield the port.
    """
    with socket.create_server((address, 0), backlog=512) as listener:

        def answer_connections() -> None:
            """Send the time to one client after another until the listener is closed."""
            with contextlib.suppress(OSError):  # closed: it is over
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(f"{time.time()!r}\n".encode())

        threading.Thread(target=answer_connections, name="doctor", daemon=True).start()
        yield int(listener.getsockname()[1])


def measure_clock_offset(address: str, port: int) -> tuple[float | None, str]:
    """Return (seconds by which the clock served at this address is ahead of this one, ""), taken
    from the fastest of several answers; (None, the reason) where no answer comes.
    """
    best: tuple[float, float] | None = None
    for _ in range(NUM_CLOCK_SAMPLES):
        start = time.time()
        try:
            with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
                text = connection.makefile().readline()
            end = time.time()
            best = min(best or (end - start, 0.0), (end - start, float(text) - (start + end) / 2))
        except (OSError, ValueError) as error:
            return None, str(error)
    assert best is not None
    return best[1], ""


def measure_clock_offsets(addresses: Sequence[tuple[str, int]]) -> list[tuple[float | None, str]]:
    """Return the result of `measure_clock_offset` for each address. Many are asked at a time: an
    address that does not answer takes seconds, and all ranks wait.
    """
    with ThreadPoolExecutor(min(MAX_PARALLEL_NODES, len(addresses))) as pool:
        hosts, ports = zip(*addresses, strict=True)
        return list(pool.map(measure_clock_offset, hosts, ports))


def find_own_address_towards(target_host: str) -> str:
    """Return this machine's IPv4 address on the interface that leads to `target_host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target_host, 9))  # sends nothing
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def leave_marker_file(folder: Path, file_name: str) -> Iterator[str]:
    """Keep an empty file in a folder while the block runs. Yield "", or the reason why the file
    cannot be written.
    """
    path = folder / file_name
    try:
        write_text_file(path, "")
        why_not = ""
    except OSError as error:
        why_not = str(error)
    try:
        yield why_not
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def find_unseen_files(folder: Path, file_names: Sequence[str]) -> list[str]:
    """Return the names that do not appear in a folder within 10 seconds; a network file system
    shows new files late.
    """
    deadline = time.monotonic() + FILE_VISIBLE_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # a network file system looks again
        missing = [name for name in file_names if not (folder / name).exists()]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.2)
