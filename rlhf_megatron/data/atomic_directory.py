"""Directories that appear complete or not at all: written aside, flushed to disk, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_megatron.data.direct_file_io import fsync_path


def refuse_nonempty_directory(directory: Path) -> None:
    """Raise ValueError when `directory` exists and is not an empty directory, or is a link, which a
    directory cannot replace.
    """
    if directory.is_symlink():
        raise ValueError(
            f"{directory} is a link; name the directory that it leads to, or another one."
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists already; remove it or choose another directory.")


@contextmanager
def write_directory_atomically(directory: Path) -> Iterator[Path]:
    """Yield a new directory beside `directory`; when the block ends, flush it to disk and rename it
    to `directory`. Remove it when the block raises.

    Raise ValueError when `directory` exists and is not empty.
    """
    directory = Path(directory).absolute()
    refuse_nonempty_directory(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for path in [*aside.rglob("*"), aside]:
            fsync_path(path)
        refuse_nonempty_directory(directory)
        os.rename(aside, directory)
        fsync_path(directory.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
