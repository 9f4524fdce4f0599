"""Weights somewhere on disk, in any layout that this package reads, and the units in which they
are converted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config, read_json_object
from rlhf_megatron.weights.megatron_dir import MANIFEST, MegatronReader
from rlhf_megatron.weights.mtp_tensors import MtpTensors, find_mtp_tensors
from rlhf_megatron.weights.quantised_weights import (
    FP8_BLOCK,
    dequantise_fp8,
    is_stored_in_fp8,
    quantise_to_fp8,
    read_fp8_block_size,
)
from rlhf_megatron.weights.safe_pickle import METADATA
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.torch_dist_source import TorchDistSource
from rlhf_megatron.weights.transformers_causal_lm import make_transformers_weight_table
from rlhf_megatron.weights.unread_tensors import (
    DroppableTensors,
    find_different_row,
    find_droppable_kind,
    format_dropped_tensors,
    format_other_head,
    format_unread_tensors,
    is_tied_head,
)
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule

logger = logging.getLogger(__name__)

DIGESTS = "conversion.json"
"""Beside weights that were converted to another layout than one file a rank: the digest
of every tensor.
"""
LATEST = "latest_checkpointed_iteration.txt"
"""Beside the checkpoints of Megatron-LM: which of them is the newest one."""
QUANTISATION = "quantization_config"
# which a cache holds while all that needs them goes over them; whole lines of the digest
PIECE_BYTES = 96 << 13


@dataclass(frozen=True)
class ConversionItem:
    """A rule of the weight table, and the type in which its tensors are written."""

    rule: WeightRule
    dtype: str
    is_mtp: bool = False  # no model has it: it goes along as it is
    # in which its matrices are written in FP8; None: they are not
    fp8_block: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the item's full Megatron tensor in the item's type."""
        return prod(self.rule.megatron_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class ItemTensors:
    """An item's tensors in Hugging Face layout and in the item's type, perhaps views
    of mapped files.
    """

    rule: WeightRule
    tensors: tuple[Tensor, ...]
    # the digests that they must have; empty where none are known
    recorded_digests: Mapping[str, str]
    _computed_digests: dict[str, str] = field(default_factory=dict)

    def digest_and_yield_pieces(self, tensor_index: int) -> Iterator[Tensor]:
        """Yield the bytes of one tensor in small pieces, and digest them on the way, so that the
        file is read once and the pieces are still in a cache when they are written. Raise
        ValueError after the last piece if the digest is not the recorded one.
        """
        hf = self.rule.hf_tensors[tensor_index]
        tensor = self.tensors[tensor_index]
        total = 0
        first = 0
        for piece in split_into_byte_pieces(tensor):
            total += digest_tensor(piece.view(tensor.dtype), first)
            first += piece.numel() // min(2, tensor.element_size())  # words
            yield piece
        value = self._computed_digests[hf.name] = format_digest(total)
        if self.recorded_digests and self.recorded_digests.get(hf.name) != value:
            raise ValueError(
                f"{hf.name} has digest {value}, its manifest says"
                f" {self.recorded_digests.get(hf.name)}: the file was changed or damaged. Convert"
                " the model again."
            )

    def compute_digests(self) -> dict[str, str]:
        """Return the digests of all tensors of the item, by Hugging Face name; read the tensors
        that were not digested yet. Raise ValueError as `digest_and_yield_pieces` does.
        """
        for number, hf in enumerate(self.rule.hf_tensors):
            if hf.name not in self._computed_digests:
                for _ in self.digest_and_yield_pieces(number):
                    pass
        return {hf.name: self._computed_digests[hf.name] for hf in self.rule.hf_tensors}


def split_into_byte_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor as uint8 views of at most PIECE_BYTES."""
    yield from tensor.detach().contiguous().view(-1).view(torch.uint8).split(PIECE_BYTES)


@dataclass(frozen=True)
class StoredModel:
    """Weights somewhere, and what they are of."""

    hf_config: HFConfig  # without the quantisation of its files
    source: WeightSource
    directory: Path  # of the weights
    companions_directory: Path | None  # directory with the tokenizer's files, and others
    # as recorded by an earlier conversion; empty where there are none
    recorded_digests: Mapping[str, str]
    head: HeadKind = "vocabulary"
    is_written_by_fsdp: bool = False  # the source knows transformers' names
    fp8_block: tuple[int, int] | None = None  # of FP8, where the files are quantised
    tokenizer_directory: Path | None = None  # None: the tokenizer is that of the companions

    @cached_property
    def weight_table(self) -> tuple[WeightRule, ...]:
        """Return the weight table of the model: under transformers' names where FSDP wrote the
        weights, else under Megatron's.
        """
        if self.is_written_by_fsdp:
            return make_transformers_weight_table(self.hf_config, self.head)
        return make_weight_table(self.hf_config, head=self.head)

    def make_conversion_items(
        self, dtype: str | None = None, vocabulary_tp: int = 1
    ) -> tuple[ConversionItem, ...]:
        """Return all items to convert, in the order of the table, then the multi-token prediction
        tensors. `dtype`: the type to cast to; None keeps each tensor's type; "fp8" is bfloat16 with
        the layers' matrices in FP8. `vocabulary_tp`: the number of ranks for which the vocabulary
        is padded. Raise ValueError for FP8 of a model whose files hold several experts in one
        tensor.
        """
        dtype, block = ("bfloat16", FP8_BLOCK) if dtype == "fp8" else (dtype, None)
        table = (
            self.weight_table
            if vocabulary_tp == 1
            else make_weight_table(self.hf_config, vocabulary_tp, head=self.head)
        )
        items = [
            ConversionItem(rule, rule.dtype or dtype or self.source.get_dtype_name(rule))
            for rule in table
        ]
        items += [
            ConversionItem(rule, str(rule.dtype), is_mtp=True)
            for rule in self.find_mtp_tensors(dtype).make_rules()
        ]
        if block is None:
            return tuple(items)
        if any(hf.entry is not None for rule in table for hf in rule.hf_tensors):
            raise ValueError(
                f"{self.directory}: experts that files have in one tensor are not written in FP8;"
                " use bfloat16."
            )
        has_matrix = (
            any(is_stored_in_fp8(hf.name) for hf in item.rule.hf_tensors) for item in items
        )
        return tuple(
            replace(i, fp8_block=block) if is_in else i
            for i, is_in in zip(items, has_matrix, strict=True)
        )

    def find_mtp_tensors(self, dtype: str | None = None) -> MtpTensors:
        """Find the multi-token prediction tensors in the directory with the tokenizer; a model with
        a value head has none.
        """
        where = self.companions_directory if self.head == "vocabulary" else None
        return find_mtp_tensors(where, self.hf_config, dtype, self.fp8_block)

    @cached_property
    def _mtp_tensors(self) -> MtpTensors:
        """Return the multi-token prediction tensors in their own types, found once."""
        return self.find_mtp_tensors()

    def read_item(self, item: ConversionItem) -> ItemTensors:
        """Return an item's tensors, dequantised and cast to the item's type; items in FP8 are
        rounded to FP8 values. Raise ValueError for a broken tensor, and for a tensor that must be
        cast and does not have its recorded digest.
        """
        source: WeightSource | None = self._mtp_tensors.reader if item.is_mtp else self.source
        assert source is not None, item
        stored = source.read_hf_tensors(item.rule)
        tensors = tuple(tensor.to(getattr(torch, item.dtype)) for tensor in stored)
        if item.fp8_block is not None:
            tensors = tuple(
                _round_to_fp8(hf.name, tensor, item.fp8_block)
                for hf, tensor in zip(item.rule.hf_tensors, tensors, strict=True)
            )
        is_cast = any(tensor is not other for tensor, other in zip(tensors, stored, strict=True))
        if is_cast and self.recorded_digests:
            ItemTensors(item.rule, stored, self.recorded_digests).compute_digests()
        return ItemTensors(item.rule, tensors, {} if is_cast else self.recorded_digests)


def _round_to_fp8(tensor_name: str, tensor: Tensor, fp8_block: tuple[int, int]) -> Tensor:
    """Quantise a tensor to FP8 and back, if FP8 checkpoints store it so; else return it as it is.
    Raise ValueError for a weight that is not finite.
    """
    if not is_stored_in_fp8(tensor_name):
        return tensor
    try:
        return dequantise_fp8(*quantise_to_fp8(tensor, fp8_block), fp8_block, tensor.dtype)
    except ValueError as error:
        raise ValueError(f"{tensor_name}: {error}; convert with --dtype bfloat16.") from error


def group_items_into_units(items: Sequence[ConversionItem]) -> list[list[int]]:
    """Return lists of item numbers. The items of a list are read and written together: the matrices
    of one expert, or one other tensor.
    """
    units: list[list[int]] = []
    last: tuple[Any, ...] | None = None
    for number, item in enumerate(items):
        expert = None if item.rule.expert is None else (item.rule.layer, item.rule.expert)
        if expert is None or expert != last:
            units.append([])
        units[-1].append(number)
        last = expert
    return units


def open_stored_model(
    directory: Path, is_strict: bool = False, config_directory: Path | None = None
) -> StoredModel:
    """Open the weights in `directory`, in any layout, and check them against the weight table.
    Raise ValueError that names files, tensors and shapes; also for tensors that nothing reads,
    unless leaving these out changes no number (weights.unread_tensors) and `is_strict` is False.

    `config_directory`: the directory with config.json and the tokenizer, for a megatron-core
    checkpoint that has none.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory; give one with a model in Hugging Face or"
            " Megatron layout."
        )
    if (directory / MANIFEST).is_file():
        megatron = MegatronReader(directory)
        return StoredModel(
            megatron.manifest.hf_config, megatron, directory, directory, megatron.manifest.digests
        )
    digests = _read_recorded_digests(directory)
    found = find_torch_dist_directory(directory)
    companions = config_directory or directory
    if found is not None and not (companions / "config.json").is_file():
        raise ValueError(
            f"{companions} has no config.json; --model DIR names the directory of the same"
            " model that has."
        )
    hf_config = read_hf_config(companions)
    block = read_fp8_block_size(hf_config) if hf_config.get(QUANTISATION) else None
    hf_config = {key: value for key, value in hf_config.items() if key != QUANTISATION}
    if found is not None:
        source = TorchDistSource(found, is_foreign=True)
        model = StoredModel(hf_config, source, found, companions, digests)
        left_over = sorted(
            set(source.names) - {source.find_key(rule) for rule in model.weight_table}
        )
        if left_over and is_strict:
            raise ValueError(f"{found}: not part of this model: {', '.join(left_over[:8])}.")
        _refuse_unread_tensors(model, source, left_over)
        return model
    reader = HFReader(directory, block)
    reader.check_against_table(make_weight_table(hf_config), is_strict)
    return replace(StoredModel(hf_config, reader, directory, companions, digests), fp8_block=block)


