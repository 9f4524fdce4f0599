"""Reads what torch and megatron-core pickle into a checkpoint without unpickling it: no
stranger's code can run.

`.metadata` of a torch distributed checkpoint is a plain pickle, which torch hands to `pickle.load`;
`common.pt` holds plain values. Here every global that a file names must be on a list, and even
those are not fetched: the pickle is replayed over inert stand-ins, which are then checked field by
field and made into torch's objects.

`PATCHES` lists what is replaced in torch and megatron-core, so that they read checkpoints this way.
The reader is our own: `torch.load(weights_only=True)` could take over common.pt, but not .metadata,
and it would let tensors through.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import pickle
import stat
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf_megatron.mcore_patch import (
    MegatronPatch,
    apply_needed_patches,
    replace_symbol,
)

Kind = TypeVar("Kind")
# of a file that is parsed; a .metadata of a million tensor parts has about 0.3 GiB
MAX_BYTES = 2 << 30
# where megatron-core 0.19 keeps what 0.16 writes to common.pt
COMMON_KEY = "common_state/shard_0_1"

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_METADATA_GLOBALS = frozenset(
    [
        # how Python 3.11.0 to 3.11.3 write a member of an enum; nothing is looked up for it, either
        *("builtins.getattr", "__builtin__.getattr"),
        "pathlib.PosixPath",  # where the checkpoint was written
        "pathlib._local.PosixPath",  # the same, from Python 3.13 on
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"torch.{dtype}" for dtype in _DTYPES),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                *(
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorStorageMetadata",
                    "BytesStorageMetadata",
                ),
                *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            )
        ),
        # megatron keeps the plans of its writers; they are dropped
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
        ),
    ]
)

METADATA = ".metadata"
COMMON = "common.pt"
CONFIG = "metadata.json"

_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def read_checkpoint_metadata(path: Path, allows_pickled_objects: bool = False) -> Metadata:
    """Return the `.metadata` of a torch distributed checkpoint, as far as loading tensors needs it,
    without unpickling it.

    `allows_pickled_objects`: accept entries for pickled objects beside the tensors, as other
    programs write them, and leave them out; else such an entry raises. The file is read once, so
    that the bytes that were checked are the bytes that are used. Raise ValueError for anything
    unexpected, FileNotFoundError where there is no file.
    """
    parsed = _replay_pickle(str(path), read_plain_file(path), _METADATA_GLOBALS)
    try:
        return _build_metadata(parsed, allows_pickled_objects)
    except Exception as error:  # a hostile file may hold anything anywhere
        raise ValueError(
            f"{path} is no metadata of a checkpoint that is loaded here: {error}."
        ) from error


def read_plain_values(file_name: str, data: bytes) -> Any:
    """Return the numbers, strings, lists and dicts that `torch.save` wrote into `data`. Raise
    ValueError for any other content. `file_name` is for messages.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [
                info
                for info in archive.infolist()
                if PurePosixPath(info.filename).name == "data.pkl"
            ]
            # torch.save does not compress
            if len(members) != 1 or members[0].file_size > len(data):
                raise ValueError(
                    f"{file_name} is no file that torch.save wrote (one data.pkl, stored as it is)."
                )
            pickled = archive.read(members[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file_name} is no file that torch.save wrote: {error}.") from error
    return _replay_pickle(file_name, pickled, frozenset())


def read_plain_file(path: Path) -> bytes:
    """Return the bytes of a plain file of at most `MAX_BYTES`. Raise ValueError for a link, a
    device or a larger file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path} is a link; a checkpoint holds plain files only.") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise ValueError(
                f"{path} ({found.st_size} bytes) must be a plain file of at most {MAX_BYTES} bytes."
            )
        return file.read(MAX_BYTES)


class _InertObject:
    """Stands for an object of a class that is never looked up: remembers what it was called
    with and given.
    """

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _InertObject:
        """Make the stand-in and keep the arguments."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the pickled state; nothing is run."""
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Gives a fresh stand-in class for each allowed global, so that nothing of this process
    can be changed.
    """

    def __init__(self, file_name: str, data: bytes, allowed_globals: frozenset[str]) -> None:
        """Read `data`; `file_name` is for messages."""
        super().__init__(io.BytesIO(data))
        self._file_name = file_name
        self._allowed_globals = allowed_globals
        self._stand_in_classes = dict[str, type]()

    def find_class(self, module: str, name: str) -> type:
        """Return a stand-in class for an allowed global, never the real one. Raise ValueError for
        any other global.
        """
        global_name = f"{module}.{name}"
        if global_name not in self._allowed_globals:
            raise ValueError(
                f"{self._file_name} names {global_name}, which no checkpoint of this trainer"
                " holds: it may run code when it is loaded, and was not. Take a checkpoint from a"
                " source that you trust."
            )
        if global_name not in self._stand_in_classes:
            self._stand_in_classes[global_name] = type(
                "StandIn", (_InertObject,), {"kind": global_name}
            )
        return self._stand_in_classes[global_name]

    def persistent_load(self, identifier: Any) -> Any:
        """Raise ValueError: the pickle refers to stored tensors, which are not allowed here."""
        raise ValueError(
            f"{self._file_name} refers to stored tensors ({str(identifier)[:80]}); it must hold"
            " plain values."
        )


def _replay_pickle(file_name: str, data: bytes, allowed_globals: frozenset[str]) -> Any:
    """Return the pickled value with stand-ins for objects of `allowed_globals`. Raise ValueError
    for a broken pickle and for any other global.
    """
    try:
        return _InertUnpickler(file_name, data, allowed_globals).load()
    except ValueError:
        raise
    except (
        Exception
    ) as error:  # a broken pickle fails in any way: EOFError, KeyError, UnpicklingError, ...
        raise ValueError(f"{file_name} is broken: {type(error).__name__}: {error}.") from error


# From stand-ins to torch's objects. Each step takes exactly the types that torch writes.


def _build_metadata(replayed_metadata: Any, allows_pickled_objects: bool) -> Metadata:
    """Return torch's Metadata made from the stand-ins; check the type of every field. Pickled
    objects are dropped where they are allowed. Raise ValueError for a field of another type.
    """
    fields = _read_object_fields(replayed_metadata, "Metadata")
    entries = _require_exact_type(fields["state_dict_metadata"], dict, "state_dict_metadata")
    storage = _require_exact_type(fields["storage_data"], dict, "storage_data")
    if allows_pickled_objects:
        entries = {
            key: entry
            for key, entry in entries.items()
            if not _is_instance_of(entry, "BytesStorageMetadata")
        }
    return Metadata(
        {
            _require_exact_type(key, str, "a key"): _build_storage_metadata(key, entry)
            for key, entry in entries.items()
        },
        planner_data=None,  # how nested states were flattened: megatron's are flat
        storage_data=dict(_build_storage_location(index, info) for index, info in storage.items()),
        storage_meta=StorageMeta(),
        version=None
        if fields.get("version") is None
        else _require_exact_type(fields["version"], str, "version"),
    )


def _build_storage_metadata(key: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """Return the metadata of one entry: a tensor, or the common state that megatron-core 0.19
    pickles. Raise ValueError for any other pickled object.
    """
    if _is_instance_of(entry, "BytesStorageMetadata"):
        if key != COMMON_KEY:
            raise ValueError(f"{key} is a pickled object; only tensors are read")
        return BytesStorageMetadata()
    fields = _read_object_fields(entry, "TensorStorageMetadata")
    size = _build_torch_size(fields["size"])
    chunks = [
        _build_chunk_metadata(key, chunk, size)
        for chunk in _require_exact_type(fields["chunks"], list, "chunks")
    ]
    return TensorStorageMetadata(_build_tensor_properties(fields["properties"]), size, chunks)


def _build_chunk_metadata(key: str, chunk: Any, tensor_size: torch.Size) -> ChunkStorageMetadata:
    """Return offsets and sizes of one part of a tensor. Raise ValueError for a part outside of the
    tensor.
    """
    fields = _read_object_fields(chunk, "ChunkStorageMetadata")
    offsets = _build_torch_size(fields["offsets"])
    sizes = _build_torch_size(fields["sizes"])
    if (
        len(offsets) != len(tensor_size)
        or len(sizes) != len(tensor_size)
        or any(
            start + length > whole
            for start, length, whole in zip(offsets, sizes, tensor_size, strict=True)
        )
    ):
        raise ValueError(
            f"{key} has a part {tuple(sizes)} at {tuple(offsets)} outside of its"
            f" shape {tuple(tensor_size)}"
        )
    return ChunkStorageMetadata(offsets, sizes)


def _build_tensor_properties(value: Any) -> TensorProperties:
    """Return the type and flags of a tensor; layout and memory format, deprecated in torch, are
    left out. Raise ValueError for a type that is not supported.
    """
    if not _is_instance_of(value, "TensorProperties"):
        raise ValueError("tensor properties of another type")
    dtype, _, requires_grad, _, is_pinned = _require_exact_type(
        value.state, tuple, "tensor properties"
    )
    name = dtype.kind if isinstance(dtype, type) and issubclass(dtype, _InertObject) else ""
    if name.removeprefix("torch.") not in _DTYPES:
        raise ValueError(f"a tensor of type {name or dtype!r}")
    return TensorProperties(
        dtype=getattr(torch, name.removeprefix("torch.")),
        requires_grad=_require_exact_type(requires_grad, bool, "requires_grad"),
        pin_memory=_require_exact_type(is_pinned, bool, "pin_memory"),
    )


def _build_storage_location(index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """Return (index, place) of one part of a tensor: the span of a plain *.distcp file beside
    `.metadata`. Raise ValueError for a path that leaves the directory and for transformed data.
    """
    at = _read_object_fields(index, "MetadataIndex")
    stored = _read_object_fields(info, "_StorageInfo")
    file = _require_exact_type(stored["relative_path"], str, "relative_path")
    if PurePosixPath(file).name != file or not file.endswith(".distcp"):
        raise ValueError(
            f"it names the file {file!r}; data lies in plain *.distcp files of the same directory"
        )
    if stored.get("transform_descriptors") is not None:
        raise ValueError(
            f"{file} is transformed by {stored['transform_descriptors']!r}, which is not read"
        )
    return (
        MetadataIndex(
            _require_exact_type(at["fqn"], str, "a key"),
            None if at.get("offset") is None else _build_torch_size(at["offset"]),
            None if at.get("index") is None else _require_count(at["index"]),
        ),
        _StorageInfo(file, _require_count(stored["offset"]), _require_count(stored["length"])),
    )


def _build_torch_size(value: Any) -> torch.Size:
    """Return the torch.Size that a stand-in stands for. Raise ValueError for anything else."""
    if not _is_instance_of(value, "Size") or len(value.args) != 1:
        raise ValueError("a shape of another type")
    return torch.Size(
        [_require_count(number) for number in _require_exact_type(value.args[0], tuple, "a shape")]
    )


def _require_count(value: Any) -> int:
    """Return the value if it is an int of at least 0 and below 2^62, else raise ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} where a count belongs")
    return value


