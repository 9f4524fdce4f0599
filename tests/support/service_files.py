"""Offline files of services that log runs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path


def records(path: Path) -> Iterator[bytes]:
    """Of a .wandb or .swanlab file: a header of 7 bytes, and LevelDB's blocks of 32 KiB with chunks
    (checksum, length, kind).
    """
    data = path.read_bytes()
    position = 7
    pending = b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pending
            pending = b""
