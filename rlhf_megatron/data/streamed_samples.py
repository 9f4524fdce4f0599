"""Samples of files that are larger than memory: the place of each row is held, and the row is read
when it is drawn.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_megatron.data.document_samples import (
    DocumentSample,
    DocumentSampleBatch,
    InMemorySampleSet,
)
from rlhf_megatron.data.row_files import read_json_row_at

ParseRow = Callable[[Path, Any], list[DocumentSample]]
"""(file, value of a row) -> its samples, always the same ones."""


class StreamedSampleSet(Sequence[DocumentSample]):
    """Samples of JSON lines or arrays, as `InMemorySampleSet` has them; 14 bytes a sample are held
    in memory, and no token.

    The repr is a digest of everything that trains.
    """

    def __init__(
        self,
        files: Sequence[Path],
        rows: Iterable[tuple[int, int, list[DocumentSample]]],
        parse_row: ParseRow,
    ) -> None:
        """Go through `rows` once and keep where each sample's row lies. `rows`: (index of the file,
        byte at which the row begins, samples) of each row. `parse_row` must make the same samples
        of a row each time.
        """
        self._files = tuple(files)
        self._parse_row = parse_row
        self._file_indices = array("H")
        self._row_offsets = array("q")
        self._numbers_in_row = array("I")
        self._file_states = [_make_file_state(os.stat(path)) for path in files]
        self._open_files: dict[int, BinaryIO] = {}
        digest = hashlib.sha256()
        for file, begin, samples in rows:
            for number, sample in enumerate(samples):
                self._file_indices.append(file)
                self._row_offsets.append(begin)
                self._numbers_in_row.append(number)
                _update_digest(digest, sample)
        self._content_digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._file_indices)

    def __getitem__(self, index: Any) -> Any:
        """Read the sample's row from its file and return the sample. Raise ValueError for a file
        that has changed since it was first read.
        """
        file = self._file_indices[index]
        value = read_json_row_at(self._open_unchanged_file(file), self._row_offsets[index])
        return self._parse_row(self._files[file], value)[self._numbers_in_row[index]]

    def __repr__(self) -> str:
        """Return a digest of everything that trains."""
        return self._content_digest

    def make_batch(self, indices: Sequence[int]) -> DocumentSampleBatch:
        """Return the samples with these indices, in order. Raise ValueError as `__getitem__`
        does.
        """
        return InMemorySampleSet(self[index] for index in indices).make_batch(range(len(indices)))

    def _open_unchanged_file(self, file_index: int) -> BinaryIO:
        """Return the open file of this index. Raise ValueError where it has changed since it was
        first read.
        """
        path = self._files[file_index]
        if file_index not in self._open_files:
            self._open_files[file_index] = path.open("rb")
        if _make_file_state(os.stat(path)) != self._file_states[file_index]:
            raise ValueError(
                f"{path} has changed since the run began to read it; put it back and start"
                " the run again."
            )
        return self._open_files[file_index]


def _make_file_state(file_stat: os.stat_result) -> tuple[int, int, int]:
    """Return (inode, bytes, mtime in ns), by which a changed file is noticed."""
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns


def _update_digest(digest: Any, sample: DocumentSample) -> None:
    """Add everything of a sample that trains to the digest."""
    # Cursors of earlier runs hold this digest: its text keeps the names that it began with.
    teacher = sample.teacher_top_tokens
    teacher_text = "None"
    if teacher is not None:
        teacher_text = (
            f"Taught(ids={teacher.token_ids!r}, log_probs={teacher.log_probs!r},"
            f" width={teacher.top_k!r})"
        )
    digest.update(f"({sample.source!r}, {sample.weight!r}, {teacher_text})".encode())
    for document in sample.documents:
        digest.update(array("i", document.token_ids).tobytes())
        digest.update(repr(document.trained_spans).encode())
