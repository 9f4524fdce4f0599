"""Layers that predict further tokens (`num_nextn_predict_layers`) stand behind the others on disk. No model here has
them: their tensors are kept as they are when weights are exported or converted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.hf_reader import HFReader
from rlhf_megatron.checkpoint.hf_writer import SafetensorsWriter, TensorSpec
from rlhf_megatron.models.families.base import HFConfig, kept_prefixes
from rlhf_megatron.models.table import HFTensor, Rule, plain_rule

KEPT_FILE = "kept.safetensors"  # of a directory in another layout than Hugging Face's
_BUFFER = ".e_score_correction_bias"  # float32 in any model


@dataclass(frozen=True)
class Kept:
    """Such tensors of a directory, which are read when they are asked for."""

    reader: HFReader | None
    names: tuple[str, ...]
    dtype: str | None = None  # cast to it; None: as they are

    def rules(self) -> tuple[Rule, ...]:
        """One a tensor, which no rank has; `dtype` is what it is written in. Raises ValueError for a type that is not
        supported."""
        return tuple(self._rule(name) for name in self.names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One at a time."""
        for rule in self.rules():
            assert self.reader is not None and rule.dtype is not None, rule.megatron_name
            yield rule.megatron_name, self.reader.hf_tensors(rule)[0].to(getattr(torch, rule.dtype))

    def write(self, path: Path) -> list[TensorSpec]:
        """Put all into one new file."""
        specs = [TensorSpec(rule.megatron_name, rule.dtype or "", rule.megatron_shape) for rule in self.rules()]
        writer = SafetensorsWriter(path, specs)
        for name, tensor in self.tensors():
            writer.write(name, tensor)
        writer.close()
        return specs

    def _rule(self, name: str) -> Rule:
        assert self.reader is not None, name
        shape, own = self.reader.stored_as(name)
        dtype = own if name.endswith(_BUFFER) else self.dtype or own
        return replace(plain_rule(name, HFTensor(name, shape), "replicated", None), dtype=dtype)


NOTHING_KEPT = Kept(None, ())


def kept_of(
    directory: Path | None, hf_config: HFConfig, dtype: str | None = None, block: tuple[int, int] | None = None
) -> Kept:
    """Find the kept tensors of a directory in any layout; none where it has no weights, or is None. `block`: as of
    `HFReader`."""
    prefixes = kept_prefixes(hf_config)
    if directory is None or not prefixes or not list(Path(directory).glob("*.safetensors")):
        return NOTHING_KEPT
    if (Path(directory) / KEPT_FILE).is_file():
        reader = HFReader(directory, only=KEPT_FILE)
        return Kept(reader, reader.names, dtype)
    if list(Path(directory).glob("tp*_pp*.safetensors")):
        return NOTHING_KEPT
    reader = HFReader(directory, block)
    return Kept(reader, tuple(name for name in reader.names if name.startswith(prefixes)), dtype)
