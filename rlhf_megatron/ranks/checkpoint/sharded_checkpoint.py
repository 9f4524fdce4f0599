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

METADATA = ".metadata"
COMMON = "common.pt"
SAVE_TIMEOUT_S = 3600.0  # of a save that is waited for
EXTRA_STATE = "_extra_state"
logger = logging.getLogger(__name__)


class StagedState:
    """The copies in host memory that one rank will write.
    Their originals may change from now on.
    """

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
        """Bytes of this rank's tensors that are not written yet."""
        return sum(
            value.nbytes for value in self._planner.staged_values if isinstance(value, Tensor)
        )

    def write_rank_files(self, directory: Path) -> list[WriteResult]:
        """This rank's files, flushed to disk; no communication, so a thread can do it.
        `directory` must exist.

        Once only: each tensor is let go when it was written. Raises OSError, or RuntimeError from
        torch around one.
        """
        if not self.save_plan.items:
            return []
        return (
            _FlushingWriter(directory, single_file_per_rank=True, thread_count=1)
            .write_data(self.save_plan, self._planner)
            .wait()
        )

    def write_metadata_files(
        self, directory: Path, results_by_rank: list[list[WriteResult]]
    ) -> list[Path]:
        """Write the files that say what is where. The first rank does it when all ranks have
        written theirs.
        """
        assert self.metadata is not None, "only the first rank completes a checkpoint"
        _FlushingWriter(directory).finish(self.metadata, results_by_rank)
        torch.save(self.plain_values, directory / COMMON)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        written = [directory / METADATA, directory / COMMON, directory / "metadata.json"]
        for path in [*written, directory]:
            fsync_path(path)
        return written


class _FlushingWriter(FileSystemWriter):
    """torch's, which flushes each file."""

    def storage_meta(
        self,
    ) -> None:  # torch would note the directory that the files are in only until it is renamed
        return None