def _read_object_fields(value: Any, class_name: str) -> dict[str, Any]:
    """Return the fields of a stand-in for `class_name`. Raise ValueError for another class."""
    if not _is_instance_of(value, class_name):
        raise ValueError(
            f"{getattr(value, 'kind', type(value).__name__)} where {class_name} belongs"
        )
    return _require_exact_type(value.state, dict, class_name)


def _is_instance_of(value: Any, class_name: str) -> bool:
    """Return whether the value is a stand-in for a class of this name, in any module."""
    return isinstance(value, _InertObject) and value.kind.rpartition(".")[2] == class_name


def _require_exact_type(value: Any, expected_type: type[Kind], value_label: str) -> Kind:
    """Return the value if its type is exactly `expected_type`, no subclass; else raise
    ValueError.
    """
    if type(value) is not expected_type:
        raise ValueError(f"{value_label} is {type(value).__name__}, not {expected_type.__name__}")
    return value


_torch_load_bytes = DefaultLoadPlanner.load_bytes


def check_checkpoint_directory(directory: Path) -> None:
    """Check that everything that a load parses in `directory`, which megatron's
    `dist_checkpointing.save` wrote, is of the expected kind. Raise ValueError that names the file
    that is not.
    """
    check_torch_dist_format(directory)
    read_checkpoint_metadata(directory / METADATA)
    if (path := directory / COMMON).exists():
        read_plain_values(str(path), read_plain_file(path))


