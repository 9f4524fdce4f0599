"""torch and megatron-core load checkpoints without unpickling. `PATCHES` is the whole list of what is replaced."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rlhf_megatron.checkpoint.safe_pickle import check_common, check_metadata, read_bytes, read_metadata, read_plain
from rlhf_megatron.parallel.mcore_patch import Patch, apply_all, replace_symbol

METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
_torch_load_bytes = DefaultLoadPlanner.load_bytes
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def check_directory(directory: Path) -> None:
    """Raises ValueError naming the file, unless everything that a load parses in `directory` is of the kind expected.

    `directory`: what megatron's `dist_checkpointing.save` wrote. Megatron picks its reader by metadata.json, so that
    one decides what is opened at all.
    """
    path = directory / CONFIG
    try:
        config = json.loads(read_bytes(path))
        is_known = isinstance(config, dict) and config.get("sharded_backend") == "torch_dist"
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {directory} is not a checkpoint.") from error
    if not is_known or any(_CONFIG.get(key) != value for key, value in config.items()):
        raise ValueError(f"{path} says {str(config)[:200]}; only {json.dumps(_CONFIG)} is read.")
    check_metadata(directory / METADATA)
    if (directory / COMMON).exists():
        check_common(directory / COMMON)


def apply() -> None:
    """Replace the readers once in this process. Imports megatron-core."""
    if not _state["is_applied"]:
        _state["is_applied"] = True
        apply_all(PATCHES)


def _read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    if kwargs.get("rank") is not None:
        raise ValueError(f"{self.path} has metadata for each rank; only checkpoints with one {METADATA} are read.")
    metadata = read_metadata(Path(self.path) / METADATA)
    metadata.storage_meta = StorageMeta(load_id=self.load_id)
    return metadata


def _load_bytes(self: DefaultLoadPlanner, read_item: Any, value: Any) -> None:
    """torch's own reads what was written here: the plain values of the object in the file."""
    rewritten = io.BytesIO()
    torch.save(read_plain(read_item.dest_index.fqn, value.read()), rewritten)
    rewritten.seek(0)
    _torch_load_bytes(self, read_item, rewritten)


def _load_common(self_or_directory: Any, checkpoint_dir: Any = None) -> Any:
    """A method in 0.16, a function later."""
    path = Path(self_or_directory if checkpoint_dir is None else checkpoint_dir) / COMMON
    if not path.exists():
        raise ValueError(f"{path.parent} has no {COMMON}; it was written with megatron-core 0.19: load it with that.")
    return read_plain(str(path), read_bytes(path))


def _replace_common() -> None:
    common: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    if hasattr(common, "TorchCommonLoadStrategy"):
        replace_symbol(common.TorchCommonLoadStrategy, "load_common", _load_common)
    else:
        serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
        replace_symbol(serialization, "load_common", _load_common)
        replace_symbol(common, "load_common", _load_common)


PATCHES = (
    Patch(
        "torch.distributed.checkpoint.FileSystemReader.read_metadata",
        "plain pickle.load: a checkpoint from elsewhere runs code before anything in it is looked at",
        lambda: replace_symbol(FileSystemReader, "read_metadata", _read_metadata),
    ),
    Patch(
        "torch.distributed.checkpoint.DefaultLoadPlanner.load_bytes",
        "torch.load(weights_only=False) of each object in a checkpoint; megatron-core 0.19 keeps its plain values so",
        lambda: replace_symbol(DefaultLoadPlanner, "load_bytes", _load_bytes),
    ),
    Patch(
        "dist_checkpointing.strategies.common.load_common",
        "torch.load with its default, which TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD in the environment makes a pickle.load",
        _replace_common,
    ),
)

_state = {"is_applied": False}
