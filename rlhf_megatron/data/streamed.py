"""Samples of files that are larger than memory: the place of each row is held, and the row is read when it is drawn."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_megatron.data.rows import json_row
from rlhf_megatron.data.samples import Documents, Sample, SampleBatch

ReadRow = Callable[[Path, Any], list[Sample]]
"""(file, value of a row) -> its samples, always the same ones."""


class StreamedDocuments(Sequence[Sample]):
    """Samples of JSON lines, as `Documents` has them; 14 bytes a sample are held, and no token.

    `rows`: (index of its file, byte at which its line begins, samples) of each row, which is gone through once. `read`
    makes the same samples of a row again. The repr is a digest of all that trains.
    """

    def __init__(self, files: Sequence[Path], rows: Iterable[tuple[int, int, list[Sample]]], read: ReadRow) -> None:
        self._files = tuple(files)
        self._read = read
        self._file_of, self._begin_of, self._number_in_row = array("H"), array("q"), array("I")
        self._states = [_state(os.stat(path)) for path in files]
        self._open: dict[int, BinaryIO] = {}
        digest = hashlib.sha256()
        for file, begin, samples in rows:
            for number, sample in enumerate(samples):
                self._file_of.append(file)
                self._begin_of.append(begin)
                self._number_in_row.append(number)
                _add(digest, sample)
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._file_of)

    def __getitem__(self, index: Any) -> Any:
        """Raises ValueError for a file that has changed since it was first read."""
        file = self._file_of[index]
        value = json_row(self._opened(file), self._begin_of[index])
        return self._read(self._files[file], value)[self._number_in_row[index]]

    def __repr__(self) -> str:
        return self._digest

    def batch(self, indices: Sequence[int]) -> SampleBatch:
        """The samples with these indices, in order. Raises as `__getitem__`."""
        return Documents(self[index] for index in indices).batch(range(len(indices)))

    def _opened(self, number: int) -> BinaryIO:
        path = self._files[number]
        if number not in self._open:
            self._open[number] = path.open("rb")
        if _state(os.stat(path)) != self._states[number]:
            raise ValueError(f"{path} has changed since the run began to read it; put it back and start the run again.")
        return self._open[number]


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _add(digest: Any, sample: Sample) -> None:
    digest.update(repr((sample.source, sample.weight, sample.taught)).encode())
    for document in sample.documents:
        digest.update(array("i", document.token_ids).tobytes())
        digest.update(repr(document.trained).encode())
