"""Sharded state on its way to disk, in megatron's torch_dist format, which loads under another layout.

Three parts: `stage_sharded` (all ranks plan together and copy what each will write), `StagedState.write` (the files of
one rank, in whatever thread) and `StagedState.complete` (what the first rank adds). megatron's own asynchronous save
forks processes out of one with threads, hangs in a collective when one rank cannot write, and on a CPU writes the very
tensors that training goes on changing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from rlhf_megatron import faults
from rlhf_megatron.checkpoint.aside import fsync

METADATA, COMMON = ".metadata", "common.pt"


class StagedState:
    """What one rank will write: copies in host memory, whose originals may change from now on."""

    def __init__(self, plan: SavePlan, data: list[Any], metadata: Metadata | None, plain: dict[str, Any]) -> None:
        self.plan = plan
        self.metadata = metadata  # of all ranks' tensors; on the first rank only
        self.plain = plain  # what is no tensor, alike on all ranks
        self._planner = _StagedPlanner(plan, data)

    @property
    def num_bytes(self) -> int:
        """Of this rank's tensors that were not written yet."""
        return sum(value.nbytes for value in self._planner.data if isinstance(value, Tensor))

    def write(self, directory: Path) -> list[WriteResult]:
        """This rank's files, flushed to disk; no communication, so a thread can do it. `directory` must exist.

        Once only: each tensor is let go when it was written. Raises OSError, or RuntimeError from torch around one.
        """
        if not self.plan.items:
            return []
        return _Writer(directory, single_file_per_rank=True, thread_count=1).write_data(self.plan, self._planner).wait()

    def complete(self, directory: Path, results: list[list[WriteResult]]) -> list[Path]:
        """What the first rank writes when all ranks have written theirs: the files that say what is where."""
        assert self.metadata is not None, "only the first rank completes a checkpoint"
        _Writer(directory).finish(self.metadata, results)
        torch.save(self.plain, directory / COMMON)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        written = [directory / METADATA, directory / COMMON, directory / "metadata.json"]
        for path in [*written, directory]:
            fsync(path)
        return written


class _Writer(FileSystemWriter):
    """torch's, which flushes each file."""

    def storage_meta(self) -> None:  # torch would note the directory that the files are in only until it is renamed
        return None


class _StagedPlanner(DefaultSavePlanner):
    """Hands out the copies, and lets go of each."""

    def __init__(self, plan: SavePlan, data: list[Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.data = data
        self._position = {item.index: number for number, item in enumerate(plan.items)}
        self._num_written = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._num_written == len(self.data) // 2:
            faults.reach("ckpt.mid_data")
        self._num_written += 1
        number = self._position[write_item.index]
        value, self.data[number] = self.data[number], None
        return value


def stage_sharded(state: dict[str, Any]) -> StagedState:
    """Plan with all ranks who writes what of `state` (sharded tensors, and plain values, the latter alike on all ranks)
    and copy this rank's share to host memory. All ranks; touches no file."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sharded, plain = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(by_key, False), is_coordinator=rank == 0)
    own = planner.create_local_plan()
    plans: list[Any] | None = [None] * num_ranks if rank == 0 else None
    dist.gather_object(own, plans, dst=0)
    metadata = planner.create_global_plan(plans)[1] if plans is not None else None
    plan = planner.finish_plan(planner.create_decentralized_global_plan(own))
    data = [_own_copy(planner.resolve_data(item)) for item in plan.items]
    numbered = _Writer(".").prepare_global_plan([plan] * (rank + 1))[rank]  # names this rank's files
    return StagedState(numbered, data, metadata, plain)


def _own_copy(value: Any) -> Any:
    """A CPU tensor is copied too: moving it "to the host" would hand out the one that training goes on changing."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
