"""A conversion: units are read, cast, digested and written, group by group, and what is done is journalled.

The directory is made aside and renamed when it is complete. A conversion that was killed leaves what it wrote, and the
same command goes on from there: a group counts as done when its bytes were flushed to disk and its line is in the
journal.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rlhf_megatron import __version__
from rlhf_megatron.checkpoint.aside import refuse_existing
from rlhf_megatron.checkpoint.hf_writer import MAX_SHARD_BYTES
from rlhf_megatron.conversion.groups import run_groups
from rlhf_megatron.conversion.model import Item, Model, units_of
from rlhf_megatron.conversion.targets import HFTarget, Target
from rlhf_megatron.data.direct import fsync
from rlhf_megatron.models.families.base import HFConfig

OnBytes = Callable[[int], None]
"""Called with the bytes that were done, for a progress bar."""
GROUP_BYTES = 256 << 20  # of units, at least: a flush to disk each
JOURNAL = "journal.jsonl"
_MAX_OPEN = 128  # files
_LARGEST_WRITE = 1 << 30  # the kernel takes less than 2 GiB at once


def convert(
    model: Model,
    items: Sequence[Item],
    target: Target,
    out: Path,
    num_processes: int = 1,
    on_bytes: OnBytes | None = None,
    group_bytes: int = GROUP_BYTES,
) -> dict[str, str]:
    """Write `out`, which appears complete. Returns the digest of every tensor that was written, in Hugging Face layout.

    Memory: one unit a process, twice. Raises ValueError before anything is written when `out` is not empty or space is
    short, and when the source is broken: nothing is left then. OSError leaves what was written for the next try.
    """
    out = Path(out).absolute()
    refuse_existing(out)
    groups = _groups(items, group_bytes)
    aside = out.with_name(f".{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _Journal(aside, _identity(model, items, target, groups), target) as journal:
        sizes = [sum(items[number].num_bytes for number in group) for group in groups]
        for number in journal.done:
            _tell(on_bytes, sizes[number])
        left = [number for number in range(len(groups)) if number not in journal.done]
        try:
            _check_space(out, sum(target.sizes.values()) * sum(sizes[n] for n in left) // max(1, sum(sizes)))
        except ValueError:
            if not journal.done:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        writer = _GroupWriter(model, items, groups, target, aside)
        try:
            for number, digests in run_groups(left, writer.write, num_processes):
                journal.add(number, digests)
                _tell(on_bytes, sizes[number])
        except ValueError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            writer.close()
        digests = journal.digests(range(len(groups)))
        target.finish(aside, digests)
        for path in [*aside.rglob("*"), aside]:
            fsync(path)
        refuse_existing(out)
        os.rename(aside, out)
        fsync(out.parent)
        (out / JOURNAL).unlink()
    return digests


def write_hf(
    model: Model,
    out: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_bytes: OnBytes | None = None,
    hf_config: HFConfig | None = None,
) -> dict[str, str]:
    """A Hugging Face directory of nothing else, in this process; arguments as of `HFTarget`, the rest as of
    `convert`."""
    items = model.items(dtype)
    target = HFTarget(model, items, max_shard_bytes, hf_config, has_digests=False)
    return convert(model, items, target, out, on_bytes=on_bytes)


def _check_space(out: Path, num_bytes: int) -> None:
    """Raises ValueError where the disk has less than that."""
    parent = next(path for path in Path(out).absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(f"{out} needs {num_bytes} bytes but {parent} has {free} free; choose another place.")


def _tell(on_bytes: OnBytes | None, num_bytes: int) -> None:
    if on_bytes is not None:
        on_bytes(num_bytes)


def _groups(items: Sequence[Item], group_bytes: int) -> list[list[int]]:
    """Whole units, until they come to `group_bytes`."""
    groups: list[list[int]] = []
    num_bytes = group_bytes
    for unit in units_of(items):
        if num_bytes >= group_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1] += unit
        num_bytes += sum(items[number].num_bytes for number in unit)
    return groups


def _identity(model: Model, items: Sequence[Item], target: Target, groups: Sequence[Sequence[int]]) -> str:
    """Return a digest of source and target. A journal of another conversion is not used."""
    directories = [directory for directory in (model.directory, model.companions_from) if directory is not None]
    found = {path for directory in directories for path in directory.iterdir() if path.is_file()}
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(found)]
    begins = {name: hashlib.sha256(begin).hexdigest() for name, begin in target.begins.items()}
    written = [[(items[n].rule.megatron_name, items[n].dtype) for n in group] for group in groups]
    content = [__version__, type(target).__name__, files, dict(target.sizes), begins, target.contents, written]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class _GroupWriter:
    """Writes groups into the files of a target; a process each has its own open files."""

    def __init__(
        self, model: Model, items: Sequence[Item], groups: Sequence[Sequence[int]], target: Target, aside: Path
    ) -> None:
        self._model, self._items, self._groups, self._target = model, items, groups, target
        # Files are opened in this very directory: a process that outlives a killed parent for a moment cannot write
        # into files of the next conversion, which makes the directory anew.
        self._directory = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
        self._open: dict[str, int] = {}

    def write(self, number: int) -> dict[str, str]:
        """One group, flushed to disk. Returns the digests of its tensors."""
        touched, digests = set[str](), dict[str, str]()

        def put(file: str, offset: int, content: Tensor | bytes) -> None:
            touched.add(file)
            _write_at(self._descriptor(file), offset, content)

        for index in self._groups[number]:
            read = self._model.read(self._items[index])
            self._target.write(self._items[index], read, put)
            digests |= read.digests()
        for file in touched:
            os.fdatasync(self._descriptor(file))
        return digests

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN:
                oldest = self._open.pop(next(iter(self._open)))
                os.fdatasync(oldest)
                os.close(oldest)
            self._open[file] = os.open(file, os.O_WRONLY, dir_fd=self._directory)
        return self._open[file]

    def close(self) -> None:
        for descriptor in [*self._open.values(), self._directory]:
            os.close(descriptor)
        self._open.clear()


def _write_at(descriptor: int, offset: int, content: Tensor | bytes) -> None:
    if isinstance(content, Tensor):
        view = content.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    else:
        view = memoryview(content)
    while len(view):
        count = os.pwrite(descriptor, view[:_LARGEST_WRITE], offset)
        view, offset = view[count:], offset + count


class _Journal:
    """Lines of JSON in the directory that is being written: what it is for, then each group that is done."""

    def __init__(self, aside: Path, identity: str, target: Target) -> None:
        """Files of full size are made where no conversion of the same was begun. Raises ValueError where another
        process writes there."""
        self._digests = dict[int, Mapping[str, str]]()
        path = aside / JOURNAL
        self._file = self._opened(path)
        lines = _whole_lines(self._file)
        if lines[:1] != [{"identity": identity}] or not _stand(aside, target):
            shutil.rmtree(aside, ignore_errors=True)
            self._file.close()
            self._file = self._opened(path)  # before a file is made: another process may have come first
            for file, size in target.sizes.items():
                (aside / file).parent.mkdir(parents=True, exist_ok=True)
                with open(aside / file, "wb") as opened:
                    opened.write(target.begins.get(file, b""))
                    opened.truncate(size)
                fsync(aside / file)  # before the journal says that it is there
            for folder in {(aside / file).parent for file in target.sizes} | {aside}:
                fsync(folder)
            self._append({"identity": identity})
        else:
            self._digests = {line["group"]: line["digests"] for line in lines[1:]}

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._digests)

    def add(self, number: int, digests: Mapping[str, str]) -> None:
        self._append({"group": number, "digests": digests})
        self._digests[number] = digests

    def digests(self, order: Sequence[int]) -> dict[str, str]:
        """Return the digests of all tensors, in that order of the groups."""
        return {name: value for number in order for name, value in self._digests[number].items()}

    @staticmethod
    def _opened(path: Path) -> IO[bytes]:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        try:  # not flock: processes that are forked off this one would hold it after its end
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError(path)  # another process began anew between the two calls above
        except OSError as error:
            file.close()
            raise ValueError(f"another process is converting to {path.parent}; wait for it, or end it.") from error
        return file

    def _append(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _stand(aside: Path, target: Target) -> bool:
    """Whether all files are there, of full size and with their beginning, which no group writes again."""
    for file, size in target.sizes.items():
        begin = target.begins.get(file, b"")
        try:
            with open(aside / file, "rb") as opened:
                if os.fstat(opened.fileno()).st_size != size or opened.read(len(begin)) != begin:
                    return False
        except OSError:
            return False
    return True


def _whole_lines(file: IO[bytes]) -> list[dict[str, Any]]:
    """A line that was cut off, or not written before the power went, is dropped from the file with all after it."""
    file.seek(0)
    found, end = list[dict[str, Any]](), 0
    for line in file.read().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            found.append(json.loads(line))
        except ValueError:
            break
        end += len(line)
    file.truncate(end)
    return found
