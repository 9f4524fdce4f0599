"""Files in which engines write which experts the tokens of a sample met, and ranks read it: the
bytes, up to 960 a token, pass no controller. A file is an array of numpy's, [tokens, layers x
experts of a token] of one byte or two, in the order of the sample's tokens, prompt first, without
the last one, which nothing has read. Its layers are those with experts, or all of the model. Its
name ends with a digest of them.

A handle is the path of a file, or HOST:PORT and the path where a process on its machine hands out
what others do not see (`runtime.route_store`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhf_megatron.data import codec

# HOST:PORT of this machine's store, in processes that write
STORE_ENV = "RLHF_MEGATRON_ROUTE_STORE"
ExpertIds = np.ndarray[Any, np.dtype[Any]]
# bytes of a disk that files of routes leave, or a twentieth of it where that is less
RESERVED_DISK_BYTES = 1 << 30
_LIBC = ctypes.CDLL(None)
_HEADER_BYTES = 128  # bytes of a file before its ids
# a process counts a folder again when it has written this part of what was left
_RECOUNT_FRACTION = 16
_bytes_until_recount: dict[str, int] = {}  # by folder: bytes until then


@dataclass(frozen=True)
class SelectedRoutes:
    """The expert ids of some tokens of a file."""

    num_tokens: int  # of the whole file
    ids: ExpertIds  # [those of the positions that are below num_tokens, layers, top_k]
    num_fetched: int = 0  # bytes that came from another machine


@codec.register("Held", {"num_resident_bytes": "in_memory", "max_bytes": "most"})
@dataclass(frozen=True)
class RouteStorageUsage:
    """Counts what stands in a folder, in bytes."""

    num_bytes: int = 0
    num_resident_bytes: int = 0  # of these the kernel has in memory; the others are on disk alone
    max_bytes: int = 0  # that may stand there before its disk is full


class RemoteRouteStores(Protocol):
    """Stores of other machines. `address`: HOST:PORT. `names`: paths there."""

    def select_routes(
        self,
        address: str,
        path: str,
        positions: ExpertIds,
        layers_by_count: Mapping[int, ExpertIds],
        top_k: int,
    ) -> SelectedRoutes:
        """Return the expert ids at `positions` of a file there, as `select_routes` does."""

    def has_intact_routes(self, address: str, paths: Sequence[str]) -> bool:
        """Return whether all files there hold the ids that were written; False without an
        answer.
        """

    def remove_route_files(self, address: str, paths: Sequence[str], is_step_trained: bool) -> None:
        """Remove these files there; see the function `remove_route_files` for `is_step_trained`."""

    def measure_storage(self, address: str) -> RouteStorageUsage:
        """Return the bytes that the store's folder holds."""


# set once in each process of a run that may see handles of other machines
remote_route_stores: RemoteRouteStores | None = None


def write_route_file(directory: str, ids: ExpertIds, max_bytes: int = 0) -> str:
    """Write `ids` [tokens, ...], integers of any type, to a new file in `directory`, in one step,
    and return its handle. Make the directory. `max_bytes`: the limit on the bytes of all its files;
    0: only the disk limits. Raise OSError, with advice, where there is no room.
    """
    folder = Path(directory)
    compact = ids.reshape(len(ids), -1).astype(np.uint8 if ids.max(initial=0) < 256 else np.int16)
    path = folder / f"{uuid.uuid4().hex}-{zlib.crc32(compact.tobytes()):08x}.npy"
    aside = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_free_space(folder, compact.nbytes, max_bytes)
        with open(aside, "wb") as file:
            np.save(file, compact, allow_pickle=False)
        os.replace(aside, path)
    except OSError as error:
        raise OSError(
            f"{folder} does not take which experts a sample met ({error.strerror or error}): make"
            " room there, or use actor.router_replay: r2, which writes no files."
        ) from error
    return os.environ.get(STORE_ENV, "") + str(path)


def _check_free_space(folder: Path, num_bytes: int, max_bytes: int) -> None:
    """Raise OSError where a file of so many bytes would leave too little of the disk, or would take
    the folder over `max_bytes`.
    """
    if _count_free_bytes(folder) < num_bytes:
        free = shutil.disk_usage(folder).free
        raise OSError(
            errno.ENOSPC, f"{free >> 20} MiB are free, and the journal and checkpoints need some"
        )
    num_bytes += _HEADER_BYTES
    if max_bytes and num_bytes > _bytes_until_recount.get(str(folder), 0):
        count = sum(_read_file_sizes(folder).values())
        if count + num_bytes > max_bytes:
            words = (
                f"{count / 1e9:.3g} GB stand there, of {max_bytes / 1e9:.3g} that"
                " may (rollout.routes_gb)"
            )
            raise OSError(
                errno.ENOSPC, f"{words}; raise it, or save more often, since what was saved goes"
            )
        _bytes_until_recount[str(folder)] = (max_bytes - count) // _RECOUNT_FRACTION
    if max_bytes:
        _bytes_until_recount[str(folder)] -= num_bytes


def _count_free_bytes(folder: Path) -> int:
    """Return the bytes that route files may still take on a folder's disk."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(RESERVED_DISK_BYTES, disk.total // 20)


def _read_file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder, by path."""
    sizes = {}
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # it goes meanwhile
                sizes[entry.path] = entry.stat().st_size
    return sizes