def _refuse_unread_tensors(
    model: StoredModel, source: TorchDistSource, unread_names: Sequence[str]
) -> None:
    """Raise ValueError for weights of a megatron-core checkpoint that the model does not have,
    unless they may be left out; log those of which a user must know. Optimizer state is not of the
    model.
    """
    lost = []
    dropped: dict[DroppableTensors, list[str]] = {}
    for name in unread_names:
        kind = find_droppable_kind(name, source.get_shape(name))
        if kind is not None:
            dropped.setdefault(kind, []).append(name)
        elif is_tied_head(name, model.weight_table):
            _compare_tied_head(model, source, name)
        elif "optimizer" not in name:
            lost.append(name)
    for kind, names in dropped.items():
        if kind.is_reported:
            logger.warning("%s: %s", source.directory, format_dropped_tensors(kind, names))
    if lost:
        problem = format_unread_tensors(lost, model.weight_table)
        raise ValueError(f"{source.directory} does not fit config.json: {problem}.")


def _compare_tied_head(model: StoredModel, source: TorchDistSource, head_name: str) -> None:
    """Raise ValueError where the output layer of a checkpoint is not the embedding to which the
    model's output layer is tied.
    """
    embedding = next(rule for rule in model.weight_table if rule.owner == "embedding")
    (vectors,) = source.read_hf_tensors(embedding)
    head_rule = replace(embedding, megatron_name=head_name)
    (head,) = source.read_hf_tensors(head_rule)
    row = find_different_row(head, vectors, tuple(vectors.shape))
    if row is not None:
        problem = format_other_head(head_name, embedding.megatron_name, f"first in row {row}")
        raise ValueError(f"{source.directory} does not fit config.json: {problem}.")


