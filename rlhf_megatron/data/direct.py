"""Writes large files around the system's cache: nobody reads them soon, and fresh pages there are most of the cost."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

Part = bytes | bytearray | memoryview
PIECE_BYTES = 1 << 22  # of what goes to the disk at once; a multiple of any block of a disk


def write_whole(path: Path, parts: Iterable[Part]) -> None:
    """`parts` one after the other; the file appears by rename when it is on disk. Makes parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            write_parts(file.fileno(), parts)
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    fsync(path.parent)


def write_parts(descriptor: int, parts: Iterable[Part]) -> None:
    """Write `parts` one after the other to a file that is empty. What is no whole piece goes through the cache, as all
    does on a file system that knows no other way."""
    piece, filled = memoryview(mmap.mmap(-1, PIECE_BYTES)), 0  # which begins at a page
    for part in parts:
        left = memoryview(part).cast("B")
        while len(left):
            count = min(len(left), PIECE_BYTES - filled)
            piece[filled : filled + count] = left[:count]
            left, filled = left[count:], (filled + count) % PIECE_BYTES
            if filled == 0:
                _write(descriptor, piece, is_around=True)
    _write(descriptor, piece[:filled], is_around=False)


def _write(descriptor: int, data: memoryview, is_around: bool) -> None:
    usual = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    while len(data):
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, usual | (os.O_DIRECT if is_around else 0))
            data = data[os.write(descriptor, data) :]
        except OSError:  # it has no such way; or no room, which is told next
            if not is_around:
                raise
        is_around = False


def fsync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
