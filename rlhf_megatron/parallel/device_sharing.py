"""Device memory that another process of the same machine opens (CUDA IPC): who can, and the reference that it is given.

Beside `device`, the one other file that names a kind of accelerator.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE_INDEX = 6  # place of the device among the arguments of torch's rebuild_cuda_tensor


def device_ids() -> list[str]:
    """Identities of the devices that this process can use, the same in every process; none on a CPU."""
    if not torch.cuda.is_available():
        return []
    return [device_id(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def device_id(device: torch.device) -> str:
    """Identity of one device; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def can_share(device: torch.device) -> bool:
    """Whether memory of `device` can be opened by other processes. Expandable segments need rights that containers
    rarely give, so they count as no."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    return not torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False)


def pickle_shared(value: Any) -> bytes:
    """`value` pickled, tensors on a device as references to their memory and all others by value.

    One pickle for one reader: each counts what it has open. Devices are named by identity, since numbers differ between
    processes; stock SGLang reads that.
    """
    out = io.BytesIO()
    _SharingPickler(out).dump(value)
    return out.getvalue()


def collect() -> None:
    """Free what was shared and other processes have closed."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


class _SharingPickler(pickle.Pickler):
    """torch's own pickler would send a tensor of a CPU as a file descriptor, which an unrelated process cannot get."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.device.type != "cuda":
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        changed = (*arguments[:_DEVICE_INDEX], device_id(obj.device), *arguments[_DEVICE_INDEX + 1 :])
        return rebuild, changed
