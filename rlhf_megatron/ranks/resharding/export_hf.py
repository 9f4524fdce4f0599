"""Write a sharded model as a Hugging Face directory. The weights travel as in a weight sync;
buckets become files.
"""

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

from rlhf_megatron.data.atomic_directory import refuse_nonempty_directory
from rlhf_megatron.data.direct_file_io import fsync_path
from rlhf_megatron.ranks.resharding.weight_sender import (
    SenderWorld,
    SendRequest,
    raise_if_any_rank_failed,
    send_whole_tensors,
)
from rlhf_megatron.weights.bucket_buffers import BucketBuffers, make_memory_buffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.hf_writer import (
    SafetensorsWriter,
    TensorSpec,
    get_storable_dtype_name,
    plan_weight_files,
    write_config_and_tokenizer,
    write_weight_index,
)
from rlhf_megatron.weights.mtp_tensors import MTP_FILE, find_mtp_tensors
from rlhf_megatron.weights.weight_table import StackedEntry, WeightRule, collect_stored_shapes
from rlhf_megatron.write_errors import write_text_file

_FILE_BYTES = 512 << 20


class ExportWorld(SenderWorld, Protocol):
    """The part of a `ranks.parallel.world.World` that exporting needs."""

    @property
    def pp_group(self) -> ProcessGroup:
        """Return the group of the pipeline stages, in stage order."""
        ...


def export_sharded_model_to_hf(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: ExportWorld,
    *,
    directory: Path,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    companions_directory: Path | None = None,
    tokenizer_directory: Path | None = None,
    max_file_bytes: int = _FILE_BYTES,
) -> None:
    """Write a sharded model as a Hugging Face directory. Call it on every rank of the pool;
    `directory` must be on a file system that the senders share. Ranks outside the first copy return
    at once.

    Each stage's rank (dp 0, cp 0, tp 0) writes its tensors, as `dtype`; the first stage completes
    the directory, which then appears under its name. `companions_directory` is a directory whose
    tokenizer files (and MTP tensors, if any) are copied; with `tokenizer_directory` the tokenizer
    files come from there. Raise on every rank of the first copy when one rank fails, and ValueError
    when the directory exists and is not empty; nothing is left behind.
    """
    if not world.is_first_copy:
        return
    aside = directory.absolute().with_name(f".{directory.name}.partial")
    is_sender = world.copy_group.rank() == 0
    is_first = is_sender and world.coordinates.pp == 0
    failure = (
        _catch_failure(lambda: _make_partial_directory(directory, aside)) if is_first else None
    )
    if is_sender:
        failure = _share_failure(failure, world.pp_group, world.device)
    raise_if_any_rank_failed(failure, world.copy_group, world.device)

    failure = _catch_failure(
        lambda: _write_stage_files(exported_shards, world, aside, dtype, max_file_bytes)
    )
    if is_sender:
        failure = _share_failure(failure, world.pp_group, world.device)
    if failure is None and is_first:
        failure = _catch_failure(
            lambda: _complete_directory(
                directory,
                aside,
                hf_config,
                get_storable_dtype_name(dtype),
                companions_directory,
                tokenizer_directory,
            )
        )
    if is_sender:
        failure = _share_failure(failure, world.pp_group, world.device)
    if failure is not None and is_first:
        shutil.rmtree(aside, ignore_errors=True)
    raise_if_any_rank_failed(failure, world.copy_group, world.device)


def _catch_failure(action: Callable[[], None]) -> Exception | None:
    """Run `action` and return its exception, or None: the other ranks must learn of a failure
    before this rank raises.
    """
    try:
        action()
    except Exception as failure:
        return failure
    return None


def _share_failure(
    failure: Exception | None, group: ProcessGroup, device: torch.device
) -> Exception | None:
    """Return `failure` on the rank that has it, a SyncAbortedError on the other ranks of the group,
    or None where no rank failed. All ranks of the group must call it.
    """
    return _catch_failure(lambda: raise_if_any_rank_failed(failure, group, device))


def _make_partial_directory(directory: Path, partial_directory: Path) -> None:
    """Make an empty partial directory, in place of an old one. Raise ValueError where `directory`
    exists and is not empty.
    """
    refuse_nonempty_directory(directory)
    shutil.rmtree(partial_directory, ignore_errors=True)
    partial_directory.mkdir(parents=True)


