"""The only file that names a kind of accelerator. Everything else takes a `torch.device` and asks here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class MemoryStats:
    """Bytes on one device. Zeros on the CPU, where nothing is counted."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    total: int = 0


def has_accelerator() -> bool:
    """True where CUDA can be used."""
    return torch.cuda.is_available()


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
    return MemoryStats(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak_allocated=torch.cuda.max_memory_allocated(device),
        total=torch.cuda.get_device_properties(device).total_memory,
    )
