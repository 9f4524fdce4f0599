"""Weights somewhere on disk, in any layout that this package reads, and the units in which they are converted."""

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

from rlhf_megatron.checkpoint.dist_source import DistSource
from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config, read_json
from rlhf_megatron.checkpoint.kept import Kept, kept_of
from rlhf_megatron.checkpoint.megatron_dir import MANIFEST, MegatronReader
from rlhf_megatron.checkpoint.quantised import FP8_BLOCK, block_of, from_fp8, is_in_fp8, to_fp8
from rlhf_megatron.checkpoint.safe_pickle import METADATA
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.models.causal_lm import table_of_files
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Head, Rule
from rlhf_megatron.resharding.digest import as_hex, digest
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

logger = logging.getLogger(__name__)

DIGESTS = "conversion.json"
"""Beside weights that were converted to another layout than one file a rank: the digest of every tensor."""
LATEST = "latest_checkpointed_iteration.txt"
"""Beside the checkpoints of Megatron-LM: which of them is the newest one."""
QUANTISATION = "quantization_config"
PIECE_BYTES = 96 << 13  # which a cache holds while all that needs them goes over them; whole lines of the digest


@dataclass(frozen=True)
class Item:
    """A rule of the weight table, and the type in which its tensors are written."""

    rule: Rule
    dtype: str
    is_kept: bool = False  # no model has it: it goes along as it is
    block: tuple[int, int] | None = None  # in which its matrices are written in FP8; None: they are not

    @property
    def num_bytes(self) -> int:
        return prod(self.rule.megatron_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Reading:
    """An item's tensors in Hugging Face layout and in the item's type, perhaps views of mapped files."""

    rule: Rule
    tensors: tuple[Tensor, ...]
    recorded: Mapping[str, str]  # the digests that they must have; empty where none are known
    _found: dict[str, str] = field(default_factory=dict)

    def pieces(self, number: int) -> Iterator[Tensor]:
        """Yield the bytes of one tensor, a few at a time, and digest them on the way: files are read once so, and what
        is written then is still in a cache. Raises ValueError at the end of a tensor that is not the recorded one."""
        hf, tensor = self.rule.hf[number], self.tensors[number]
        total, first = 0, 0
        for piece in pieces_of(tensor):
            total += digest(piece.view(tensor.dtype), first)
            first += piece.numel() // min(2, tensor.element_size())  # words
            yield piece
        value = self._found[hf.name] = as_hex(total)
        if self.recorded and self.recorded.get(hf.name) != value:
            raise ValueError(
                f"{hf.name} has digest {value}, its manifest says {self.recorded.get(hf.name)}: the file was changed or"
                " damaged. Convert the model again."
            )

    def digests(self) -> dict[str, str]:
        """Return the digests of all, by Hugging Face name. Raises ValueError as `pieces` does."""
        for number, hf in enumerate(self.rule.hf):
            if hf.name not in self._found:
                for _ in self.pieces(number):
                    pass
        return {hf.name: self._found[hf.name] for hf in self.rule.hf}


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor, a few at a time."""
    yield from tensor.detach().contiguous().view(-1).view(torch.uint8).split(PIECE_BYTES)


@dataclass(frozen=True)
class Model:
    """Weights somewhere, and what they are of."""

    hf_config: HFConfig  # without the quantisation of its files
    source: WeightSource
    directory: Path  # of the weights
    companions_from: Path | None  # directory with the tokenizer's files
    digests: Mapping[str, str]  # as recorded by an earlier conversion; empty where there are none
    head: Head = "vocabulary"
    is_of_fsdp: bool = False  # the source knows transformers' names
    block: tuple[int, int] | None = None  # of FP8, where the files are quantised

    @cached_property
    def table(self) -> tuple[Rule, ...]:
        """The rules of the model; for a source that holds whole tensors, as it holds them."""
        if self.is_of_fsdp:
            return table_of_files(self.hf_config, self.head)
        return table_for(self.hf_config, head=self.head)

    def items(self, dtype: str | None = None, tp: int = 1) -> tuple[Item, ...]:
        """Everything that is converted, in the order of the table. `dtype`: cast to it; None keeps each tensor's type;
        "fp8": bfloat16, and FP8 for the matrices of layers. `tp`: ranks for which the vocabulary is padded."""
        dtype, block = ("bfloat16", FP8_BLOCK) if dtype == "fp8" else (dtype, None)
        table = self.table if tp == 1 else table_for(self.hf_config, tp, head=self.head)
        items = [Item(rule, rule.dtype or dtype or self.source.dtype_of(rule)) for rule in table]
        items += [Item(rule, str(rule.dtype), is_kept=True) for rule in self.kept(dtype).rules()]
        if block is None:
            return tuple(items)
        if any(hf.entry is not None for rule in table for hf in rule.hf):
            raise ValueError(
                f"{self.directory}: experts that files have in one tensor are not written in FP8; use bfloat16."
            )
        has_matrix = (any(is_in_fp8(hf.name) for hf in item.rule.hf) for item in items)
        return tuple(replace(i, block=block) if is_in else i for i, is_in in zip(items, has_matrix, strict=True))

    def kept(self, dtype: str | None = None) -> Kept:
        """Tensors that go along with a policy; they stand where the tokenizer does."""
        where = self.companions_from if self.head == "vocabulary" else None
        return kept_of(where, self.hf_config, dtype, self.block)

    @cached_property
    def _kept(self) -> Kept:
        return self.kept()

    def read(self, item: Item) -> Reading:
        """An item's tensors; FP8 blocks are dequantised. Raises ValueError for a broken tensor, or one that is cast and
        changed since it was converted."""
        source: WeightSource | None = self._kept.reader if item.is_kept else self.source
        assert source is not None, item
        stored = source.hf_tensors(item.rule)
        tensors = tuple(tensor.to(getattr(torch, item.dtype)) for tensor in stored)
        if item.block is not None:
            tensors = tuple(
                _as_fp8_has_it(hf.name, tensor, item.block) for hf, tensor in zip(item.rule.hf, tensors, strict=True)
            )
        is_cast = any(tensor is not other for tensor, other in zip(tensors, stored, strict=True))
        if is_cast and self.digests:
            Reading(item.rule, stored, self.digests).digests()
        return Reading(item.rule, tensors, {} if is_cast else self.digests)


def _as_fp8_has_it(name: str, tensor: Tensor, block: tuple[int, int]) -> Tensor:
    if not is_in_fp8(name):
        return tensor
    try:
        return from_fp8(*to_fp8(tensor, block), block, tensor.dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; convert with --dtype bfloat16.") from error


def units_of(items: Sequence[Item]) -> list[list[int]]:
    """Numbers of the items that are read and written at once: the matrices of one expert, or one other tensor."""
    units: list[list[int]] = []
    last: tuple[Any, ...] | None = None
    for number, item in enumerate(items):
        expert = None if item.rule.expert is None else (item.rule.layer, item.rule.expert)
        if expert is None or expert != last:
            units.append([])
        units[-1].append(number)
        last = expert
    return units


def open_model(directory: Path, strict: bool = False, config_from: Path | None = None) -> Model:
    """Weights in any layout, checked against the table. Raises ValueError naming files, tensors and shapes.

    `config_from`: directory with config.json and tokenizer, for one of megatron-core's that has none.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with a model in Hugging Face or Megatron layout.")
    if (directory / MANIFEST).is_file():
        megatron = MegatronReader(directory)
        return Model(megatron.manifest.hf_config, megatron, directory, directory, megatron.manifest.digests)
    digests = _digests_beside(directory)
    found = torch_dist_in(directory)
    companions = config_from or directory
    if found is not None and not (companions / "config.json").is_file():
        raise ValueError(
            f"{companions} has no config.json; --model DIR names the directory of the same model that has."
        )
    hf_config = read_hf_config(companions)
    block = block_of(hf_config) if hf_config.get(QUANTISATION) else None
    hf_config = {key: value for key, value in hf_config.items() if key != QUANTISATION}
    if found is not None:
        source = DistSource(found, is_foreign=True)
        model = Model(hf_config, source, found, companions, digests)
        left_over = sorted(set(source.names) - {source.key_of(rule) for rule in model.table})
        if left_over and strict:
            raise ValueError(f"{found}: not part of this model: {', '.join(left_over[:8])}.")
        weights = [name for name in left_over if "optimizer" not in name]
        if weights:
            more = f" and {len(weights) - 8} more" if len(weights) > 8 else ""
            logger.warning(
                "%s: tensors that this model does not have are ignored: %s%s", found, ", ".join(weights[:8]), more
            )
        return model
    reader = HFReader(directory, block)
    reader.check(table_for(hf_config), strict)
    return replace(Model(hf_config, reader, directory, companions, digests), block=block)


def _digests_beside(directory: Path) -> Mapping[str, str]:
    """Read the digests of an earlier conversion; empty where there was none. Raises ValueError for a file of another
    form.
    """
    if not (directory / DIGESTS).is_file():
        return {}
    digests = read_json(directory / DIGESTS).get("digests")
    if not isinstance(digests, dict):
        raise ValueError(f"{directory / DIGESTS} has no digests; convert the model again, or remove the file.")
    return digests


def torch_dist_in(directory: Path) -> Path | None:
    """The directory of megatron-core's checkpoint: this one, or that which Megatron-LM calls the newest below it."""
    if (directory / METADATA).is_file():
        return directory
    if not (directory / LATEST).is_file():
        return None
    name = (directory / LATEST).read_text().strip()
    found = directory / ("release" if name == "release" else f"iter_{int(name):07d}" if name.isdecimal() else "")
    if not (found / METADATA).is_file():
        raise ValueError(
            f"{directory / LATEST} says {name[:40]!r}, but {found} is no checkpoint in torch_dist format; name the"
            " directory of one that is."
        )
    return found
