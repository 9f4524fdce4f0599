"""Sharded state on disk in megatron's torch_dist format, which loads under another layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from rlhf_megatron.checkpoint import safe_pickle as safe_reads
from rlhf_megatron.checkpoint.async_save import COMMON, BackgroundSave, stage_sharded
from rlhf_megatron.checkpoint.safe_pickle import read_bytes, read_plain

SAVE_TIMEOUT_S = 3600.0  # of a save that is waited for
EXTRA_STATE = "_extra_state"


def without_extra_state(state: dict[str, Any]) -> dict[str, Any]:
    """A model's sharded state that can be loaded again: tensors only.

    Linear layers add an object each, which would be stored as a pickle: None, or Transformer Engine's fp8 scales.
    """
    return {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}


def save_sharded(directory: Path, state: dict[str, Any]) -> None:
    """Write `state` (sharded tensors and plain values, the latter alike on all ranks) to `directory`. All ranks.

    Raises OSError on all of them when one cannot write.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    save = BackgroundSave(stage_sharded(state), directory, f"rank {dist.get_rank()}")
    error = save.finish(SAVE_TIMEOUT_S).error
    if error is not None:
        raise OSError(error)


def load_plain(directory: Path) -> Any:
    """The plain values that were saved with a state. Raises ValueError when they cannot be read."""
    path = directory / COMMON
    try:
        return read_plain(str(path), read_bytes(path))
    except OSError as error:
        raise ValueError(f"{directory} is not a checkpoint: {error}") from error


def load_sharded(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The values in `directory` for the sharded tensors of `state`, laid out as `state` is. All ranks.

    Nothing is unpickled freely, whoever wrote it. Raises ValueError for a directory that holds anything but what was
    saved here, and naming each tensor that it lacks or holds with another shape.
    """
    safe_reads.apply()
    safe_reads.check_directory(directory)
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
    return dist_checkpointing.load(state, str(directory))


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
