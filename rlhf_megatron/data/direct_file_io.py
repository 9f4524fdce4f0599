"""Writes large files around the system's cache: nobody reads them soon, and fresh pages there are
most of the cost.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from rlhf_megatron.write_errors import explain_write_errors

FilePiece = bytes | bytearray | memoryview
PIECE_BYTES = 1 << 22  # of what goes to the disk at once; a multiple of any block of a disk


def write_large_file_atomically(path: Path, pieces: Iterable[FilePiece]) -> None:
    """Write `pieces` one after the other to `path`, around the system's cache. The file appears by
    rename when it is on disk. Make parent directories. Raise OSError that names the file.
    """
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(aside, "wb") as file:
                write_pieces(file.fileno(), pieces)
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        fsync_path(path.parent)


def write_pieces(descriptor: int, pieces: Iterable[FilePiece]) -> None:
    """Write `pieces` one after the other to a file that is empty, around the system's cache. The
    last part, which is not a whole block, goes through the cache; so does everything on a file
    system without direct writes.
    """
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))  # which begins at a page
    filled = 0
    for part in pieces:
        left = memoryview(part).cast("B")
        while len(left):
            count = min(len(left), PIECE_BYTES - filled)
            piece[filled : filled + count] = left[:count]
            left = left[count:]
            filled = (filled + count) % PIECE_BYTES
            if filled == 0:
                _write_bytes(descriptor, piece, bypass_cache=True)
    _write_bytes(descriptor, piece[:filled], bypass_cache=False)


def _write_bytes(descriptor: int, data: memoryview, bypass_cache: bool) -> None:
    """Write all bytes to the file; with `bypass_cache` directly to disk, or through the cache where
    the file system refuses that.
    """
    usual = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    while len(data):
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, usual | (os.O_DIRECT if bypass_cache else 0))
            data = data[os.write(descriptor, data) :]
        except OSError:  # it has no such way; or no room, which is told next
            if not bypass_cache:
                raise
        bypass_cache = False


def fsync_path(path: Path) -> None:
    """Flush a file or directory to disk. Raise OSError that names the file."""
    with explain_write_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