def _read_recorded_digests(directory: Path) -> Mapping[str, str]:
    """Return the digests that an earlier conversion recorded in `directory`, or {} where there is
    no such file. Raise ValueError for a file of another form.
    """
    if not (directory / DIGESTS).is_file():
        return {}
    digests = read_json_object(directory / DIGESTS).get("digests")
    if not isinstance(digests, dict):
        raise ValueError(
            f"{directory / DIGESTS} has no digests; convert the model again, or remove the file."
        )
    return digests


def find_torch_dist_directory(directory: Path) -> Path | None:
    """Return the directory of megatron-core's checkpoint: `directory` itself, or the folder in it
    that `latest_checkpointed_iteration.txt` names as the newest; None where `directory` holds
    neither. Raise ValueError where the named folder is not a checkpoint.
    """
    if (directory / METADATA).is_file():
        return directory
    if not (directory / LATEST).is_file():
        return None
    name = (directory / LATEST).read_text().strip()
    if name == "release":
        folder = name
    else:
        folder = f"iter_{int(name):07d}" if name.isdecimal() else ""
    newest = directory / folder
    if not (newest / METADATA).is_file():
        raise ValueError(
            f"{directory / LATEST} says {name[:40]!r}, but {newest} is no checkpoint in torch_dist"
            " format; name the directory of one that is."
        )
    return newest
