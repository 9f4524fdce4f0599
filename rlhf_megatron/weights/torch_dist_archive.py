"""megatron-core's torch_dist directory, written and read part by part: no model, no process group,
nothing unpickled.

A part of a tensor is one archive as `torch.save` writes it (a zip whose members are stored), and
`.metadata` says in which file and where each lies. How long an archive is follows from shape and
type, so every part has its place before the first one is written.
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

from rlhf_megatron.weights.safe_pickle import COMMON, CONFIG, METADATA
from rlhf_megatron.write_errors import explain_write_errors, write_text_file

ALIGNMENT = 64  # bytes, of archives in a file and of the data in one
_DATE = 0x21  # 1980-01-01, as torch writes it
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_DATA = "archive/data/0"


@dataclass(frozen=True)
class ArchivedChunk:
    """A box of a tensor, and the archive that holds it."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box
    sizes: tuple[int, ...]
    dtype: str  # "bfloat16"
    file: str
    start_byte: int  # of the archive, bytes
    num_archive_bytes: int


@dataclass(frozen=True)
class ArchiveFrame:
    """Holds the bytes that stand before and behind the data of an archive."""

    small_members: tuple[tuple[str, bytes], ...]
    num_data_bytes: int  # of the data

    def encode_header(self, crc: int) -> bytes:
        """Return the archive's bytes before the data. `crc`: the CRC-32 of the data."""
        text = b""
        for name, content in self.small_members:
            text += (
                self._encode_member_header(name, len(text), zlib.crc32(content), len(content))
                + content
            )
        return text + self._encode_member_header(_DATA, len(text), crc, self.num_data_bytes)

    def encode_directory(self, crc: int) -> bytes:
        """Return the archive's bytes behind the data: the zip directory. `crc`: the CRC-32 of the
        data.
        """
        entries = b""
        at = 0
        for name, length, check in [
            *((n, len(c), zlib.crc32(c)) for n, c in self.small_members),
            (_DATA, self.num_data_bytes, crc),
        ]:
            entry = _CENTRAL.pack(
                b"PK\x01\x02", 0, 0, 0, 0, 0, _DATE, check, length, length, len(name),
                0, 0, 0, 0, 0, at,
            )  # fmt: skip
            entries += entry + name.encode()
            at += len(self._encode_member_header(name, at, 0, 0)) + length
        count = len(self.small_members) + 1
        return entries + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(entries), at, 0)

    @property
    def num_archive_bytes(self) -> int:
        """Return the bytes of the whole archive: header, data and directory."""
        return len(self.encode_header(0)) + self.num_data_bytes + len(self.encode_directory(0))

    @staticmethod
    def _encode_member_header(name: str, archive_offset: int, crc: int, length: int) -> bytes:
        """Return the zip header of a member that begins at byte `archive_offset` of the archive,
        padded so that the member's content is aligned.
        """
        padding = -(archive_offset + _LOCAL.size + len(name) + 4) % ALIGNMENT
        header = _LOCAL.pack(
            b"PK\x03\x04", 0, 0, 0, 0, _DATE, crc, length, length, len(name), 4 + padding
        )
        return header + name.encode() + struct.pack("<2sH", b"FB", padding) + b"Z" * padding


@lru_cache(maxsize=4096)
def make_archive_frame(shape: tuple[int, ...], dtype: str) -> ArchiveFrame:
    """Return the frame of an archive for a tensor of this shape and type. Assert that the tensor
    has less than 4 GiB.
    """
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))  # its memory is never touched
    assert tensor.nbytes < 1 << 32, f"a part of {tensor.nbytes} bytes"
    pickled = io.BytesIO()
    _StoragePickler(pickled, protocol=2).dump(tensor)
    little = (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n"))
    return ArchiveFrame(
        tuple((f"archive/{name}", content) for name, content in little), tensor.nbytes
    )


class _StoragePickler(pickle.Pickler):
    """Names the only storage as `torch.save` does."""

    def persistent_id(self, value: Any) -> Any:
        """Return the reference that `torch.save` writes in place of the tensor's storage; None for
        all other values.
        """
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        kind = getattr(torch, value._pickle_storage_type())
        return ("storage", kind, "0", "cpu", value._size())


def write_torch_dist_metadata(directory: Path, archived_chunks: Iterable[ArchivedChunk]) -> None:
    """Write the files that make a directory of archives a checkpoint. `.metadata`, which makes it
    complete, is written last.
    """
    entries: dict[str, Any] = {}
    places = {}
    for part in archived_chunks:
        if part.key not in entries:
            properties = TensorProperties(dtype=getattr(torch, part.dtype))
            entries[part.key] = TensorStorageMetadata(properties, torch.Size(part.shape), [])
        chunks = entries[part.key].chunks
        offsets = torch.Size(part.offsets)
        places[MetadataIndex(part.key, offsets, len(chunks))] = _StorageInfo(
            part.file, part.start_byte, part.num_archive_bytes
        )
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
    # 3.0: how megatron orders the rows of queries, keys and values. megatron-core 0.16 takes these
    # four fields only.
    with explain_write_errors(directory / COMMON):
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, directory / COMMON)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    write_text_file(
        directory / CONFIG,
        json.dumps({**backends, "common_backend": "torch", "common_backend_version": 1}),
    )
    metadata = Metadata(entries, planner_data=None, storage_data=places, storage_meta=StorageMeta())
    with explain_write_errors(directory / METADATA):
        (directory / METADATA).write_bytes(pickle.dumps(metadata))


