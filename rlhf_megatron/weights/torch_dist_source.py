"""Weights out of a checkpoint in megatron's torch_dist format, of any layout: one process, one
tensor at a time, no rank and no Megatron.

A directory holds each Megatron tensor whole, cut into parts that its metadata places. Layers that
are alike may be stacked: one tensor for all layers; so may the experts of a layer. Names in a layer
are Transformer Engine's or megatron-core's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from rlhf_megatron.weights.families.model_family import OUTPUT_LAYER, VALUE_HEAD
from rlhf_megatron.weights.hf_writer import get_storable_dtype_name
from rlhf_megatron.weights.megatron_keys import StackIndex, list_possible_keys
from rlhf_megatron.weights.safe_pickle import (
    METADATA,
    check_checkpoint_directory,
    check_torch_dist_format,
    read_checkpoint_metadata,
)
from rlhf_megatron.weights.torch_dist_archive import MappedArchives
from rlhf_megatron.weights.weight_table import WeightRule


class TorchDistSource:
    """Implements `WeightSource`. `directory`: `actor` or `critic` of a checkpoint, or with
    `is_foreign` what any megatron-core wrote, of which pickled objects are never opened.

    Raises ValueError for a directory that holds anything but that, and for a file that is missing
    or cut off; so do its methods for a tensor that is missing, of another shape, or not whole.
    """

    def __init__(self, directory: Path, is_foreign: bool = False) -> None:
        """Read and check the metadata of the directory. `is_foreign`: any megatron-core wrote it;
        pickled objects in it are never opened.
        """
        (check_torch_dist_format if is_foreign else check_checkpoint_directory)(directory)
        metadata = read_checkpoint_metadata(directory / METADATA, allows_pickled_objects=is_foreign)
        self.directory = directory
        self._storage_infos = metadata.storage_data
        self._tensor_metadata = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._mapped_chunks = MappedArchives(directory)
        self._chunks_by_index: dict[
            tuple[str, int], dict[StackIndex, list[ChunkStorageMetadata]]
        ] = {}
        self._check_file_sizes()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the keys of all tensors."""
        return tuple(self._tensor_metadata)

    def get_shape(self, key: str) -> tuple[int, ...]:
        """Return the full shape of the tensor stored under a key."""
        return tuple(self._tensor_metadata[key].size)

    def find_key(self, rule: WeightRule) -> str:
        """Return the key of the stored tensor that holds the rule's tensor. Raise ValueError where
        there is none.
        """
        return self._find_key_and_index(rule)[0]

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors of a rule, made of the stored Megatron tensor without its
        vocabulary padding. Raise ValueError for a tensor that is missing, of another shape, or not
        stored whole.
        """
        key, index = self._find_key_and_index(rule)
        entry = self._tensor_metadata[key]
        shape = tuple(entry.size)[len(index) :]
        wanted = rule.megatron_shape
        # The vocabulary is padded for the layout that wrote it: rows after the last token
        # are of no use.
        is_padded = rule.owner != "layer" and rule.split != "replicated" and shape[0] > wanted[0]
        if shape != wanted and not (is_padded and shape[1:] == wanted[1:]):
            raise ValueError(
                f"{self.directory}: {key} has shape {shape}, config.json needs {wanted}; is it"
                " that model?"
            )
        chunks = list(self._find_chunks(key, index))
        if len(chunks) == 1 and tuple(chunks[0].sizes)[len(index) :] == shape:
            return rule.to_hf(self._read_chunk(key, chunks[0], index)[: wanted[0]])
        full = torch.empty(shape, dtype=entry.properties.dtype)
        is_read = torch.zeros(shape, dtype=torch.bool)
        for chunk in chunks:
            places = zip(
                tuple(chunk.offsets)[len(index) :], tuple(chunk.sizes)[len(index) :], strict=True
            )
            at = tuple(slice(start, start + size) for start, size in places)
            full[at] = self._read_chunk(key, chunk, index)
            is_read[at] = True
        if not is_read.all():
            num_read = int(is_read.sum())
            raise ValueError(
                f"{self.directory}: {num_read} of the {full.numel()} elements of {key} are stored;"
                " copy it again."
            )
        return rule.to_hf(full[: wanted[0]])

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type ("bfloat16") in which the rule's tensor is stored."""
        return get_storable_dtype_name(
            self._tensor_metadata[self._find_key_and_index(rule)[0]].properties.dtype
        )

    def _find_key_and_index(self, rule: WeightRule) -> tuple[str, StackIndex]:
        """Return the key of the stored tensor that holds the rule's tensor, and the layer and
        expert index in it, () where it is not stacked. Raise ValueError where there is none.
        """
        candidates = list_possible_keys(rule)
        # so that no policy loads as a critic
        if rule.hf_tensors[0].name.startswith(f"{VALUE_HEAD}."):
            candidates = iter(
                [(rule.megatron_name.replace(OUTPUT_LAYER, "value_head"), StackIndex())]
            )
        for name, index in candidates:
            if name in self._tensor_metadata:
                return name, index
        raise ValueError(f"{self.directory} holds no {rule.megatron_name}; it is of another model.")

    def _find_chunks(self, key: str, index: StackIndex) -> Iterator[ChunkStorageMetadata]:
        """Yield the stored parts of a tensor that contain the layer or expert `index`."""
        depth = len(index)
        if (key, depth) not in self._chunks_by_index:
            grouped: dict[StackIndex, list[ChunkStorageMetadata]] = {}
            for chunk in self._tensor_metadata[key].chunks:
                is_single = prod(tuple(chunk.sizes)[:depth]) == 1
                grouped.setdefault(tuple(chunk.offsets)[:depth] if is_single else (-1,), []).append(
                    chunk
                )
            self._chunks_by_index[key, depth] = grouped
        found = self._chunks_by_index[key, depth]
        yield from found.get(index, ())
        for chunk in found.get((-1,), ()):
            places = zip(
                index, tuple(chunk.offsets)[:depth], tuple(chunk.sizes)[:depth], strict=True
            )
            if all(start <= number < start + size for number, start, size in places):
                yield chunk

    def _read_chunk(self, key: str, chunk: ChunkStorageMetadata, index: StackIndex) -> Tensor:
        """Return one stored part without its layer and expert axes, taken at `index`. Raise
        ValueError where no file has it.
        """
        place = self._storage_infos.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise ValueError(
                f"{self.directory}: no file has the part of {key} at {tuple(chunk.offsets)};"
                " copy it again."
            )
        sizes = tuple(chunk.sizes)
        dtype = self._tensor_metadata[key].properties.dtype
        try:
            part = self._mapped_chunks.read_chunk(
                place.relative_path, place.offset, place.length, sizes, dtype
            )
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return part[
            tuple(number - start for number, start in zip(index, chunk.offsets, strict=False))
        ]

    def _check_file_sizes(self) -> None:
        """Raise ValueError unless every tensor's part lies in a file that exists and is long
        enough.
        """
        ends: dict[str, tuple[int, str]] = {}
        for at, place in self._storage_infos.items():
            if at.fqn in self._tensor_metadata:
                ends[place.relative_path] = max(
                    ends.get(place.relative_path, (0, "")), (place.offset + place.length, at.fqn)
                )
        for file, (end, key) in sorted(ends.items()):
            path = self.directory / file
            if not path.is_file() or path.stat().st_size < end:
                size = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
                raise ValueError(
                    f"{path} {size}; {key} needs its bytes up to {end}. Copy the directory again."
                )
