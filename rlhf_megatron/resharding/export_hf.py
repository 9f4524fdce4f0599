"""Write a sharded model as a Hugging Face directory. The weights travel as in a weight sync; buckets become files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.checkpoint.aside import refuse_existing
from rlhf_megatron.checkpoint.hf_writer import (
    SafetensorsWriter,
    TensorSpec,
    dtype_name,
    plan_files,
    write_companions,
    write_index,
)
from rlhf_megatron.checkpoint.kept import KEPT_FILE, kept_of
from rlhf_megatron.data.direct import fsync
from rlhf_megatron.models.table import Entry, Rule, stored_specs
from rlhf_megatron.resharding.buffers import Buffers, in_memory
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.sender import Order, Place, agree, send_weights

_FILE_BYTES = 512 << 20


class ExportPlace(Place, Protocol):
    """The part of a `parallel.world.World` that exporting needs."""

    @property
    def pp_group(self) -> ProcessGroup: ...


def export_hf(
    export: Iterable[tuple[Rule, Tensor | None]],
    place: ExportPlace,
    *,
    directory: Path,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    companions_from: Path | None = None,
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Call on every rank of the pool; `directory` must be on a file system that the senders share.

    Each stage's rank (dp 0, cp 0, tp 0) writes its tensors, as `dtype`; the first stage completes the directory, which
    then appears under its name. `companions_from`: directory whose tokenizer files are copied. Raises on every rank of
    the first copy when one fails, ValueError when the directory exists and is not empty; nothing is left behind.
    """
    if not place.is_first_copy:
        return
    aside = directory.absolute().with_name(f".{directory.name}.partial")
    is_sender = place.copy_group.rank() == 0
    is_first = is_sender and place.coordinates.pp == 0
    failure = _attempt(lambda: _prepare(directory, aside)) if is_first else None
    if is_sender:
        failure = _agreed(failure, place.pp_group, place.device)
    agree(failure, place.copy_group, place.device)

    failure = _attempt(lambda: _write_stage(export, place, aside, dtype, file_bytes))
    if is_sender:
        failure = _agreed(failure, place.pp_group, place.device)
    if failure is None and is_first:
        failure = _attempt(lambda: _complete(directory, aside, hf_config, dtype_name(dtype), companions_from))
    if is_sender:
        failure = _agreed(failure, place.pp_group, place.device)
    if failure is not None and is_first:
        shutil.rmtree(aside, ignore_errors=True)
    agree(failure, place.copy_group, place.device)


def _attempt(work: Callable[[], None]) -> Exception | None:
    """Returns what `work` raised: the other ranks are told before it goes on."""
    try:
        work()
    except Exception as failure:
        return failure
    return None


def _agreed(failure: Exception | None, group: ProcessGroup, device: torch.device) -> Exception | None:
    return _attempt(lambda: agree(failure, group, device))


def _prepare(directory: Path, aside: Path) -> None:
    refuse_existing(directory)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_stage(
    export: Iterable[tuple[Rule, Tensor | None]], place: ExportPlace, aside: Path, dtype: torch.dtype, file_bytes: int
) -> None:
    files: dict[str, Sequence[TensorSpec]] = {}
    stage, exported = f"stage-{place.coordinates.pp:05d}", list(export)
    fused = {hf.name: hf.entry for rule, _ in exported for hf in rule.hf if hf.entry is not None}
    is_sender = place.copy_group.rank() == 0
    with _FusedFiles(aside, [rule for rule, _ in exported] if is_sender else [], dtype, stage, file_bytes) as together:

        def write(manifest: BucketManifest, bucket: Tensor) -> None:
            alone = [entry for entry in manifest.tensors if entry.name not in fused]
            for entry in manifest.tensors:
                if entry.name in fused:
                    together.write(fused[entry.name], entry.view(bucket))
            if alone:
                name = f"{stage}-{manifest.bucket:05d}.safetensors"
                files[name] = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in alone]
                _write_file(aside / name, files[name], [entry.view(bucket) for entry in alone])

        def open_buffers(capacity: int, num_buckets: int) -> Buffers:
            return in_memory(torch.device("cpu"), capacity, num_buckets, write)

        send_weights(exported, place, Order(0, dtype, file_bytes), open_buffers)
        files |= together.close()
    if is_sender:
        listing = {name: [(spec.name, spec.dtype, spec.shape) for spec in specs] for name, specs in files.items()}
        (aside / f"{stage}.json").write_text(json.dumps(listing))


class _FusedFiles:
    """The tensors of a stage that files have in one, made whole entry by entry: they come in buckets, in any order."""

    def __init__(self, aside: Path, rules: Sequence[Rule], dtype: torch.dtype, stage: str, file_bytes: int) -> None:
        own = stored_specs(hf for rule in rules for hf in rule.hf if hf.entry is not None)
        specs = [TensorSpec(name, dtype_name(dtype), shape) for name, shape in own.items()]
        shards = plan_files(specs, file_bytes).values() if specs else ()
        self._files = {f"{stage}-fused-{n:05d}.safetensors": shard for n, shard in enumerate(shards)}
        self._aside, self._writers = aside, dict[str, SafetensorsWriter]()
        self._file_of = {spec.name: file for file, members in self._files.items() for spec in members}

    def __enter__(self) -> _FusedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close(is_complete=False)

    def write(self, entry: Entry, tensor: Tensor) -> None:
        file = self._file_of[entry.name]
        if file not in self._writers:
            self._writers[file] = SafetensorsWriter(self._aside / file, self._files[file])
        self._writers[file].write(entry.name, tensor, entry.index)

    def close(self) -> dict[str, tuple[TensorSpec, ...]]:
        """All files with their tensors."""
        assert self._writers.keys() == self._files.keys(), "a file got nothing"
        while self._writers:
            file, writer = self._writers.popitem()
            writer.close()
            fsync(self._aside / file)
        return self._files


def _write_file(path: Path, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    writer = SafetensorsWriter(path, specs)
    try:
        for spec, tensor in zip(specs, tensors, strict=True):
            writer.write(spec.name, tensor)
    except BaseException:
        writer.close(is_complete=False)
        raise
    writer.close()
    fsync(path)


def _complete(
    directory: Path, aside: Path, hf_config: Mapping[str, Any], dtype: str, companions_from: Path | None
) -> None:
    """Name the files of all stages as Hugging Face does, write what goes with them, rename the directory."""
    written: dict[str, list[TensorSpec]] = {}
    for listing in sorted(aside.glob("stage-*.json")):
        for name, tensors in json.loads(listing.read_text()).items():
            written[name] = [TensorSpec(tensor, own, tuple(shape)) for tensor, own, shape in tensors]
        listing.unlink()
    kept = kept_of(companions_from, hf_config, dtype)
    if kept.names:
        written[KEPT_FILE] = kept.write(aside / KEPT_FILE)
    total = len(written)
    files = {}
    for number, (name, specs) in enumerate(written.items(), 1):
        final = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        os.rename(aside / name, aside / final)
        files[final] = specs
    if total > 1:
        write_index(aside, files)
    write_companions(aside, hf_config, {dtype}, companions_from)
    for path in [*aside.iterdir(), aside]:
        fsync(path)
    refuse_existing(directory)
    os.rename(aside, directory)
    fsync(directory.absolute().parent)