def measure_route_storage(folder: Path) -> RouteStorageUsage:
    """Return the bytes that a folder of this machine holds, how many of them are in memory, and how
    many it may hold.
    """
    sizes = _read_file_sizes(folder) if folder.is_dir() else {}
    count = sum(sizes.values())
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    in_memory = sum(_count_resident_bytes(path, size) for path, size in sizes.items() if size)
    return RouteStorageUsage(count, in_memory, max(0, count + _count_free_bytes(there)))


def _count_resident_bytes(path: str, size: int) -> int:
    """Return how many of a file's bytes the kernel has in memory; 0 where the file is gone."""
    try:
        with open(path, "rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):  # it goes meanwhile
        return 0
    # the lowest bit of a page says whether it is there
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    start = ctypes.c_void_p(mapped.ctypes.data)
    pages = ctypes.c_void_p(flags.ctypes.data)
    _LIBC.mincore(start, ctypes.c_size_t(size), pages)
    return min(size, int((flags & 1).sum()) * mmap.PAGESIZE)


def split_route_handle(handle: str) -> tuple[str, str]:
    """Split a handle into (HOST:PORT of the store, or "", path)."""
    address, slash, rest = handle.partition("/")
    return address, slash + rest


def select_routes(
    handle: str, positions: ExpertIds, layers_by_count: Mapping[int, ExpertIds], top_k: int
) -> SelectedRoutes:
    """Return the expert ids at the token `positions` of a file, read from the store of its machine
    where this machine does not see the file. `layers_by_count`: which layers to return, by the
    number of layers that the file has. Raise ValueError as `map_route_file` does.
    """
    address, name = split_route_handle(handle)
    if address and remote_route_stores is not None and not Path(name).is_file():
        return remote_route_stores.select_routes(address, name, positions, layers_by_count, top_k)
    found = map_route_file(name, tuple(layers_by_count), top_k)
    return SelectedRoutes(
        len(found),
        found[positions[positions < len(found)][:, None], layers_by_count[found.shape[1]]],
    )


def map_route_file(path: str, layer_counts: Sequence[int], top_k: int) -> ExpertIds:
    """Return the expert ids of a file, [tokens, one of `layer_counts`, top_k], mapped and not read.
    Raise ValueError for a file that is missing, cut off or of another model.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"{path}, where an engine wrote which experts a sample met, is not there: engines and"
            " ranks must see one file system, and nothing but the run may remove it. Or use"
            " actor.router_replay: r2."
        )
    try:
        ids: ExpertIds = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} does not hold any more which experts a sample met ({error}). The same command"
            " goes on from the last checkpoint, and generates again what is lost."
        ) from error
    if ids.ndim != 2 or ids.shape[1] not in [number * top_k for number in layer_counts]:
        layers = " or ".join(map(str, layer_counts))
        raise ValueError(
            f"{path} has ids of shape {ids.shape}, not [tokens, {layers} layers x {top_k}]."
        )
    return ids.reshape(len(ids), -1, top_k)


def check_expert_ids(source_name: str, ids: ExpertIds, num_experts: int) -> None:
    """Raise ValueError for an expert id that a layer does not have: in a smaller type it would
    become the id of another expert.
    """
    if (highest := int(ids.max(initial=0))) >= num_experts:
        raise ValueError(
            f"{source_name} names expert {highest}, and a layer has {num_experts}: it is of"
            " another model."
        )


def has_intact_routes(handles: Iterable[str]) -> bool:
    """Return whether all of these files can be read and hold the ids that were written. A file that
    a machine's crash has cut off does not; for a machine that does not answer the result is False.
    """
    names_at = group_paths_by_address(handles)
    return all(_is_file_intact(name) for name in names_at.pop("", [])) and all(
        remote_route_stores is not None and remote_route_stores.has_intact_routes(address, names)
        for address, names in names_at.items()
    )


def remove_route_files(handles: Iterable[str], is_step_trained: bool = False) -> None:
    """Remove these files, as far as they exist. `is_step_trained`: a step that trained on them is
    over, so that its journal was read; stores then also remove files that a former process left and
    that were never read.
    """
    for address, names in group_paths_by_address(handles).items():
        if address:
            if remote_route_stores is not None:
                remote_route_stores.remove_route_files(address, names, is_step_trained)
            continue
        for name in names:
            Path(name).unlink(missing_ok=True)


def group_paths_by_address(handles: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths by the address of their store; files that this machine sees have the address
    "".
    """
    found: dict[str, list[str]] = {}
    for handle in handles:
        if handle:
            address, name = split_route_handle(handle)
            found.setdefault(
                "" if remote_route_stores is None or Path(name).is_file() else address, []
            ).append(name)
    return found


def _is_file_intact(path: str) -> bool:
    """Return whether a file of expert ids can be loaded and, where its name ends in a digest, its
    ids have that digest.
    """
    try:
        ids: ExpertIds = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    _, dash, digest = Path(path).stem.partition("-")
    return not dash or f"{zlib.crc32(ids.tobytes()):08x}" == digest
