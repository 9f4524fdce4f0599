"""Layers that predict further tokens (`num_nextn_predict_layers`) stand behind the others on disk. No model here has
them: their tensors are kept as they are when weights are exported or converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_megatron.checkpoint.hf_reader import DTYPES, HFReader
from rlhf_megatron.checkpoint.hf_writer import SafetensorsWriter, TensorSpec
from rlhf_megatron.models.families.base import HFConfig, kept_prefixes

KEPT_FILE = "kept.safetensors"  # of a directory in Megatron layout
_BUFFER = ".e_score_correction_bias"  # float32 in any model


@dataclass(frozen=True)
class Kept:
    """Such tensors of a directory, which are read when they are asked for."""

    files: Mapping[str, Path]  # name -> file
    dtype: str | None = None  # cast to it; None: as they are

    def specs(self) -> list[TensorSpec]:
        """Name, type and shape of each. Raises ValueError for a type that is not supported."""
        return [self._spec(name) for name in self.files]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One at a time."""
        for spec in self.specs():
            with safe_open(str(self.files[spec.name]), framework="pt") as file:
                yield spec.name, file.get_tensor(spec.name).to(getattr(torch, spec.dtype))

    def write(self, path: Path) -> list[TensorSpec]:
        """Put all into one new file."""
        specs = self.specs()
        writer = SafetensorsWriter(path, specs)
        for name, tensor in self.tensors():
            writer.write(name, tensor)
        writer.close()
        return specs

    def _spec(self, name: str) -> TensorSpec:
        with safe_open(str(self.files[name]), framework="pt") as file:
            view = file.get_slice(name)
            if view.get_dtype() not in DTYPES:
                raise ValueError(f"{self.files[name]}: {name} has type {view.get_dtype()}, which is not supported.")
            own = DTYPES[view.get_dtype()]
            return TensorSpec(name, own if name.endswith(_BUFFER) else self.dtype or own, tuple(view.get_shape()))


NOTHING_KEPT = Kept({})


def kept_of(directory: Path | None, hf_config: HFConfig, dtype: str | None = None) -> Kept:
    """Find the kept tensors of a directory in either layout; none where it has no weights, or is None."""
    prefixes = kept_prefixes(hf_config)
    if directory is None or not prefixes or not list(Path(directory).glob("*.safetensors")):
        return NOTHING_KEPT
    file = Path(directory) / KEPT_FILE
    if (Path(directory) / "manifest.json").is_file():
        if not file.is_file():
            return NOTHING_KEPT
        with safe_open(str(file), framework="pt") as opened:
            return Kept(dict.fromkeys(opened.keys(), file), dtype)
    found = HFReader(directory).files
    return Kept({name: path for name, path in found.items() if name.startswith(prefixes)}, dtype)
