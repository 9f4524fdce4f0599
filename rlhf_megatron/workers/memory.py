"""What a rank holds in the memory of its device and of its machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_megatron.data import codec
from rlhf_megatron.parallel.device import memory, name_of, resident_bytes
from rlhf_megatron.workers.offload import Offload


@codec.register
@dataclass(frozen=True)
class MemoryReport:
    """Of one model on one rank; what is the process's or the device's is the same in the reports of all its models."""

    held_bytes: int  # of the model's own storages on the device: parameters, gradients, optimizer state
    copied_bytes: int  # of the copies of these in host memory
    process_bytes: int  # that this process has allocated on the device; 0 on a CPU
    used_bytes: int  # of the device, by all processes; 0 on a CPU
    resident_bytes: int  # of this process in host memory
    peak_allocated_bytes: int = 0  # most that this process had allocated on the device; 0 on a CPU
    peak_reserved_bytes: int = 0  # the same with what torch keeps in reserve
    device_name: str = ""  # as its vendor spells it; "" of a CPU


def report(offload: Offload, device: torch.device) -> MemoryReport:
    """As it stands now."""
    stats = memory(device)
    return MemoryReport(
        held_bytes=offload.device_bytes,
        copied_bytes=offload.host_bytes,
        process_bytes=stats.allocated,
        used_bytes=stats.used,
        resident_bytes=resident_bytes(),
        peak_allocated_bytes=stats.peak_allocated,
        peak_reserved_bytes=stats.peak_reserved,
        device_name=name_of(device),
    )
