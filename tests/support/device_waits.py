"""Finds on a CPU what would make the host wait for a GPU: reading a number, or a result whose size
depends on data.

    with DeviceWaits() as waits:
        loss.backward()
    assert waits.found == []

`Tensor.tolist` reads memory without an operator and is not seen; torch.cuda.set_sync_debug_mode
sees all, on a GPU.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_megatron

PACKAGE = Path(rlhf_megatron.__file__).parent
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2")
BY_INDEX = ("index", "index_put_", "index_put")


class DeviceWaits(TorchDispatchMode):
    """`found`: "operator in file of the package, line", in order; "" for the place where none of
    its files is in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_by_mask = name in BY_INDEX and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READS or is_by_mask:
            self.found.append(f"{name} in {_place()}")
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost file of the package, and the line in it."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}, line {frame.lineno}"
    return ""
