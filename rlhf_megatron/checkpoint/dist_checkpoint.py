"""Sharded state on disk in megatron's torch_dist format, which loads under another layout."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async


def save_sharded(directory: Path, state: dict[str, Any]) -> None:
    """Write `state` (sharded tensors and plain values, the latter alike on all ranks) to `directory`. All ranks.

    The directory may exist if it is empty; megatron writes no other.
    """
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # A save that is waited for puts its results into this queue and takes them out in one process. megatron's own
    # choice is the queue of a manager process, which costs seconds to start and outlives a killed run.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(directory), get_default_save_sharded_strategy("torch_dist"))


def load_sharded(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The values in `directory` for the sharded tensors of `state`, laid out as `state` is. All ranks.

    Raises ValueError naming each tensor that the directory lacks or holds with another shape.
    """
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(directory))
    except (CheckpointingException, OSError) as error:
        raise ValueError(f"{directory} is not a checkpoint: {error}") from error
    problems = [problem for tensor in _sharded_tensors(state) for problem in _mismatch(tensor, stored)]
    if problems:
        shown = "\n  ".join(sorted(set(problems))[:20])
        raise ValueError(
            f"checkpoint {directory} does not fit this model ({len(set(problems))} tensors); load it with the"
            f" model configuration that it was written with:\n  {shown}"
        )
    return dist_checkpointing.load(state, str(directory), get_default_load_sharded_strategy(str(directory)))


def _sharded_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from (part for part in nested_values(value.build()) if isinstance(part, ShardedTensor))
        elif isinstance(value, ShardedTensor):
            yield value


def _mismatch(tensor: ShardedTensor, stored: dict[str, Any]) -> Iterator[str]:
    if tensor.key not in stored:
        yield f"{tensor.key} is missing"
        return
    has, wants = tuple(stored[tensor.key].global_shape), tuple(tensor.global_shape)
    # megatron marks tensors whose first dimension is padded for the layout (the vocabulary): only the rest must agree.
    if has[1:] != wants[1:] or (has[0] != wants[0] and not tensor.allow_shape_mismatch):
        yield f"{tensor.key} has shape {has}, the model needs {wants}"