def check_torch_dist_format(directory: Path) -> None:
    """Raise ValueError unless metadata.json names the format torch_dist in a known version:
    megatron picks its reader by that file.
    """
    path = directory / CONFIG
    try:
        config = json.loads(read_plain_file(path))
        is_known = isinstance(config, dict) and config.get("sharded_backend") == "torch_dist"
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; {directory} is not a checkpoint."
        ) from error
    if not is_known or any(_CONFIG.get(key) != value for key, value in config.items()):
        raise ValueError(f"{path} says {str(config)[:200]}; only {json.dumps(_CONFIG)} is read.")


def patch_checkpoint_readers() -> None:
    """Replace torch's and megatron-core's readers by the safe ones, once in this process. Imports
    megatron-core.
    """
    if not _state["is_applied"]:
        _state["is_applied"] = True
        apply_needed_patches(PATCHES)


def _patched_read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """Return the metadata of the checkpoint without unpickling it. Raise ValueError for metadata
    for each rank.
    """
    if kwargs.get("rank") is not None:
        raise ValueError(
            f"{self.path} has metadata for each rank; only checkpoints with one"
            f" {METADATA} are read."
        )
    metadata = read_checkpoint_metadata(Path(self.path) / METADATA)
    metadata.storage_meta = StorageMeta(load_id=self.load_id)
    return metadata


