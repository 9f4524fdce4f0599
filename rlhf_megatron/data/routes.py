"""Files in which engines write which experts the tokens of a sample met, and ranks read it: the bytes, up to 960 a
token, pass no controller. A file is an array of numpy's, [tokens, layers x experts of a token] of one byte or two, in
the order of the sample's tokens, prompt first, without the last one, which nothing has read. Its layers are those with
experts, or all of the model. Its name ends with a digest of them.

A handle is the path of a file, or HOST:PORT and the path where a process on its machine hands out what others do not
see (`runtime.route_store`)."""

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

STORE_ENV = "RLHF_MEGATRON_ROUTE_STORE"  # HOST:PORT of this machine's store, in processes that write
Ids = np.ndarray[Any, np.dtype[Any]]
RESERVE = 1 << 30  # bytes of a disk that files of routes leave, or a twentieth of it where that is less
_LIBC = ctypes.CDLL(None)
_HEADER = 128  # bytes of a file before its ids
_WRITERS = 16  # a process counts a folder again when it has written this part of what was left
_free_of_count: dict[str, int] = {}  # by folder: bytes until then


@dataclass(frozen=True)
class Selected:
    """A part of a file."""

    num_tokens: int  # of the whole file
    ids: Ids  # [those of the positions that are below num_tokens, layers, top_k]
    num_fetched: int = 0  # bytes that came from another machine


@codec.register
@dataclass(frozen=True)
class Held:
    """Counts what stands in a folder, in bytes."""

    num_bytes: int = 0
    in_memory: int = 0  # of these the kernel has in memory; the others are on disk alone
    most: int = 0  # that may stand there before its disk is full


class Elsewhere(Protocol):
    """Stores of other machines. `address`: HOST:PORT. `names`: paths there."""

    def select(self, address: str, name: str, positions: Ids, layers_of: Mapping[int, Ids], top_k: int) -> Selected: ...
    def are_there(self, address: str, names: Sequence[str]) -> bool: ...
    def remove(self, address: str, names: Sequence[str], are_trained: bool) -> None: ...
    def held(self, address: str) -> Held: ...


elsewhere: Elsewhere | None = None  # set once in each process of a run that may see handles of other machines


def write_routes(directory: str, ids: Ids, most_bytes: int = 0) -> str:
    """The handle of a new file with `ids` [tokens, ...], of whatever integers. It appears whole. Makes the directory,
    whose files together keep to `most_bytes`; 0: to their disk alone. Raises OSError with what to do about it."""
    folder = Path(directory)
    compact = ids.reshape(len(ids), -1).astype(np.uint8 if ids.max(initial=0) < 256 else np.int16)
    path = folder / f"{uuid.uuid4().hex}-{zlib.crc32(compact.tobytes()):08x}.npy"
    aside = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, compact.nbytes, most_bytes)
        with open(aside, "wb") as file:
            np.save(file, compact, allow_pickle=False)
        os.replace(aside, path)
    except OSError as error:
        raise OSError(
            f"{folder} does not take which experts a sample met ({error.strerror or error}): make room there, or use"
            " actor.router_replay: r2, which writes no files."
        ) from error
    return os.environ.get(STORE_ENV, "") + str(path)


def _check_room(folder: Path, num_bytes: int, most_bytes: int) -> None:
    """Raises OSError where so many bytes are too many."""
    if _free(folder) < num_bytes:
        free = shutil.disk_usage(folder).free
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free, and the journal and checkpoints need some")
    num_bytes += _HEADER
    if most_bytes and num_bytes > _free_of_count.get(str(folder), 0):
        count = sum(_sizes(folder).values())
        if count + num_bytes > most_bytes:
            words = f"{count / 1e9:.3g} GB stand there, of {most_bytes / 1e9:.3g} that may (rollout.routes_gb)"
            raise OSError(errno.ENOSPC, f"{words}; raise it, or save more often, since what was saved goes")
        _free_of_count[str(folder)] = (most_bytes - count) // _WRITERS
    if most_bytes:
        _free_of_count[str(folder)] -= num_bytes


