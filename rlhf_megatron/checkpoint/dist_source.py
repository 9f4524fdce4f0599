"""Weights out of a training checkpoint of any layout: one process, one tensor at a time, no rank and no Megatron.

A torch_dist directory holds each Megatron tensor whole, cut into parts that its metadata places. Layers that are alike
are stacked: one tensor for all layers. Names in a layer are Transformer Engine's, whatever module wrote them.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from rlhf_megatron.checkpoint.hf_writer import dtype_name
from rlhf_megatron.checkpoint.safe_pickle import METADATA, check_directory, read_metadata
from rlhf_megatron.models.families.base import OUTPUT_LAYER, VALUE_HEAD
from rlhf_megatron.models.table import Rule, with_names_of


class DistSource:
    """Implements `WeightSource`. `directory`: `actor` or `critic` of a checkpoint.

    Raises ValueError for a directory that holds anything but what was saved here; so do its methods for a tensor that
    is missing, of another shape, or not whole.
    """

    def __init__(self, directory: Path) -> None:
        check_directory(directory)
        metadata = read_metadata(directory / METADATA)
        self.directory = directory
        self._places = metadata.storage_data
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        key, layer = self._find(rule)
        entry = self._tensors[key]
        shape = tuple(entry.size) if layer is None else tuple(entry.size)[1:]
        wanted = rule.megatron_shape
        # The vocabulary is padded for the layout that wrote it: rows after the last token are of no use.
        is_padded = rule.owner != "layer" and len(shape) == len(wanted) and shape[0] > wanted[0]
        if shape != wanted and not (is_padded and shape[1:] == wanted[1:]):
            raise ValueError(
                f"{self.directory}: {key} has shape {shape}, config.json needs {wanted}; is it that model?"
            )
        full, num_read = torch.empty(shape, dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            first, offsets, sizes = 0, tuple(chunk.offsets), tuple(chunk.sizes)
            if layer is not None:
                first, offsets, sizes = offsets[0], offsets[1:], sizes[1:]
                if not first <= layer < first + chunk.sizes[0]:
                    continue
            part = self._part(key, chunk, full.dtype)
            at = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            full[at] = part if layer is None else part[layer - first]
            num_read += full[at].numel()
        if num_read != full.numel():
            raise ValueError(f"{self.directory}: {num_read} of the {full.numel()} elements of {key} are stored.")
        return rule.to_hf(full[: wanted[0]])

    def dtype_of(self, rule: Rule) -> str:
        return dtype_name(self._tensors[self._find(rule)[0]].properties.dtype)

    def _find(self, rule: Rule) -> tuple[str, int | None]:
        """The key of the tensor, and its layer where the key is of all layers."""
        (fused,) = with_names_of("transformer_engine", [rule])
        names = [fused.megatron_name, rule.megatron_name]
        if rule.hf[0].name.startswith(f"{VALUE_HEAD}."):
            names = [rule.megatron_name.replace(OUTPUT_LAYER, "value_head")]  # so that no policy loads as a critic
        for name in names:
            if name in self._tensors:
                return name, None
            stacked = name.replace(f".layers.{rule.layer}.", ".layers.", 1)
            if stacked in self._tensors:
                return stacked, rule.layer
        raise ValueError(f"{self.directory} holds no {rule.megatron_name}; it is of another model.")

    def _part(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        place = self._places.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise ValueError(f"{self.directory}: the part of {key} at {tuple(chunk.offsets)} is nowhere.")
        with open(self.directory / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a broken file fails in any way
            raise ValueError(f"{self.directory / place.relative_path} is broken at {key}: {error}.") from error
        if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != dtype:
            raise ValueError(f"{self.directory / place.relative_path} holds something else than {key}.")
        return part
