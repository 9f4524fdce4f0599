"""Weights out of a checkpoint in megatron's torch_dist format, of any layout: one process, one tensor at a time, no
rank and no Megatron.

A directory holds each Megatron tensor whole, cut into parts that its metadata places. Layers that are alike may be
stacked: one tensor for all layers; so may the experts of a layer. Names in a layer are Transformer Engine's or
megatron-core's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from rlhf_megatron.checkpoint.hf_writer import dtype_name
from rlhf_megatron.checkpoint.safe_pickle import METADATA, check_directory, check_format, read_metadata
from rlhf_megatron.checkpoint.stored_names import Index, spellings
from rlhf_megatron.checkpoint.torch_dist import MappedParts
from rlhf_megatron.models.families.base import OUTPUT_LAYER, VALUE_HEAD
from rlhf_megatron.models.table import Rule


class DistSource:
    """Implements `WeightSource`. `directory`: `actor` or `critic` of a checkpoint, or with `is_foreign` what any
    megatron-core wrote, of which pickled objects are never opened.

    Raises ValueError for a directory that holds anything but that, and for a file that is missing or cut off; so do its
    methods for a tensor that is missing, of another shape, or not whole.
    """

    def __init__(self, directory: Path, is_foreign: bool = False) -> None:
        (check_format if is_foreign else check_directory)(directory)
        metadata = read_metadata(directory / METADATA, has_objects=is_foreign)
        self.directory = directory
        self._places = metadata.storage_data
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._mapped = MappedParts(directory)
        self._by_index: dict[tuple[str, int], dict[Index, list[ChunkStorageMetadata]]] = {}
        self._check_files()

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of all tensors."""
        return tuple(self._tensors)

    def shape_of(self, key: str) -> tuple[int, ...]:
        """The whole shape of the tensor of this key."""
        return tuple(self._tensors[key].size)

    def key_of(self, rule: Rule) -> str:
        """The key of the tensor that holds it. Raises ValueError for none."""
        return self._find(rule)[0]

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        key, index = self._find(rule)
        entry = self._tensors[key]
        shape, wanted = tuple(entry.size)[len(index) :], rule.megatron_shape
        # The vocabulary is padded for the layout that wrote it: rows after the last token are of no use.
        is_padded = rule.owner != "layer" and rule.split != "replicated" and shape[0] > wanted[0]
        if shape != wanted and not (is_padded and shape[1:] == wanted[1:]):
            raise ValueError(
                f"{self.directory}: {key} has shape {shape}, config.json needs {wanted}; is it that model?"
            )
        chunks = list(self._chunks(key, index))
        if len(chunks) == 1 and tuple(chunks[0].sizes)[len(index) :] == shape:
            return rule.to_hf(self._part(key, chunks[0], index)[: wanted[0]])
        full, is_read = torch.empty(shape, dtype=entry.properties.dtype), torch.zeros(shape, dtype=torch.bool)
        for chunk in chunks:
            places = zip(tuple(chunk.offsets)[len(index) :], tuple(chunk.sizes)[len(index) :], strict=True)
            at = tuple(slice(start, start + size) for start, size in places)
            full[at] = self._part(key, chunk, index)
            is_read[at] = True
        if not is_read.all():
            num_read = int(is_read.sum())
            raise ValueError(
                f"{self.directory}: {num_read} of the {full.numel()} elements of {key} are stored; copy it again."
            )
        return rule.to_hf(full[: wanted[0]])

    def dtype_of(self, rule: Rule) -> str:
        return dtype_name(self._tensors[self._find(rule)[0]].properties.dtype)

    def _find(self, rule: Rule) -> tuple[str, Index]:
        """The key of the tensor, and where the key is of all layers or experts, which of them."""
        candidates = spellings(rule)
        if rule.hf[0].name.startswith(f"{VALUE_HEAD}."):  # so that no policy loads as a critic
            candidates = iter([(rule.megatron_name.replace(OUTPUT_LAYER, "value_head"), Index())])
        for name, index in candidates:
            if name in self._tensors:
                return name, index
        raise ValueError(f"{self.directory} holds no {rule.megatron_name}; it is of another model.")

    def _chunks(self, key: str, index: Index) -> Iterator[ChunkStorageMetadata]:
        """The parts that meet `index`."""
        depth = len(index)
        if (key, depth) not in self._by_index:
            grouped: dict[Index, list[ChunkStorageMetadata]] = {}
            for chunk in self._tensors[key].chunks:
                is_single = prod(tuple(chunk.sizes)[:depth]) == 1
                grouped.setdefault(tuple(chunk.offsets)[:depth] if is_single else (-1,), []).append(chunk)
            self._by_index[key, depth] = grouped
        found = self._by_index[key, depth]
        yield from found.get(index, ())
        for chunk in found.get((-1,), ()):
            places = zip(index, tuple(chunk.offsets)[:depth], tuple(chunk.sizes)[:depth], strict=True)
            if all(start <= number < start + size for number, start, size in places):
                yield chunk

    def _part(self, key: str, chunk: ChunkStorageMetadata, index: Index) -> Tensor:
        place = self._places.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise ValueError(
                f"{self.directory}: no file has the part of {key} at {tuple(chunk.offsets)}; copy it again."
            )
        sizes, dtype = tuple(chunk.sizes), self._tensors[key].properties.dtype
        try:
            part = self._mapped.part(place.relative_path, place.offset, place.length, sizes, dtype)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return part[tuple(number - start for number, start in zip(index, chunk.offsets, strict=False))]

    def _check_files(self) -> None:
        """Every part lies in a file that is there and long enough."""
        ends: dict[str, tuple[int, str]] = {}
        for at, place in self._places.items():
            if at.fqn in self._tensors:
                ends[place.relative_path] = max(
                    ends.get(place.relative_path, (0, "")), (place.offset + place.length, at.fqn)
                )
        for file, (end, key) in sorted(ends.items()):
            path = self.directory / file
            if not path.is_file() or path.stat().st_size < end:
                size = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
                raise ValueError(f"{path} {size}; {key} needs its bytes up to {end}. Copy the directory again.")
