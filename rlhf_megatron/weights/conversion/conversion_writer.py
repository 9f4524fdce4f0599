"""A conversion: units are read, cast, digested and written, group by group, and what is done
is journalled.

The directory is made aside and renamed when it is complete. A conversion that was killed leaves
what it wrote, and the same command goes on from there: a group counts as done when its bytes were
flushed to disk and its line is in the journal.
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
from rlhf_megatron.data.atomic_directory import refuse_nonempty_directory
from rlhf_megatron.data.direct_file_io import fsync_path
from rlhf_megatron.weights.conversion.conversion_targets import ConversionTarget, HFTarget
from rlhf_megatron.weights.conversion.group_processes import run_groups_in_processes
from rlhf_megatron.weights.conversion.stored_model import (
    ConversionItem,
    StoredModel,
    group_items_into_units,
)
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.hf_writer import MAX_SHARD_BYTES
from rlhf_megatron.write_errors import explain_write_errors

ReportBytes = Callable[[int], None]
"""Called with the bytes that were done, for a progress bar."""
GROUP_BYTES = 256 << 20  # of units, at least: a flush to disk each
JOURNAL = "journal.jsonl"
_MAX_OPEN = 128  # files
_LARGEST_WRITE = 1 << 30  # the kernel takes less than 2 GiB at once


def convert_model(
    model: StoredModel,
    items: Sequence[ConversionItem],
    target: ConversionTarget,
    output_directory: Path,
    num_processes: int = 1,
    report_bytes: ReportBytes | None = None,
    group_bytes: int = GROUP_BYTES,
) -> dict[str, str]:
    """Write the model into `output_directory`, which appears only when complete. Return the digest
    of every tensor that was written, by Hugging Face name.

    An interrupted conversion to the same target is continued. `report_bytes` is called with the
    bytes of each finished group. Memory: twice the largest unit, for each process. Raise ValueError
    before anything is written when `output_directory` is not empty or disk space is short, and when
    the source is broken: then the partial output is deleted. An OSError leaves the partial output
    for the next try.
    """
    output_directory = Path(output_directory).absolute()
    refuse_nonempty_directory(output_directory)
    groups = _group_units(items, group_bytes)
    aside = output_directory.with_name(f".{output_directory.name}.partial")
    output_directory.parent.mkdir(parents=True, exist_ok=True)
    with _ConversionJournal(
        aside, _compute_conversion_identity(model, items, target, groups), target
    ) as journal:
        sizes = [sum(items[number].num_bytes for number in group) for group in groups]
        for number in journal.finished_groups:
            _report_bytes_done(report_bytes, sizes[number])
        left = [number for number in range(len(groups)) if number not in journal.finished_groups]
        try:
            _require_disk_space(
                output_directory,
                sum(target.file_bytes.values()) * sum(sizes[n] for n in left) // max(1, sum(sizes)),
            )
        except ValueError:
            if not journal.finished_groups:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        writer = _UnitGroupWriter(model, items, groups, target, aside)
        try:
            for number, digests in run_groups_in_processes(left, writer.write_group, num_processes):
                journal.add_group(number, digests)
                _report_bytes_done(report_bytes, sizes[number])
        except ValueError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            writer.close_files()
        digests = journal.collect_digests(range(len(groups)))
        target.write_companion_files(aside, digests)
        for path in [*aside.rglob("*"), aside]:
            fsync_path(path)
        refuse_nonempty_directory(output_directory)
        os.rename(aside, output_directory)
        fsync_path(output_directory.parent)
        (output_directory / JOURNAL).unlink()
    return digests


def write_hf_directory(
    model: StoredModel,
    output_directory: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    report_bytes: ReportBytes | None = None,
    hf_config: HFConfig | None = None,
) -> dict[str, str]:
    """Write the model as a Hugging Face directory without a digest file, in this process, and
    return the digests of its tensors. `dtype` is explained at `StoredModel.make_conversion_items`,
    `hf_config` at `HFTarget`, the errors at `convert_model`.
    """
    items = model.make_conversion_items(dtype)
    target = HFTarget(model, items, max_shard_bytes, hf_config, has_digests=False)
    return convert_model(model, items, target, output_directory, report_bytes=report_bytes)


def _require_disk_space(output_directory: Path, num_bytes: int) -> None:
    """Raise ValueError where the disk of `output_directory` has less than `num_bytes` free."""
    parent = next(path for path in Path(output_directory).absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(
            f"{output_directory} needs {num_bytes} bytes but {parent} has {free} free; choose"
            " another place."
        )


def _report_bytes_done(report_bytes: ReportBytes | None, num_bytes: int) -> None:
    """Call `report_bytes` with the number of bytes, unless it is None."""
    if report_bytes is not None:
        report_bytes(num_bytes)


def _group_units(items: Sequence[ConversionItem], group_bytes: int) -> list[list[int]]:
    """Return groups of item numbers: whole units, in order, collected until a group has at least
    `group_bytes`.
    """
    groups: list[list[int]] = []
    num_bytes = group_bytes
    for unit in group_items_into_units(items):
        if num_bytes >= group_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1] += unit
        num_bytes += sum(items[number].num_bytes for number in unit)
    return groups


def _compute_conversion_identity(
    model: StoredModel,
    items: Sequence[ConversionItem],
    target: ConversionTarget,
    groups: Sequence[Sequence[int]],
) -> str:
    """Return a digest of everything that decides the output's bytes: the source's files, the
    target, the groups and this version. A journal with another identity is not continued.
    """
    directories = [
        directory
        for directory in (model.directory, model.companions_directory)
        if directory is not None
    ]
    found = {path for directory in directories for path in directory.iterdir() if path.is_file()}
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(found)]
    begins = {
        name: hashlib.sha256(begin).hexdigest() for name, begin in target.file_headers.items()
    }
    written = [[(items[n].rule.megatron_name, items[n].dtype) for n in group] for group in groups]
    content = [
        __version__,
        target.wire_name,
        files,
        dict(target.file_bytes),
        begins,
        target.contents_digest,
        written,
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class _UnitGroupWriter:
    """Writes groups into the files of a target; a process each has its own open files."""

    def __init__(
        self,
        model: StoredModel,
        items: Sequence[ConversionItem],
        groups: Sequence[Sequence[int]],
        target: ConversionTarget,
        partial_directory: Path,
    ) -> None:
        """Open the directory that is being written. Its files must exist at full size."""
        self._model = model
        self._items = items
        self._groups = groups
        self._target = target
        self._partial_directory = partial_directory
        # Files are opened in this very directory: a process that outlives a killed parent for a
        # moment cannot write into files of the next conversion, which makes the directory anew.
        self._directory_descriptor = os.open(partial_directory, os.O_RDONLY | os.O_DIRECTORY)
        self._open_descriptors: dict[str, int] = {}

    def write_group(self, group_number: int) -> dict[str, str]:
        """Read the items of one group, write them into the target's files and flush these files to
        disk. Return the digests of the group's tensors by Hugging Face name.
        """
        touched = set[str]()
        digests = dict[str, str]()

        def write_at_offset(file: str, offset: int, content: Tensor | bytes) -> None:
            """Write `content` at byte `offset` of a target file, and note the file for the
            flush.
            """
            touched.add(file)
            with explain_write_errors(self._partial_directory / file):
                _write_at_offset(self._open_file(file), offset, content)

        for index in self._groups[group_number]:
            read = self._model.read_item(self._items[index])
            self._target.write_item(self._items[index], read, write_at_offset)
            digests |= read.compute_digests()
        for file in touched:
            with explain_write_errors(self._partial_directory / file):
                os.fdatasync(self._open_file(file))
        return digests

    def _open_file(self, file: str) -> int:
        """Return the descriptor of an output file, opened for writing. Where too many files are
        open, flush and close the one that was opened first.
        """
        if file not in self._open_descriptors:
            if len(self._open_descriptors) >= _MAX_OPEN:
                oldest = self._open_descriptors.pop(next(iter(self._open_descriptors)))
                os.fdatasync(oldest)
                os.close(oldest)
            self._open_descriptors[file] = os.open(
                file, os.O_WRONLY, dir_fd=self._directory_descriptor
            )
        return self._open_descriptors[file]

    def close_files(self) -> None:
        """Close the output files and the descriptor of the directory."""
        for descriptor in [*self._open_descriptors.values(), self._directory_descriptor]:
            os.close(descriptor)
        self._open_descriptors.clear()


def _write_at_offset(descriptor: int, offset: int, content: Tensor | bytes) -> None:
    """Write all of `content` at byte `offset` of an open file, in as many writes as the kernel
    needs.
    """
    if isinstance(content, Tensor):
        view = content.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    else:
        view = memoryview(content)
    while len(view):
        count = os.pwrite(descriptor, view[:_LARGEST_WRITE], offset)
        view = view[count:]
        offset = offset + count


class _ConversionJournal:
    """Lines of JSON in the directory that is being written: what it is for, then each
    group that is done.
    """

    def __init__(self, partial_directory: Path, identity: str, target: ConversionTarget) -> None:
        """Open and lock the journal in `partial_directory`, and read the groups that an earlier run
        of the same conversion finished. Where there is no such run, or its files are damaged,
        delete the directory and make all target files at full size. Raise ValueError where another
        process is converting into the directory.
        """
        self._digests_by_group = dict[int, Mapping[str, str]]()
        path = partial_directory / JOURNAL
        self._path = path
        self._file = self._open_locked_file(path)
        lines = _read_whole_lines(self._file)
        if lines[:1] != [{"identity": identity}] or not _are_files_intact(
            partial_directory, target
        ):
            shutil.rmtree(partial_directory, ignore_errors=True)
            self._file.close()
            # before a file is made: another process may have come first
            self._file = self._open_locked_file(path)
            for file, size in target.file_bytes.items():
                (partial_directory / file).parent.mkdir(parents=True, exist_ok=True)
                with (
                    explain_write_errors(partial_directory / file),
                    open(partial_directory / file, "wb") as opened,
                ):
                    opened.write(target.file_headers.get(file, b""))
                    opened.truncate(size)
                fsync_path(partial_directory / file)  # before the journal says that it is there
            for folder in {(partial_directory / file).parent for file in target.file_bytes} | {
                partial_directory
            }:
                fsync_path(folder)
            self._append_line({"identity": identity})
        else:
            self._digests_by_group = {line["group"]: line["digests"] for line in lines[1:]}

    def __enter__(self) -> _ConversionJournal:
        return self

    def __exit__(self, *_: object) -> None:
        with explain_write_errors(self._path):
            self._file.close()

    @property
    def finished_groups(self) -> frozenset[int]:
        """Return the numbers of the groups that are in the journal and thus on disk."""
        return frozenset(self._digests_by_group)

    def add_group(self, group_number: int, digests: Mapping[str, str]) -> None:
        """Write a line to the journal, flushed to disk, that says that the group is finished and
        gives its tensors' digests.
        """
        self._append_line({"group": group_number, "digests": digests})
        self._digests_by_group[group_number] = digests

    def collect_digests(self, group_numbers: Sequence[int]) -> dict[str, str]:
        """Return the digests of all tensors of these groups, by Hugging Face name, in the order of
        `group_numbers`.
        """
        return {
            name: value
            for number in group_numbers
            for name, value in self._digests_by_group[number].items()
        }

    @staticmethod
    def _open_locked_file(path: Path) -> IO[bytes]:
        """Open the journal file, made if absent, and lock it against other processes. Raise
        ValueError where another process holds the lock or has just replaced the file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        try:  # not flock: processes that are forked off this one would hold it after its end
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                # another process began anew between the two calls above
                raise FileNotFoundError(path)
        except OSError as error:
            file.close()
            raise ValueError(
                f"another process is converting to {path.parent}; wait for it, or end it."
            ) from error
        return file

    def _append_line(self, line: Mapping[str, object]) -> None:
        """Append one line of JSON to the journal and flush it to disk."""
        with explain_write_errors(self._path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def _are_files_intact(partial_directory: Path, target: ConversionTarget) -> bool:
    """Return whether all files of the target exist, with their full size and with their header,
    which no group writes again.
    """
    for file, size in target.file_bytes.items():
        begin = target.file_headers.get(file, b"")
        try:
            with open(partial_directory / file, "rb") as opened:
                if os.fstat(opened.fileno()).st_size != size or opened.read(len(begin)) != begin:
                    return False
        except OSError:
            return False
    return True


def _read_whole_lines(file: IO[bytes]) -> list[dict[str, Any]]:
    """Return the journal's lines as parsed JSON. Cut the file off before the first line that is
    incomplete or broken, as a crash or a power failure leaves it.
    """
    file.seek(0)
    found = list[dict[str, Any]]()
    end = 0
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