def _write_stage_files(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: ExportWorld,
    partial_directory: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> None:
    """Write the tensors of this stage into safetensors files in the partial directory, and a JSON
    listing of the files. All ranks of the copy must call it; its first rank writes.
    """
    files: dict[str, Sequence[TensorSpec]] = {}
    stage = f"stage-{world.coordinates.pp:05d}"
    exported = list(exported_shards)
    fused = {
        hf.name: hf.entry for rule, _ in exported for hf in rule.hf_tensors if hf.entry is not None
    }
    is_sender = world.copy_group.rank() == 0
    with _FusedTensorFiles(
        partial_directory,
        [rule for rule, _ in exported] if is_sender else [],
        dtype,
        stage,
        max_file_bytes,
    ) as together:

        def write_bucket_file(manifest: BucketManifest, bucket: Tensor) -> None:
            """Write a bucket's tensors into a file of their own, except entries of fused tensors,
            which go into the files of these tensors.
            """
            alone = [entry for entry in manifest.tensors if entry.name not in fused]
            for entry in manifest.tensors:
                if entry.name in fused:
                    together.write_entry(fused[entry.name], entry.view_in_bucket(bucket))
            if alone:
                name = f"{stage}-{manifest.bucket:05d}.safetensors"
                files[name] = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in alone]
                _write_safetensors_file(
                    partial_directory / name,
                    files[name],
                    [entry.view_in_bucket(bucket) for entry in alone],
                )

        def open_file_buffers(buffer_bytes: int, num_buckets: int) -> BucketBuffers:
            """Return buffers in host memory whose filled buckets go to `write_bucket_file`."""
            return make_memory_buffers(
                torch.device("cpu"), buffer_bytes, num_buckets, write_bucket_file
            )

        send_whole_tensors(
            exported, world, SendRequest(0, dtype, max_file_bytes), open_file_buffers
        )
        files |= together.close_complete_files()
    if is_sender:
        listing = {
            name: [(spec.name, spec.dtype, spec.shape) for spec in specs]
            for name, specs in files.items()
        }
        write_text_file(partial_directory / f"{stage}.json", json.dumps(listing))


class _FusedTensorFiles:
    """The files of a stage's fused tensors, which one tensor in a file holds and the buckets bring
    entry by entry, in any order.
    """

    def __init__(
        self,
        partial_directory: Path,
        rules: Sequence[WeightRule],
        dtype: torch.dtype,
        stage_prefix: str,
        max_file_bytes: int,
    ) -> None:
        own = collect_stored_shapes(
            hf for rule in rules for hf in rule.hf_tensors if hf.entry is not None
        )
        specs = [
            TensorSpec(name, get_storable_dtype_name(dtype), shape) for name, shape in own.items()
        ]
        shards = plan_weight_files(specs, max_file_bytes).values() if specs else ()
        self._planned_files = {
            f"{stage_prefix}-fused-{n:05d}.safetensors": shard for n, shard in enumerate(shards)
        }
        self._partial_directory = partial_directory
        self._writers = dict[str, SafetensorsWriter]()
        self._file_by_tensor = {
            spec.name: file for file, members in self._planned_files.items() for spec in members
        }

    def __enter__(self) -> _FusedTensorFiles:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files that are still open, as incomplete."""
        for writer in self._writers.values():
            writer.close(is_complete=False)

    def write_entry(self, entry: StackedEntry, tensor: Tensor) -> None:
        """Write one entry of a fused tensor into the tensor's file, which is opened by the first
        entry.
        """
        file = self._file_by_tensor[entry.name]
        if file not in self._writers:
            self._writers[file] = SafetensorsWriter(
                self._partial_directory / file, self._planned_files[file]
            )
        self._writers[file].write_tensor(entry.name, tensor, entry.index)

    def close_complete_files(self) -> dict[str, tuple[TensorSpec, ...]]:
        """Close all files, flush them to disk, and return each file's name with its tensors. Raise
        AssertionError where a planned file received no entry.
        """
        assert self._writers.keys() == self._planned_files.keys(), "a file got nothing"
        while self._writers:
            file, writer = self._writers.popitem()
            writer.close()
            fsync_path(self._partial_directory / file)
        return self._planned_files


def _write_safetensors_file(
    path: Path, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]
) -> None:
    """Write tensors to a safetensors file, flushed to disk; after an error the file is closed as
    incomplete.
    """
    writer = SafetensorsWriter(path, specs)
    try:
        for spec, tensor in zip(specs, tensors, strict=True):
            writer.write_tensor(spec.name, tensor)
    except BaseException:
        writer.close(is_complete=False)
        raise
    writer.close()
    fsync_path(path)


def _complete_directory(
    directory: Path,
    partial_directory: Path,
    hf_config: Mapping[str, Any],
    dtype: str,
    companions_directory: Path | None,
    tokenizer_directory: Path | None,
) -> None:
    """Rename the files of all stages as Hugging Face names them, write the MTP tensors, index,
    config and tokenizer beside them, and rename the partial directory to `directory`, all flushed
    to disk.
    """
    written: dict[str, list[TensorSpec]] = {}
    for listing in sorted(partial_directory.glob("stage-*.json")):
        for name, tensors in json.loads(listing.read_text()).items():
            written[name] = [
                TensorSpec(tensor, own, tuple(shape)) for tensor, own, shape in tensors
            ]
        listing.unlink()
    kept = find_mtp_tensors(companions_directory, hf_config, dtype)
    if kept.tensor_names:
        written[MTP_FILE] = kept.write_file(partial_directory / MTP_FILE)
    total = len(written)
    files = {}
    for number, (name, specs) in enumerate(written.items(), 1):
        final = (
            "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        )
        os.rename(partial_directory / name, partial_directory / final)
        files[final] = specs
    if total > 1:
        write_weight_index(partial_directory, files)
    write_config_and_tokenizer(
        partial_directory, hf_config, {dtype}, companions_directory, tokenizer_directory
    )
    for path in [*partial_directory.iterdir(), partial_directory]:
        fsync_path(path)
    refuse_nonempty_directory(directory)
    os.rename(partial_directory, directory)
    fsync_path(directory.absolute().parent)
