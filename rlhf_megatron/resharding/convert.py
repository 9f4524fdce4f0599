"""Change the layout of weights on disk: Hugging Face <-> per-rank Megatron files, one rule of the table at a time.

Every source implements `WeightSource` and every direction is the same loop, so memory is bounded by the largest rule.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.aside import refuse_existing
from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.checkpoint.hf_writer import MAX_SHARD_BYTES, TensorSpec, hf_directory_writer
from rlhf_megatron.checkpoint.kept import Kept, kept_of
from rlhf_megatron.checkpoint.megatron_dir import MANIFEST, MegatronReader, megatron_directory_writer
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.models.causal_lm import table_of_files
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Head, Rule, check_tensor_parallel, rules_of_stage, split
from rlhf_megatron.resharding.digest import as_hex, digest
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

OnRule = Callable[[Rule], None]
"""Called after each rule, for a progress bar."""


@dataclass(frozen=True)
class Model:
    """Weights somewhere, and what they are of."""

    hf_config: HFConfig
    source: WeightSource
    companions_from: Path | None  # directory with the tokenizer's files
    digests: Mapping[str, str]  # as recorded by an earlier conversion; empty where there are none
    head: Head = "vocabulary"
    is_of_fsdp: bool = False  # the source knows transformers' names

    @property
    def table(self) -> tuple[Rule, ...]:
        """As its source has the tensors, where that is whole ones."""
        if self.is_of_fsdp:
            return table_of_files(self.hf_config, self.head)
        return table_for(self.hf_config, head=self.head)

    def kept(self, dtype: str | None) -> Kept:
        """Tensors that go along with a policy; they stand where the tokenizer does."""
        return kept_of(self.companions_from if self.head == "vocabulary" else None, self.hf_config, dtype)


def open_model(directory: Path, strict: bool = False) -> Model:
    """Weights in either layout, checked against the table. Raises ValueError naming files, tensors and shapes."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with a model in Hugging Face or Megatron layout.")
    if (directory / "actor" / ".metadata").is_file() or (directory / "checkpoints").is_dir():
        raise ValueError(
            f"{directory} is a training checkpoint, or a run that has some; rlhf-megatron export {directory} --out DIR"
            " writes its weights in Hugging Face layout."
        )
    if (directory / MANIFEST).is_file():
        megatron = MegatronReader(directory)
        return Model(megatron.manifest.hf_config, megatron, directory, megatron.manifest.digests)
    hf_config = read_hf_config(directory)
    reader = HFReader(directory)
    reader.check(table_for(hf_config), strict)
    return Model(hf_config, reader, directory, {})


def write_megatron(
    model: Model, out: Path, tp: int, pp: int, dtype: str | None = None, on_rule: OnRule | None = None
) -> dict[str, str]:
    """Per-rank files for tp x pp. `dtype`: cast to it; None keeps each tensor's. Returns the digests written.

    Raises ValueError before anything is written when the model does not divide, `out` is not empty, or space is short.
    """
    table = table_for(model.hf_config, tp)
    check_tensor_parallel(table, tp)
    rules_of_stage(table, 0, pp)
    refuse_existing(Path(out))
    dtypes = {rule.megatron_name: rule.dtype or dtype or model.source.dtype_of(rule) for rule in table}
    copies = {rule.megatron_name: tp if rule.split == "replicated" else 1 for rule in table}
    _check_space(
        out, sum(prod(r.megatron_shape) * DTYPE_BYTES[dtypes[r.megatron_name]] * copies[r.megatron_name] for r in table)
    )
    kept = model.kept(dtype)
    digests = _kept_digests(model, kept)
    with megatron_directory_writer(out, model.hf_config, tp, pp, dtypes, digests, model.companions_from, kept) as write:
        for rule in table:
            tensors = _read(model, rule, dtypes[rule.megatron_name])
            write(rule, tensors)
            digests |= _digests(rule, tensors)
            if on_rule is not None:
                on_rule(rule)
    return digests


