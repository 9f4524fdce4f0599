"""A safetensors file written tensor by tensor, in any order: the header is known before the first tensor is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a file will hold."""

    name: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16". Raises ValueError for types that weights are not stored in."""
    name = str(dtype).removeprefix("torch.")
    if name not in _FORMAT_NAMES:
        raise ValueError(f"weights of type {name} are not written; use {', '.join(_FORMAT_NAMES)}.")
    return name


class SafetensorsWriter:
    """Call `write` once for every spec, then `close`. Memory: one tensor at a time."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path = path
        # Wide types first keeps every tensor aligned to its own size, as readers that map the file expect.
        ordered = sorted(specs, key=lambda spec: -_DTYPE_BYTES[spec.dtype])
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._pending: dict[str, tuple[TensorSpec, int]] = {}
        offset = 0
        for spec in ordered:
            assert spec.name not in header, f"{spec.name} is planned twice for {path.name}"
            end = offset + spec.num_bytes
            header[spec.name] = {
                "dtype": _FORMAT_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            self._pending[spec.name] = (spec, offset)
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = open(path, "xb")  # noqa: SIM115 - closed by close()
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor into its place."""
        spec, offset = self._pending.pop(name)
        assert dtype_name(tensor.dtype) == spec.dtype, f"{name} is {tensor.dtype}, planned was {spec.dtype}"
        assert tuple(tensor.shape) == spec.shape, f"{name} has shape {tuple(tensor.shape)}, planned was {spec.shape}"
        self._file.seek(self._start + offset)
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self, is_complete: bool = True) -> None:
        """Flush. `is_complete` False: give the file up (it is incomplete and the caller removes it)."""
        self._file.close()
        assert not is_complete or not self._pending, f"{self.path.name} lacks {sorted(self._pending)[:8]}"
