"""Moving a model's tensors to host memory and back, so that other users of the device have room."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_megatron.parallel.device import empty_cache, synchronize


def move_to_host(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Put the storage of each tensor into pinned host memory; the tensor objects stay. A no-op on a CPU."""
    if device.type == "cpu":
        return
    for tensor in tensors:
        if tensor.device.type != "cpu":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor.data = host.copy_(tensor.data, non_blocking=True)
    synchronize(device)
    empty_cache(device)


def move_to_device(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Undo `move_to_host`."""
    if device.type == "cpu":
        return
    for tensor in tensors:
        tensor.data = tensor.data.to(device, non_blocking=True)
    synchronize(device)