def _patched_load_bytes(self: DefaultLoadPlanner, read_item: Any, value: Any) -> None:
    """Check that an object in a checkpoint is plain values, write it anew, and let torch load the
    rewritten bytes.
    """
    rewritten = io.BytesIO()
    torch.save(read_plain_values(read_item.dest_index.fqn, value.read()), rewritten)
    rewritten.seek(0)
    _torch_load_bytes(self, read_item, rewritten)


def _patched_load_common(self_or_directory: Any, checkpoint_dir: Any = None) -> Any:
    """Return the plain values of common.pt in a checkpoint directory. Raise ValueError where there
    is no such file. Works as the method of megatron-core 0.16 and as the function of later
    versions.
    """
    path = Path(self_or_directory if checkpoint_dir is None else checkpoint_dir) / COMMON
    if not path.exists():
        raise ValueError(
            f"{path.parent} has no {COMMON}; it was written with megatron-core 0.19: load"
            " it with that."
        )
    return read_plain_values(str(path), read_plain_file(path))


def _patch_load_common() -> None:
    """Replace megatron-core's `load_common` wherever the installed version has it."""
    common: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    if hasattr(common, "TorchCommonLoadStrategy"):
        replace_symbol(common.TorchCommonLoadStrategy, "load_common", _patched_load_common)
    else:
        serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
        replace_symbol(serialization, "load_common", _patched_load_common)
        replace_symbol(common, "load_common", _patched_load_common)


PATCHES = (
    MegatronPatch(
        "torch.distributed.checkpoint.FileSystemReader.read_metadata",
        (
            "plain pickle.load: a checkpoint from elsewhere runs code before anything in it"
            " is looked at"
        ),
        lambda: replace_symbol(FileSystemReader, "read_metadata", _patched_read_metadata),
    ),
    MegatronPatch(
        "torch.distributed.checkpoint.DefaultLoadPlanner.load_bytes",
        (
            "torch.load(weights_only=False) of each object in a checkpoint; megatron-core 0.19"
            " keeps its plain values so"
        ),
        lambda: replace_symbol(DefaultLoadPlanner, "load_bytes", _patched_load_bytes),
    ),
    MegatronPatch(
        "dist_checkpointing.strategies.common.load_common",
        (
            "torch.load with its default, which TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD in the environment"
            " makes a pickle.load"
        ),
        _patch_load_common,
    ),
)

_state = {"is_applied": False}
