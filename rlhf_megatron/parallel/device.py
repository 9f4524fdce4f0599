"""The only file that names a kind of accelerator. Everything else takes a `torch.device` and asks here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryStats:
    """Bytes on one device. Zeros on the CPU, where nothing is counted."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    total: int = 0
    used: int = 0  # by all processes
    peak_reserved: int = 0


def has_accelerator() -> bool:
    """True where CUDA can be used."""
    return torch.cuda.is_available()


def num_devices() -> int:
    """Devices that this process sees; 0 without CUDA."""
    return torch.cuda.device_count() if has_accelerator() else 0


def device_for(kind: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """The device of a rank, made current. "auto": CUDA where available. Raises ValueError where there is none."""
    if kind == "cpu" or (kind == "auto" and not has_accelerator()):
        return torch.device("cpu")
    if not has_accelerator():
        raise ValueError("device is 'cuda' but torch finds no CUDA device; set trainer.device to cpu or auto.")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no device: this machine shows {torch.cuda.device_count()};"
            " start at most one rank a device (trainer.n_gpus_per_node)."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def local_rank() -> int:
    """This process's number on its machine, as the launcher says in LOCAL_RANK; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def backend(device: torch.device) -> str:
    """Name of the torch.distributed backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch keeps in reserve back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory(device: torch.device) -> MemoryStats:
    """What torch holds on `device` now, and its peak so far."""
    if device.type != "cuda":
        return MemoryStats()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryStats(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak_allocated=torch.cuda.max_memory_allocated(device),
        total=torch.cuda.get_device_properties(device).total_memory,
        used=total - free,
        peak_reserved=torch.cuda.max_memory_reserved(device),
    )


def name_of(device: torch.device) -> str:
    """As its vendor spells it; "" of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def resident_bytes() -> int:
    """Host memory of this process, as the kernel counts it; 0 where it does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8 in host memory, page-locked where that makes copies from and to `device` faster."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class CopyQueue:
    """Copies between a device and host memory, beside its computation. On a CPU each is made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        """Copies made in here come after what the device was told to compute before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """For `wait`: behind the copies so far. None where they are made."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """What is computed from now on comes after the copies before `mark`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self) -> None:
        """Returns when all copies are made."""
        if self._stream is not None:
            self._stream.synchronize()