def write_hf(
    model: Model,
    out: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_rule: OnRule | None = None,
    hf_config: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """A Hugging Face directory; arguments and errors as of `write_megatron`. `hf_config`: written in place of the
    model's own. Returns the digests written."""
    table = model.table
    refuse_existing(Path(out))
    dtypes = {rule.megatron_name: rule.dtype or dtype or model.source.dtype_of(rule) for rule in table}
    specs = [TensorSpec(hf.name, dtypes[rule.megatron_name], hf.shape) for rule in table for hf in rule.hf]
    kept = model.kept(dtype)
    specs += kept.specs()
    _check_space(out, sum(spec.num_bytes for spec in specs))
    digests = _kept_digests(model, kept)
    config = hf_config or model.hf_config
    with hf_directory_writer(out, specs, config, model.companions_from, max_shard_bytes) as writer:
        for rule in table:
            tensors = _read(model, rule, dtypes[rule.megatron_name])
            for hf, tensor in zip(rule.hf, tensors, strict=True):
                writer.write(hf.name, tensor)
            digests |= _digests(rule, tensors)
            if on_rule is not None:
                on_rule(rule)
        for name, tensor in kept.tensors():
            writer.write(name, tensor)
    return digests


def verify(source: Model, out: Path, digests: Mapping[str, str], on_rule: OnRule | None = None) -> None:
    """Read `out` back and compare with what was written, in both layouts.

    Every HF tensor read from `out` must have its digest; and where `out` or the source is in Megatron layout, its
    shards must be those made anew from the HF tensors of the other side. Raises ValueError naming the tensor.
    """
    written = open_model(out)
    for name, tensor in written.kept(None).tensors():
        _check_read_back(out, name, as_hex(digest(tensor)), digests)
    for rule in table_for(written.hf_config):
        tensors = written.source.hf_tensors(rule)
        found = _digests(rule, tensors)
        for name, value in found.items():
            _check_read_back(out, name, value, digests)
        if isinstance(written.source, MegatronReader):
            other = tuple(tensor.to(tensors[0].dtype) for tensor in source.source.hf_tensors(rule))
            _compare_shards(written.source, rule, other)
        if isinstance(source.source, MegatronReader) and source.source.dtype_of(rule) == written.source.dtype_of(rule):
            _compare_shards(source.source, rule, tensors)
        if on_rule is not None:
            on_rule(rule)


def _check_read_back(out: Path, name: str, value: str, digests: Mapping[str, str]) -> None:
    if value != digests.get(name):
        wanted = digests.get(name)
        raise ValueError(f"{out}: read-back digest {value} of {name} differs from {wanted}; check the disk.")


def _compare_shards(reader: MegatronReader, rule: Rule, tensors: Sequence[Tensor]) -> None:
    own = next(r for r in reader.table if r.megatron_name == rule.megatron_name)
    expected = split(own.split, own.to_megatron(*tensors), reader.manifest.tp)
    for tp, (found, wanted) in enumerate(zip(reader.shards(own), expected, strict=True)):
        if as_hex(digest(found)) != as_hex(digest(wanted)) or found.dtype != wanted.dtype:
            raise ValueError(
                f"{reader.directory}: the shard of {rule.megatron_name} at tp rank {tp} is not the one that its Hugging"
                " Face tensors make. Convert the model again."
            )


def _read(model: Model, rule: Rule, dtype: str) -> tuple[Tensor, ...]:
    tensors = model.source.hf_tensors(rule)
    _check_digests(model, _digests(rule, tensors))
    return tuple(tensor.to(getattr(torch, dtype)) for tensor in tensors)


def _check_digests(model: Model, found: Mapping[str, str]) -> None:
    for name, value in found.items():
        if model.digests and model.digests.get(name) != value:
            raise ValueError(
                f"{name} has digest {value}, its manifest says {model.digests.get(name)}: the file was changed or"
                " damaged. Convert the model again."
            )


def _kept_digests(model: Model, kept: Kept) -> dict[str, str]:
    """Of what will be written; what was read is checked."""
    _check_digests(model, {name: as_hex(digest(tensor)) for name, tensor in replace(kept, dtype=None).tensors()})
    return {name: as_hex(digest(tensor)) for name, tensor in kept.tensors()}


def _digests(rule: Rule, tensors: Sequence[Tensor]) -> dict[str, str]:
    return {hf.name: as_hex(digest(tensor)) for hf, tensor in zip(rule.hf, tensors, strict=True)}


def _check_space(out: Path, num_bytes: int) -> None:
    parent = next(path for path in Path(out).absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(f"{out} needs {num_bytes} bytes but {parent} has {free} free; choose another place.")
