"""Sharded state on disk in megatron's torch_dist format, which loads under another layout.

A thread writes staged state while the rank's main thread goes on. It never communicates: process
groups belong to the main thread. Whatever keeps a rank from writing (disk full, directory read-only
or gone) comes out as an error on all ranks alike, and no rank waits for one that failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    load,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from rlhf_megatron import faults
from rlhf_megatron.data.direct_file_io import fsync_path
from rlhf_megatron.weights import safe_pickle as safe_reads
from rlhf_megatron.weights.checkpoint_manifest import FileRecord, SaveResult, make_file_record
from rlhf_megatron.weights.safe_pickle import (
    read_checkpoint_metadata,
    read_plain_file,
    read_plain_values,
)
from rlhf_megatron.write_errors import explain_write_errors

METADATA = ".metadata"
COMMON = "common.pt"
SAVE_TIMEOUT_S = 3600.0  # of a save that is waited for
EXTRA_STATE = "_extra_state"
logger = logging.getLogger(__name__)


class StagedState:
    """The copies in host memory that one rank will write. The originals may change from now on."""

    def __init__(
        self,
        save_plan: SavePlan,
        staged_values: list[Any],
        metadata: Metadata | None,
        plain_values: dict[str, Any],
    ) -> None:
        self.save_plan = save_plan
        self.metadata = metadata  # of all ranks' tensors; on the first rank only
        self.plain_values = plain_values  # what is no tensor, alike on all ranks
        self._planner = _StagedSavePlanner(save_plan, staged_values)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of this rank's tensors that are not written yet."""
        return sum(
            value.nbytes for value in self._planner.staged_values if isinstance(value, Tensor)
        )

    def write_rank_files(self, directory: Path) -> list[WriteResult]:
        """Write this rank's files into `directory`, which must exist, flushed to disk. A thread may
        call it: there is no communication.

        Call it once only, because each tensor is released as soon as it is written. Raise OSError
        that names the directory.
        """
        if not self.save_plan.items:
            return []
        with explain_write_errors(directory):
            return (
                _FlushingWriter(directory, single_file_per_rank=True, thread_count=1)
                .write_data(self.save_plan, self._planner)
                .wait()
            )

    def write_metadata_files(
        self, directory: Path, results_by_rank: list[list[WriteResult]]
    ) -> list[Path]:
        """Write the files that locate every tensor, and the plain values, flushed to disk; return
        their paths. Only the first rank calls it, after all ranks have written their files.
        """
        assert self.metadata is not None, "only the first rank completes a checkpoint"
        with explain_write_errors(directory / METADATA):
            _FlushingWriter(directory).finish(self.metadata, results_by_rank)
        with explain_write_errors(directory / COMMON):
            torch.save(self.plain_values, directory / COMMON)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        written = [directory / METADATA, directory / COMMON, directory / "metadata.json"]
        for path in [*written, directory]:
            fsync_path(path)
        return written


class _FlushingWriter(FileSystemWriter):
    """torch's writer of checkpoint files, which here flushes each file to disk."""

    def storage_meta(
        self,
    ) -> None:  # torch would note the directory that the files are in only until it is renamed
        """Store no directory, because the files' directory is renamed later."""


