"""megatron-core's torch_dist directory, written and read part by part: no model, no process group, nothing unpickled.

A part of a tensor is one archive as `torch.save` writes it (a zip whose members are stored), and `.metadata` says in
which file and where each lies. How long an archive is follows from shape and type, so every part has its place before
the first one is written.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf_megatron.checkpoint.safe_pickle import COMMON, CONFIG, METADATA

ALIGNMENT = 64  # bytes, of archives in a file and of the data in one
_DATE = 0x21  # 1980-01-01, as torch writes it
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
_DATA = "archive/data/0"


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and the archive that holds it."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box
    sizes: tuple[int, ...]
    dtype: str  # "bfloat16"
    file: str
    start: int  # of the archive, bytes
    length: int


@dataclass(frozen=True)
class Frame:
    """Holds the bytes that stand before and behind the data of an archive."""

    members: tuple[tuple[str, bytes], ...]
    num_bytes: int  # of the data

    def before(self, crc: int) -> bytes:
        """Return the bytes before the data, whose checksum is `crc`."""
        text = b""
        for name, content in self.members:
            text += self._local(name, len(text), zlib.crc32(content), len(content)) + content
        return text + self._local(_DATA, len(text), crc, self.num_bytes)

    def after(self, crc: int) -> bytes:
        """Return the bytes behind the data: the directory of the archive."""
        entries, at = b"", 0
        for name, length, check in [
            *((n, len(c), zlib.crc32(c)) for n, c in self.members),
            (_DATA, self.num_bytes, crc),
        ]:
            fixed = (b"PK\x01\x02", 0, 0, 0, 0, 0, _DATE, check, length, length, len(name), 0, 0, 0, 0, 0, at)
            entries += _CENTRAL.pack(*fixed) + name.encode()
            at += len(self._local(name, at, 0, 0)) + length
        count = len(self.members) + 1
        return entries + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(entries), at, 0)

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return len(self.before(0)) + self.num_bytes + len(self.after(0))

    @staticmethod
    def _local(name: str, at: int, crc: int, length: int) -> bytes:
        """The header of a member at `at`, padded so that what follows is aligned."""
        padding = -(at + _LOCAL.size + len(name) + 4) % ALIGNMENT
        fixed = (b"PK\x03\x04", 0, 0, 0, 0, _DATE, crc, length, length, len(name), 4 + padding)
        return _LOCAL.pack(*fixed) + name.encode() + struct.pack("<2sH", b"FB", padding) + b"Z" * padding


@lru_cache(maxsize=4096)
def frame_of(shape: tuple[int, ...], dtype: str) -> Frame:
    """The archive of a tensor of that shape, of less than 4 GiB."""
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))  # its memory is never touched
    assert tensor.nbytes < 1 << 32, f"a part of {tensor.nbytes} bytes"
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(tensor)
    little = (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n"))
    return Frame(tuple((f"archive/{name}", content) for name, content in little), tensor.nbytes)


class _Pickler(pickle.Pickler):
    """Names the only storage as `torch.save` does."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        kind = getattr(torch, value._pickle_storage_type())
        return ("storage", kind, "0", "cpu", value._size())


def publish(directory: Path, parts: Iterable[Part]) -> None:
    """Write the files that make a directory of archives a checkpoint; `.metadata`, without which it is none, last."""
    entries: dict[str, Any] = {}
    places = {}
    for part in parts:
        if part.key not in entries:
            properties = TensorProperties(dtype=getattr(torch, part.dtype))
            entries[part.key] = TensorStorageMetadata(properties, torch.Size(part.shape), [])
        chunks, offsets = entries[part.key].chunks, torch.Size(part.offsets)
        places[MetadataIndex(part.key, offsets, len(chunks))] = _StorageInfo(part.file, part.start, part.length)
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
    # 3.0: how megatron orders the rows of queries, keys and values. megatron-core 0.16 takes these four fields only.
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, directory / COMMON)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / CONFIG).write_text(json.dumps({**backends, "common_backend": "torch", "common_backend_version": 1}))
    metadata = Metadata(entries, planner_data=None, storage_data=places, storage_meta=StorageMeta())
    (directory / METADATA).write_bytes(pickle.dumps(metadata))


class MappedParts:
    """Parts as views of mapped files: the archive's directory is read, nothing in it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def part(self, file: str, start: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Raises ValueError for an archive that is cut off, or holds anything but such a tensor."""
        memory, wanted = self._map(file), prod(sizes) * dtype.itemsize
        if start + length > len(memory):
            raise ValueError(f"{self._directory / file} ends before byte {start + length}: it is cut off.")
        try:
            # Members stand at the ends of an archive: those two pieces are enough.
            archive = zipfile.ZipFile(_Span(memory, start, length))
            members = [info for info in archive.infolist() if "/data/" in info.filename]
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
            raise ValueError(f"{self._directory / file} is broken at byte {start}: {error}.") from error
        is_plain = len(members) == 1 and members[0].compress_type == zipfile.ZIP_STORED
        if not is_plain or members[0].file_size != wanted:
            found = [info.file_size for info in members]
            raise ValueError(f"{self._directory / file} holds {found} bytes at byte {start}, not {wanted}.")
        at = start + members[0].header_offset
        header = memory[at : at + _LOCAL.size] if at >= start else b""
        is_header = len(header) == _LOCAL.size and header[:4] == b"PK\x03\x04"
        at += _LOCAL.size + sum(struct.unpack("<HH", header[26:])) if is_header else length
        if at + wanted > start + length or not is_header:
            raise ValueError(f"{self._directory / file} is broken at byte {start}: its data ends behind it.")
        if not wanted:
            return torch.empty(sizes, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nobody writes to it
            return torch.frombuffer(memory, dtype=dtype, count=prod(sizes), offset=at).view(sizes)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            path = self._directory / file
            if path.is_symlink():
                raise ValueError(f"{path} is a link, which is not followed; copy the file itself.")
            if not path.is_file():
                raise ValueError(f"{path} is missing, though {METADATA} names it; copy the directory again.")
            with open(path, "rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        return self._maps[file]


class _Span(io.RawIOBase):
    """A part of a map as a file."""

    def __init__(self, memory: mmap.mmap, start: int, length: int) -> None:
        self._memory, self._start, self._length, self._at = memory, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError("before the archive")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size < 0 else min(size, left)
        found = self._memory[self._start + self._at : self._start + self._at + count]
        self._at += count
        return found
