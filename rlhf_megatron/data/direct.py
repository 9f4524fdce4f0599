"""Writes large files around the system's cache: nobody reads them soon, and fresh pages there are most of the cost."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable

PIECE_BYTES = 1 << 22  # of what goes to the disk at once; a multiple of any block of a disk


def write_parts(descriptor: int, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write `parts` one after the other, from the file's position, which must be a multiple of `PIECE_BYTES`.

    Like any write it is on disk after an fsync. What is no whole piece goes through the cache, as all does on a file
    system that knows no other way.
    """
    with mmap.mmap(-1, PIECE_BYTES) as piece, memoryview(piece) as room:
        filled = 0
        for part in parts:
            left = memoryview(part).cast("B")
            while len(left):
                count = min(len(left), PIECE_BYTES - filled)
                room[filled : filled + count] = left[:count]
                left, filled = left[count:], filled + count
                if filled == PIECE_BYTES:
                    _write_around(descriptor, room)
                    filled = 0
        with room[:filled] as rest:
            _write(descriptor, rest)


def _write_around(descriptor: int, piece: memoryview) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        done = os.write(descriptor, piece)
    except OSError:  # it has no such way, or no room, which the next line tells
        pass
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    with piece[done:] as rest:
        _write(descriptor, rest)


def _write(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        with data[done:] as left:
            done += os.write(descriptor, left)
