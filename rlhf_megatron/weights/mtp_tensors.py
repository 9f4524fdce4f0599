"""Layers that predict further tokens (`num_nextn_predict_layers`) stand behind the others on disk.
No model here has them: their tensors are kept as they are when weights are exported or converted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.weights.families.model_family import HFConfig, find_mtp_prefixes
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.hf_writer import SafetensorsWriter, TensorSpec
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule, make_plain_rule

MTP_FILE = "kept.safetensors"  # of a directory in another layout than Hugging Face's
_BUFFER = ".e_score_correction_bias"  # float32 in any model


@dataclass(frozen=True)
class MtpTensors:
    """The multi-token prediction tensors of a directory, read on demand."""

    reader: HFReader | None
    tensor_names: tuple[str, ...]
    target_dtype: str | None = None  # cast to it; None: as they are

    def make_rules(self) -> tuple[WeightRule, ...]:
        """Return one rule for each tensor; no rank has these. The rule's `dtype` is the type in
        which the tensor is written. Raise ValueError for a type that is not supported.
        """
        return tuple(self._make_rule(name) for name in self.tensor_names)

    def read_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the target type, one at a time."""
        for rule in self.make_rules():
            assert self.reader is not None and rule.dtype is not None, rule.megatron_name
            yield (
                rule.megatron_name,
                self.reader.read_hf_tensors(rule)[0].to(getattr(torch, rule.dtype)),
            )

    def write_file(self, path: Path) -> list[TensorSpec]:
        """Write all tensors into one new safetensors file and return their specs."""
        specs = [
            TensorSpec(rule.megatron_name, rule.dtype or "", rule.megatron_shape)
            for rule in self.make_rules()
        ]
        writer = SafetensorsWriter(path, specs)
        for name, tensor in self.read_tensors():
            writer.write_tensor(name, tensor)
        writer.close()
        return specs

    def _make_rule(self, name: str) -> WeightRule:
        """Return the rule of one tensor: the target type or, for the routers' bias buffer, the type
        it is stored in.
        """
        assert self.reader is not None, name
        shape, own = self.reader.read_shape_and_dtype(name)
        dtype = own if name.endswith(_BUFFER) else self.target_dtype or own
        return replace(
            make_plain_rule(name, HFTensor(name, shape), "replicated", None), dtype=dtype
        )


NO_MTP_TENSORS = MtpTensors(None, ())


def find_mtp_tensors(
    directory: Path | None,
    hf_config: HFConfig,
    dtype: str | None = None,
    fp8_block: tuple[int, int] | None = None,
) -> MtpTensors:
    """Find the multi-token prediction tensors of a directory in any layout. The result is empty
    where `directory` is None or has no weights, or the model has no such layers. `dtype`: cast to
    it; None: keep the types. `fp8_block`: that of `HFReader`.
    """
    prefixes = find_mtp_prefixes(hf_config)
    if directory is None or not prefixes or not list(Path(directory).glob("*.safetensors")):
        return NO_MTP_TENSORS
    if (Path(directory) / MTP_FILE).is_file():
        reader = HFReader(directory, single_file=MTP_FILE)
        return MtpTensors(reader, reader.names, dtype)
    if list(Path(directory).glob("tp*_pp*.safetensors")):
        return NO_MTP_TENSORS
    reader = HFReader(directory, fp8_block)
    return MtpTensors(
        reader, tuple(name for name in reader.names if name.startswith(prefixes)), dtype
    )