class _StagedSavePlanner(DefaultSavePlanner):
    """Hands out the copies, and lets go of each."""

    def __init__(self, plan: SavePlan, staged_values: list[Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.staged_values = staged_values
        self._position_of_item = {item.index: number for number, item in enumerate(plan.items)}
        self._num_written = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._num_written == len(self.staged_values) // 2:
            faults.reach_fault_point("ckpt.mid_data")
        self._num_written += 1
        number = self._position_of_item[write_item.index]
        value = self.staged_values[number]
        self.staged_values[number] = None
        return value


def stage_sharded_state(state: dict[str, Any]) -> StagedState:
    """Plan with all ranks who writes what of `state` (sharded tensors, and plain values, the latter
    alike on all ranks) and copy this rank's share to host memory. All ranks; touches no file.
    """
    sharded, plain = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(
        mcore_to_pyt_state_dict(by_key, False), is_coordinator=dist.get_rank() == 0
    )
    return _stage_planned_state(planner, plain)


def stage_dtensors(tensors: Mapping[str, Tensor], plain_values: dict[str, Any]) -> StagedState:
    """Stage DTensors as `stage_sharded_state` does Megatron's; the first rank writes what is not a
    DTensor. All ranks.
    """
    is_first = dist.get_rank() == 0
    planner = _NonEmptySavePlanner(flatten_state_dict=False)
    mine: dict[str, Any] = {k: v for k, v in tensors.items() if is_first or isinstance(v, DTensor)}
    planner.set_up_planner(mine, is_coordinator=is_first)
    return _stage_planned_state(planner, plain_values)


class _NonEmptySavePlanner(DefaultSavePlanner):
    """Leaves out the empty parts of a tensor that has fewer rows than there are ranks."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if _count_elements(item)])
        return self.plan


def _count_elements(item: WriteItem) -> int:
    assert item.tensor_data is not None, "tensors only"
    return prod(item.tensor_data.chunk.sizes)


def _stage_planned_state(planner: DefaultSavePlanner, plain_values: dict[str, Any]) -> StagedState:
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    own = planner.create_local_plan()
    plans: list[Any] | None = [None] * num_ranks if rank == 0 else None
    dist.gather_object(own, plans, dst=0)
    metadata = planner.create_global_plan(plans)[1] if plans is not None else None
    plan = planner.finish_plan(own)  # no tensor is on two ranks: the global plan changes nothing
    data = [_copy_to_host(planner.resolve_data(item)) for item in plan.items]
    numbered = _FlushingWriter(".").prepare_global_plan([plan] * (rank + 1))[
        rank
    ]  # names this rank's files
    return StagedState(numbered, data, metadata, plain_values)


def _copy_to_host(value: Any) -> Any:
    """A CPU tensor is copied too: moving it "to the host" would hand out the one that training
    goes on changing.
    """
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class BackgroundSave:
    """Made on all ranks at once; writing begins right away. `directory` is made; its
    parent must exist.

    `where`: this rank's coordinates, for errors.
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
        """This rank has written its files, or failed to."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> SaveResult:
        """Wait for this rank's files, then complete the checkpoint together. All ranks, on
        their main threads.

        A rank that is still writing after `timeout_s` has failed. What the files of a
        failed save came to is the caller's to remove.
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
        def write_and_record() -> tuple[FileRecord, ...]:
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
        return tuple(make_file_record(self._directory.parent, path) for path in paths)


def write_on_all_ranks(
    rank_label: str, write_files: Callable[[], tuple[FileRecord, ...]]
) -> SaveResult:
    """`write_files` on each rank of the pool, and what came of it on all of them."""
    files, error = attempt_write(rank_label, write_files)
    error = agree_on_error(error)
    return SaveResult(files) if error is None else SaveResult((), error)


def attempt_write(
    rank_label: str, write_files: Callable[[], tuple[FileRecord, ...]]
) -> tuple[tuple[FileRecord, ...], str | None]:
    """(what was written, None), or ((), what went wrong on this rank): its peers must be told
    before it goes on.
    """
    try:
        return write_files(), None
    except Exception as error:  # OSError; torch makes a RuntimeError of one that its writer meets
        logger.warning(
            "%s could not write: %s", rank_label, error, exc_info=not isinstance(error, OSError)
        )
        return (), f"{rank_label} could not write: {type(error).__name__}: {error}"


def agree_on_error(error: str | None) -> str | None:
    """The first rank's error, the same on all ranks; None where no rank has one. All
    ranks of the pool.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found = [text for text in errors if text is not None]
    if not found:
        return None
    more = f" (and {len(found) - 1} other ranks)" if len(found) > 1 else ""
    return found[0] + more


def drop_extra_state(state: dict[str, Any]) -> dict[str, Any]:
    """A model's sharded state that can be loaded again: tensors only.

    Linear layers add an object each, which would be stored as a pickle: None, or Transformer
    Engine's fp8 scales. Its grouped experts add one an expert: "_extra_state",
    "_extra_state1" and so on.
    """
    return {
        name: value
        for name, value in state.items()
        if not name.rpartition(".")[2].startswith(EXTRA_STATE)
    }


def save_sharded_state(directory: Path, state: dict[str, Any]) -> None:
    """Write `state` (sharded tensors and plain values, the latter alike on all ranks) to
    `directory`. All ranks.

    Raises OSError on all of them when one cannot write.
    """
    save_staged_state(directory, stage_sharded_state(state))


def save_staged_state(directory: Path, staged: StagedState) -> None:
    """Write what was staged. All ranks; errors as of `save_sharded_state`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    save = BackgroundSave(staged, directory, f"rank {dist.get_rank()}")
    error = save.finish(SAVE_TIMEOUT_S).error
    if error is not None:
        raise OSError(error)


def load_plain_values(directory: Path) -> Any:
    """The plain values that were saved with a state. Raises ValueError when they cannot be read."""
    path = directory / COMMON
    try:
        return read_plain_values(str(path), read_plain_file(path))
    except OSError as error:
        raise ValueError(f"{directory} is not a checkpoint: {error}") from error


def load_sharded_state(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The values in `directory` for the sharded tensors of `state`, laid out as `state`
    is. All ranks.

    Nothing is unpickled freely, whoever wrote it. Raises ValueError for a directory that holds
    anything but what was saved here, and naming each tensor that it lacks or holds with
    another shape.
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
    """Fill DTensors, and tensors that are whole on each rank, with what `directory` holds; errors
    as of `load_sharded_state`. Every rank reads for itself.
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
    if problems:
        shown = "\n  ".join(sorted(set(problems))[:20])
        raise ValueError(
            f"checkpoint {directory} does not fit this model ({len(set(problems))} tensors); load"
            f" it with the model configuration that it was written with:\n  {shown}"
        )


def _iterate_sharded_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from (
                part for part in nested_values(value.build()) if isinstance(part, ShardedTensor)
            )
        elif isinstance(value, ShardedTensor):
            yield value


def _find_mismatches(tensor: ShardedTensor, stored_metadata: dict[str, Any]) -> Iterator[str]:
    if tensor.key not in stored_metadata:
        yield f"{tensor.key} is missing"
        return
    has = tuple(stored_metadata[tensor.key].global_shape)
    wants = tuple(tensor.global_shape)
    # megatron marks tensors whose first dimension is padded for the layout (the vocabulary): only
    # the rest must agree.
    if has[1:] != wants[1:] or (has[0] != wants[0] and not tensor.allow_shape_mismatch):
        yield f"{tensor.key} has shape {has}, the model needs {wants}"