class MappedArchives:
    """Parts as views of mapped files: the archive's directory is read,
    nothing in it is unpickled.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def read_chunk(
        self,
        file_name: str,
        start_byte: int,
        num_archive_bytes: int,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the tensor of one archive, a read-only view of the mapped file. Raise ValueError
        for an archive that is cut off or broken, or that holds anything but one tensor of these
        sizes and type.
        """
        memory = self._map_file(file_name)
        wanted = prod(sizes) * dtype.itemsize
        if start_byte + num_archive_bytes > len(memory):
            raise ValueError(
                f"{self._directory / file_name} ends before byte {start_byte + num_archive_bytes}:"
                " it is cut off."
            )
        try:
            # Members stand at the ends of an archive: those two pieces are enough.
            archive = zipfile.ZipFile(_MappedArchiveFile(memory, start_byte, num_archive_bytes))
            members = [info for info in archive.infolist() if "/data/" in info.filename]
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
            raise ValueError(
                f"{self._directory / file_name} is broken at byte {start_byte}: {error}."
            ) from error
        is_plain = len(members) == 1 and members[0].compress_type == zipfile.ZIP_STORED
        if not is_plain or members[0].file_size != wanted:
            found = [info.file_size for info in members]
            raise ValueError(
                f"{self._directory / file_name} holds {found} bytes at byte {start_byte},"
                f" not {wanted}."
            )
        at = start_byte + members[0].header_offset
        header = memory[at : at + _LOCAL.size] if at >= start_byte else b""
        is_header = len(header) == _LOCAL.size and header[:4] == b"PK\x03\x04"
        at += (
            _LOCAL.size + sum(struct.unpack("<HH", header[26:])) if is_header else num_archive_bytes
        )
        if at + wanted > start_byte + num_archive_bytes or not is_header:
            raise ValueError(
                f"{self._directory / file_name} is broken at byte {start_byte}: its data"
                " ends behind it."
            )
        if not wanted:
            return torch.empty(sizes, dtype=dtype)
        with warnings.catch_warnings():
            # and nobody writes to it
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=dtype, count=prod(sizes), offset=at).view(sizes)

    def _map_file(self, file_name: str) -> mmap.mmap:
        """Return the map of a file, made at its first use. Raise ValueError for a link or a missing
        file.
        """
        if file_name not in self._maps:
            path = self._directory / file_name
            if path.is_symlink():
                raise ValueError(f"{path} is a link, which is not followed; copy the file itself.")
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing, though {METADATA} names it; copy the directory again."
                )
            with open(path, "rb") as opened:
                self._maps[file_name] = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        return self._maps[file_name]


class _MappedArchiveFile(io.RawIOBase):
    """A part of a map as a file."""

    def __init__(self, memory: mmap.mmap, start: int, length: int) -> None:
        """Present the bytes from `start` to `start + length` of a map as a file."""
        self._memory = memory
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position and return it, as io's seek does. Raise ValueError for one before the
        archive.
        """
        self._position = offset + (0, self._position, self._length)[whence]
        if self._position < 0:
            raise ValueError("before the archive")
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes from the position on, all that are left for a negative size."""
        left = max(0, self._length - self._position)
        count = left if size < 0 else min(size, left)
        found = self._memory[self._start + self._position : self._start + self._position + count]
        self._position += count
        return found