def _free(folder: Path) -> int:
    """Bytes that files of routes may still take of a disk."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(RESERVE, disk.total // 20)


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # it goes meanwhile
                sizes[entry.path] = entry.stat().st_size
    return sizes


def held(folder: Path) -> Held:
    """Return what stands in a folder of this machine."""
    sizes = _sizes(folder) if folder.is_dir() else {}
    count = sum(sizes.values())
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    in_memory = sum(_in_memory(path, size) for path, size in sizes.items() if size)
    return Held(count, in_memory, max(0, count + _free(there)))


def _in_memory(path: str, size: int) -> int:
    try:
        with open(path, "rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):  # it goes meanwhile
        return 0
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)  # the lowest bit of a page says whether it is there
    start, pages = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_void_p(flags.ctypes.data)
    _LIBC.mincore(start, ctypes.c_size_t(size), pages)
    return min(size, int((flags & 1).sum()) * mmap.PAGESIZE)


def place_of(handle: str) -> tuple[str, str]:
    """(HOST:PORT of the store, or "", path)."""
    address, slash, rest = handle.partition("/")
    return address, slash + rest


def select_routes(handle: str, positions: Ids, layers_of: Mapping[int, Ids], top_k: int) -> Selected:
    """The tokens at `positions` of a file, from the store of its machine where this one does not see it. `layers_of`:
    by the layers that a file may have, those that are wanted. Raises ValueError as `read_routes` does."""
    address, name = place_of(handle)
    if address and elsewhere is not None and not Path(name).is_file():
        return elsewhere.select(address, name, positions, layers_of, top_k)
    found = read_routes(name, tuple(layers_of), top_k)
    return Selected(len(found), found[positions[positions < len(found)][:, None], layers_of[found.shape[1]]])


def read_routes(name: str, num_layers: Sequence[int], top_k: int) -> Ids:
    """[tokens, one of `num_layers`, top_k], mapped, not read. Raises ValueError for a file that is missing, cut
    off or of another model."""
    if not Path(name).is_file():
        raise ValueError(
            f"{name}, where an engine wrote which experts a sample met, is not there: engines and ranks must see one"
            " file system, and nothing but the run may remove it. Or use actor.router_replay: r2."
        )
    try:
        ids: Ids = np.load(name, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{name} does not hold any more which experts a sample met ({error}). The same command goes on from the"
            " last checkpoint, and generates again what is lost."
        ) from error
    if ids.ndim != 2 or ids.shape[1] not in [number * top_k for number in num_layers]:
        layers = " or ".join(map(str, num_layers))
        raise ValueError(f"{name} has ids of shape {ids.shape}, not [tokens, {layers} layers x {top_k}].")
    return ids.reshape(len(ids), -1, top_k)


def check_ids(name: str, ids: Ids, num_experts: int) -> None:
    """Raises ValueError for an expert that a layer does not have: as a smaller type its id would be another one's."""
    if (highest := int(ids.max(initial=0))) >= num_experts:
        raise ValueError(f"{name} names expert {highest}, and a layer has {num_experts}: it is of another model.")


def are_there(handles: Iterable[str]) -> bool:
    """Whether all of these files can be read and hold what was written. One that a machine's end has cut off does not;
    a machine that does not answer has none."""
    names_at = by_address(handles)
    return all(_is_whole(name) for name in names_at.pop("", [])) and all(
        elsewhere is not None and elsewhere.are_there(address, names) for address, names in names_at.items()
    )


def remove_routes(handles: Iterable[str], are_trained: bool = False) -> None:
    """Remove files, those that are there. `are_trained`: a step is over that trained on them, so that its journal was
    read: stores then remove what a former process has left and nobody has asked for."""
    for address, names in by_address(handles).items():
        if address:
            if elsewhere is not None:
                elsewhere.remove(address, names, are_trained)
            continue
        for name in names:
            Path(name).unlink(missing_ok=True)


def by_address(handles: Iterable[str]) -> dict[str, list[str]]:
    """Files that this machine sees have the address ""."""
    found: dict[str, list[str]] = {}
    for handle in handles:
        if handle:
            address, name = place_of(handle)
            found.setdefault("" if elsewhere is None or Path(name).is_file() else address, []).append(name)
    return found


def _is_whole(name: str) -> bool:
    try:
        ids: Ids = np.load(name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    _, dash, digest = Path(name).stem.partition("-")
    return not dash or f"{zlib.crc32(ids.tobytes()):08x}" == digest