class _StagedSavePlanner(DefaultSavePlanner):
    """A save planner that returns the staged copies, and releases each copy."""

    def __init__(self, plan: SavePlan, staged_values: list[Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.staged_values = staged_values
        self._position_of_item = {item.index: number for number, item in enumerate(plan.items)}
        self._num_written = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the staged value of an item, and release it."""
        if self._num_written == len(self.staged_values) // 2:
            faults.reach_fault_point("ckpt.mid_data")
        self._num_written += 1
        number = self._position_of_item[write_item.index]
        value = self.staged_values[number]
        self.staged_values[number] = None
        return value


def stage_sharded_state(state: dict[str, Any]) -> StagedState:
    """Plan with all ranks which rank writes which part of `state` (sharded tensors, and plain
    values that are alike on all ranks), and copy this rank's share to host memory. All ranks must
    call it; no file is touched.
    """
    sharded, plain = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(
        mcore_to_pyt_state_dict(by_key, False), is_coordinator=dist.get_rank() == 0
    )
    return _stage_planned_state(planner, plain)


def stage_dtensors(tensors: Mapping[str, Tensor], plain_values: dict[str, Any]) -> StagedState:
    """Stage DTensors as `stage_sharded_state` stages Megatron's sharded tensors; the first rank
    writes the tensors that are no DTensors. All ranks must call it.
    """
    is_first = dist.get_rank() == 0
    planner = _NonEmptySavePlanner(flatten_state_dict=False)
    mine: dict[str, Any] = {k: v for k, v in tensors.items() if is_first or isinstance(v, DTensor)}
    planner.set_up_planner(mine, is_coordinator=is_first)
    return _stage_planned_state(planner, plain_values)


class _NonEmptySavePlanner(DefaultSavePlanner):
    """A save planner that leaves out the empty parts of a tensor with fewer rows than there are
    ranks.
    """

    def create_local_plan(self) -> SavePlan:
        """Return the plan without items of zero elements."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if _count_elements(item)])
        return self.plan


def _count_elements(item: WriteItem) -> int:
    """Return the number of elements of an item's tensor chunk."""
    assert item.tensor_data is not None, "tensors only"
    return prod(item.tensor_data.chunk.sizes)


def _stage_planned_state(planner: DefaultSavePlanner, plain_values: dict[str, Any]) -> StagedState:
    """Agree on the global plan with all ranks, and return copies of this rank's values in host
    memory. All ranks must call it.
    """
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    own = planner.create_local_plan()
    plans: list[Any] | None = [None] * num_ranks if rank == 0 else None
    dist.gather_object(own, plans, dst=0)
    metadata = planner.create_global_plan(plans)[1] if plans is not None else None
    plan = planner.finish_plan(own)  # no tensor is on two ranks: the global plan changes nothing
    data = [_copy_to_host(planner.resolve_data(item)) for item in plan.items]
    # names this rank's files
    numbered = _FlushingWriter(".").prepare_global_plan([plan] * (rank + 1))[rank]
    return StagedState(numbered, data, metadata, plain_values)


def _copy_to_host(value: Any) -> Any:
    """Return a copy of a tensor in host memory, or any other value as it is. A CPU tensor is copied
    too, because training goes on changing the original.
    """
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class BackgroundSave:
    """The writing of a staged state on a thread. Make it on all ranks at once; writing begins right
    away. `directory` is made; its parent must exist.

    `rank_label` holds this rank's coordinates, for errors.
    """

    def __init__(self, staged: StagedState, directory: Path, rank_label: str) -> None:
        self._staged = staged
        self._directory = directory
        self._rank_label = rank_label
        self._write_results: list[WriteResult] = []
        self._file_records: tuple[FileRecord, ...] = ()
        self._error: str | None = None
        self._writing_seconds = 0.0
        self._thread = threading.Thread(
            target=self._write_on_thread, name=f"save {directory.name}", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Return whether this rank has written its files, or failed to."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> SaveResult:
        """Wait for this rank's files, then complete the checkpoint with the other ranks, and return
        the files or the error, which is the same on all ranks. All ranks must call it, on their
        main threads.

        A rank that is still writing after `timeout_s` seconds has failed. The caller must remove
        the files of a failed save.
        """
        self._thread.join(timeout_s)
        late = (
            f"{self._rank_label} is still writing to {self._directory}, though it had {timeout_s} s"
            " more to end"
        )
        error = agree_on_error(self._error if self.is_done else late)
        if error is not None:
            return SaveResult((), error)
        num_ranks = dist.get_world_size()
        is_first = dist.get_rank() == 0
        results: list[list[WriteResult]] = [[] for _ in range(num_ranks)]
        dist.gather_object(self._write_results, results if is_first else None, dst=0)
        added: tuple[FileRecord, ...] = ()
        if is_first:
            added, error = attempt_write(
                self._rank_label,
                lambda: self._make_file_records(
                    self._staged.write_metadata_files(self._directory, results)
                ),
            )
        error = agree_on_error(error)
        if error is not None:
            return SaveResult((), error)
        return SaveResult((*self._file_records, *added), seconds=self._writing_seconds)

    def _write_on_thread(self) -> None:
        """Make the directory and write this rank's files; keep the records of the files, the error,
        and the seconds taken.
        """

        def write_and_record() -> tuple[FileRecord, ...]:
            """Write this rank's files and return their records."""
            faults.reach_fault_point("ckpt.before_data")
            self._directory.mkdir(exist_ok=True)
            self._write_results = self._staged.write_rank_files(self._directory)
            return self._make_file_records(
                sorted(
                    {self._directory / r.storage_data.relative_path for r in self._write_results}
                )
            )

        began = time.monotonic()
        self._file_records, self._error = attempt_write(self._rank_label, write_and_record)
        self._writing_seconds = time.monotonic() - began

    def _make_file_records(self, paths: list[Path]) -> tuple[FileRecord, ...]:
        """Return the records of these files, relative to the parent of the save's directory."""
        return tuple(make_file_record(self._directory.parent, path) for path in paths)


def write_on_all_ranks(
    rank_label: str, write_files: Callable[[], tuple[FileRecord, ...]]
) -> SaveResult:
    """Run `write_files` on this rank, and return its files, or the error of the first rank that
    failed, on all ranks. All ranks of the pool must call it.
    """
    files, error = attempt_write(rank_label, write_files)
    error = agree_on_error(error)
    return SaveResult(files) if error is None else SaveResult((), error)


def attempt_write(
    rank_label: str, write_files: Callable[[], tuple[FileRecord, ...]]
) -> tuple[tuple[FileRecord, ...], str | None]:
    """Return (the records that `write_files` returned, None), or ((), the error as text), which is
    also logged: the other ranks must learn of an error before this rank goes on.
    """
    try:
        return write_files(), None
    except Exception as error:  # OSError; torch makes a RuntimeError of one that its writer meets
        logger.warning(
            "%s could not write: %s", rank_label, error, exc_info=not isinstance(error, OSError)
        )
        return (), f"{rank_label} could not write: {type(error).__name__}: {error}"


def agree_on_error(error: str | None) -> str | None:
    """Return the error of the first rank that has one, the same on all ranks; None where no rank
    has an error. All ranks of the pool must call it.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found = [text for text in errors if text is not None]
    if not found:
        return None
    more = f" (and {len(found) - 1} other ranks)" if len(found) > 1 else ""
    return found[0] + more


def drop_extra_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's sharded state without its extra state, so that it can be loaded again:
    tensors only.

    Linear layers add an object each, which would be stored as a pickle: None, or Transformer
    Engine's fp8 scales. Its grouped experts add one object for each expert: "_extra_state",
    "_extra_state1" and so on.
    """
    return {
        name: value
        for name, value in state.items()
        if not name.rpartition(".")[2].startswith(EXTRA_STATE)
    }


def save_sharded_state(directory: Path, state: dict[str, Any]) -> None:
    """Write `state` (sharded tensors and plain values, the latter alike on all ranks) to
    `directory`. All ranks must call it.

    Raise OSError on all ranks when one rank cannot write.
    """
    save_staged_state(directory, stage_sharded_state(state))


def save_staged_state(directory: Path, staged: StagedState) -> None:
    """Write a staged state to `directory`, whose parents are made. All ranks must call it; raise
    OSError on all of them when one rank cannot write.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    save = BackgroundSave(staged, directory, f"rank {dist.get_rank()}")
    error = save.finish(SAVE_TIMEOUT_S).error
    if error is not None:
        raise OSError(error)


def load_plain_values(directory: Path) -> Any:
    """Return the plain values that were saved with a state. Raise ValueError when they cannot be
    read.
    """
    path = directory / COMMON
    try:
        return read_plain_values(str(path), read_plain_file(path))
    except OSError as error:
        raise ValueError(f"{directory} is not a checkpoint: {error}") from error


def load_sharded_state(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the values in `directory` for the sharded tensors of `state`, in the structure of
    `state`. All ranks must call it.

    Nothing is unpickled freely, whoever wrote the file. Raise ValueError for a directory that holds
    anything but a state saved by this module, and for tensors that it lacks or holds with another
    shape, with their names.
    """
    safe_reads.patch_checkpoint_readers()
    safe_reads.check_checkpoint_directory(directory)
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(directory))
    except (CheckpointingException, OSError) as error:
        raise ValueError(f"{directory} is not a checkpoint: {error}") from error
    problems = [
        problem
        for tensor in _iterate_sharded_tensors(state)
        for problem in _find_mismatches(tensor, stored)
    ]
    _raise_if_unfit(directory, problems)
    return dist_checkpointing.load(state, str(directory))


def load_dtensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill DTensors, and tensors that are whole on each rank, with the values in `directory`; raise
    ValueError as `load_sharded_state` does. Each rank reads for itself.
    """
    safe_reads.patch_checkpoint_readers()
    safe_reads.check_checkpoint_directory(directory)
    stored = read_checkpoint_metadata(directory / METADATA).state_dict_metadata
    problems = []
    for name, tensor in tensors.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            has = (
                "is missing"
                if size is None
                else f"has shape {tuple(size)}, the model needs {tuple(tensor.shape)}"
            )
            problems.append(f"{name} {has}")
    _raise_if_unfit(directory, problems)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(dict(tensors), storage_reader=FileSystemReader(directory), planner=planner, no_dist=True)


def _raise_if_unfit(directory: Path, problems: list[str]) -> None:
    """Raise ValueError with the first 20 problems, if there are any."""
    if problems:
        shown = "\n  ".join(sorted(set(problems))[:20])
        raise ValueError(
            f"checkpoint {directory} does not fit this model ({len(set(problems))} tensors); load"
            f" it with the model configuration that it was written with:\n  {shown}"
        )


def _iterate_sharded_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Yield all sharded tensors of a state, also those that its factories build."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from (
                part for part in nested_values(value.build()) if isinstance(part, ShardedTensor)
            )
        elif isinstance(value, ShardedTensor):
            yield value


def _find_mismatches(tensor: ShardedTensor, stored_metadata: dict[str, Any]) -> Iterator[str]:
    """Yield a problem where the checkpoint lacks the tensor or holds it with another shape; a first
    dimension that is padded for the layout may differ.
    """
    if tensor.key not in stored_metadata:
        yield f"{tensor.key} is missing"
        return
    has = tuple(stored_metadata[tensor.key].global_shape)
    wants = tuple(tensor.global_shape)
    # megatron marks tensors whose first dimension is padded for the layout (the vocabulary): only
    # the rest must agree.
    if has[1:] != wants[1:] or (has[0] != wants[0] and not tensor.allow_shape_mismatch):
        yield f"{tensor.key} has shape {has}, the model needs {wants}"
