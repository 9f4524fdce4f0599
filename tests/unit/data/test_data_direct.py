"""Files that are written around the system's cache have each byte,
wherever pieces begin and end.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_megatron.data import direct_file_io
from rlhf_megatron.data.direct_file_io import write_large_file_atomically

PIECE = 1 << 16
SIZES = [(0,), (1,), (PIECE,), (PIECE - 1, 2), (3 * PIECE + 5, 1, PIECE), (10,) * 20000]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file_io, "PIECE_BYTES", PIECE)


def parts_of(sizes: tuple[int, ...]) -> list[Any]:
    drawn = np.random.default_rng(7)
    return [drawn.integers(0, 256, size, np.uint8).data if size else b"" for size in sizes]


@pytest.mark.parametrize("way", ["direct", "refused at once", "refused later", "by halves"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_byte_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], way: str
) -> None:
    is_direct = False
    write = os.write
    num_direct = 0

    def set_flags(descriptor: int, command: int, flags: int = 0) -> int:
        nonlocal is_direct
        if command == direct_file_io.fcntl.F_SETFL:
            is_direct = bool(flags & os.O_DIRECT)
            if is_direct and way == "refused at once":
                is_direct = False
                raise OSError(errno.EINVAL, "no such way")
        return 0

    def written(descriptor: int, data: memoryview) -> int:
        nonlocal num_direct
        num_direct += is_direct
        assert not is_direct or len(data) == PIECE, "a disk takes whole blocks"
        if is_direct and way == "refused later":
            raise OSError(errno.EINVAL, "no such way")
        return write(descriptor, data[: PIECE // 2] if is_direct and way == "by halves" else data)

    monkeypatch.setattr(direct_file_io.fcntl, "fcntl", set_flags)
    monkeypatch.setattr(direct_file_io.os, "write", written)
    parts = parts_of(sizes)
    write_large_file_atomically(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert num_direct == (0 if way == "refused at once" else sum(sizes) // PIECE)


def test_the_system_takes_them(tmp_path: Path) -> None:
    parts = parts_of((3 * PIECE + 5, 1, PIECE))
    write_large_file_atomically(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_full_disk_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left"),
    ):
        direct_file_io.write_pieces(full.fileno(), parts_of((2 * PIECE,)))
