"""Memory of the engine: giving back what was freed, and how much its tensors hold."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_megatron.parallel.device import empty_cache


def give_back(device: torch.device) -> None:
    """Hand what is free to the device and to the kernel, so that other processes can have it.

    glibc keeps freed tensors of less than 32 MiB in its heap: without the trim a released model of small tensors stays
    in the process to the last byte.
    """
    empty_cache(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind tensors that share none."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
