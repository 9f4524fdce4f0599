"""Two sets of weights in one folder, a single file and shards: transformers loads the single file,
SGLang, vLLM and this package the shards. They must be equal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = "model-*-of-*.safetensors"
_PIECE_BYTES = 1 << 24  # compared at a time
_LONG_BYTES = 1 << 30  # of a set of weights whose comparison takes seconds
FileStats = tuple[tuple[Path, int, int], ...]
_EQUAL_SETS: set[tuple[FileStats, frozenset[str] | None]] = set()
"""The comparisons that found two equal sets: a process opens a directory several times."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file, and what it is."""

    path: Path
    dtype: str  # the format's name, such as "BF16"
    shape: tuple[int, ...]
    begin: int  # byte in the file
    end: int


def check_weight_sets(directory: Path, weight_map: Mapping[str, str] | None) -> None:
    """Check that a folder has one set of weights, or two whose tensors are equal. `weight_map`: the
    file of each tensor, as the index says; None where the folder has no index.

    Raise ValueError that names both sets where they differ, and for an index whose files are gone
    while the single file is there, with what to remove or fetch.
    """
    single = directory / SINGLE_FILE
    if not single.is_file():
        return
    if weight_map is None:
        shards = tuple(sorted(directory.glob(SHARD_PATTERN)))
        names = None
    else:
        shards = tuple(directory / name for name in sorted(set(weight_map.values())))
        names = frozenset(weight_map)
    if not shards or single in shards:
        return
    if weight_map is not None:
        _require_indexed_files(directory, weight_map, shards)
    comparison = (_stat_files((single, *shards)), names)
    if comparison in _EQUAL_SETS:
        return
    difference = _find_difference(single, shards, names)
    if difference is None:
        _EQUAL_SETS.add(comparison)
        return
    second = (
        f"{len(shards)} shards ({shards[0].name} and so on), which SGLang and vLLM load as well"
        if weight_map is None
        else f"{directory / INDEX} with {len(shards)} files, which SGLang and vLLM load"
    )
    raise ValueError(
        f"{directory} has two sets of weights that differ ({difference}): {single}, which"
        f" transformers loads, and {second}. Remove the set that is not the model:"
        f" {SINGLE_FILE}, or the shards and their index."
    )


def _require_indexed_files(
    directory: Path, weight_map: Mapping[str, str], files: tuple[Path, ...]
) -> None:
    """Raise ValueError where the index names files that are gone; the remedy depends on whether the
    single file has all tensors.
    """
    gone = [path.name for path in files if not path.is_file()]
    if not gone:
        return
    stored = set(read_stored_tensors(directory / SINGLE_FILE))
    num_stored = len(stored & set(weight_map))
    what = f"{directory / INDEX} names {len(gone)} files that are missing ({gone[0]} and so on)"
    if num_stored == len(weight_map):
        raise ValueError(
            f"{what}, but {directory / SINGLE_FILE} has all of its tensors: remove"
            f" {directory / INDEX} to read {SINGLE_FILE}, or fetch the files again."
        )
    raise ValueError(
        f"{what}, and {directory / SINGLE_FILE} has {num_stored} of its {len(weight_map)} tensors:"
        f" remove {SINGLE_FILE} and fetch {', '.join(gone[:8])} again."
    )


def _stat_files(paths: tuple[Path, ...]) -> FileStats:
    """Return path, size and time of change of each file, which tell whether a file is another."""
    stats = [(path, path.stat()) for path in paths]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _find_difference(
    single: Path, shards: Sequence[Path], indexed_names: frozenset[str] | None
) -> str | None:
    """Return the first difference between the tensors of a file and those of shards; None where
    they are equal. `indexed_names`: the tensors of the shards that count; None: all. Headers are
    compared first, then the bytes, piece by piece.
    """
    first = read_stored_tensors(single)
    second = {
        name: tensor
        for path in shards
        for name, tensor in read_stored_tensors(path).items()
        if indexed_names is None or name in indexed_names
    }
    for name in sorted(first.keys() ^ second.keys()):
        return f"{name} is in one of the two only"
    for name, one in first.items():
        other = second[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return (
                f"{name} is {one.dtype} {list(one.shape)} in {SINGLE_FILE} and"
                f" {other.dtype} {list(other.shape)} in {other.path.name}"
            )
    num_bytes = single.stat().st_size
    if num_bytes >= _LONG_BYTES:
        logger.info(
            "%s has two sets of weights, which are compared (%.1f GB); remove one of them to"
            " start sooner",
            single.parent,
            num_bytes / 1e9,
        )
    for name, one in first.items():
        if any(a != b for a, b in zip(_read_pieces(one), _read_pieces(second[name]), strict=True)):
            return f"{name} has other values in the two"
    return None


def read_stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, from its header. Raise ValueError for a file that
    is truncated or corrupt.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header should have {length} bytes")
            header = json.loads(file.read(length))
        tensors = {
            name: StoredTensor(
                path,
                str(entry["dtype"]),
                tuple(entry["shape"]),
                *(8 + length + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if any(tensor.end > size for tensor in tensors.values()):
            raise ValueError("tensors lie behind its end")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is truncated or corrupt: {error}. Fetch it again."
        ) from error
    return tensors


def _read_pieces(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the bytes of a tensor, some at a time."""
    with open(tensor.path, "rb") as file:
        file.seek(tensor.begin)
        for begin in range(tensor.begin, tensor.end, _PIECE_BYTES):
            yield file.read(min(_PIECE_BYTES, tensor.end - begin))
