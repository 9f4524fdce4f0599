"""What accompanies a bucket of weights on its way to an engine: JSON beside raw bytes, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import PurePosixPath

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TensorEntry:
    """A Hugging Face tensor inside a bucket."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the bucket
    digest: str  # resharding.digest of the tensor, hex

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class BucketManifest:
    """One flat bucket that lies in a file of the transfer directory."""

    version: int  # policy_version that these weights belong to
    sender: str  # coordinates of the sending rank, for messages
    bucket: int  # counts up per sender
    file: str  # name inside the transfer directory
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    file_offset: int = 0  # bytes of the file before the bucket

    @property
    def place(self) -> str:
        """Which bucket it is, for messages and receipts."""
        return f"bucket {self.bucket} of {self.sender}"

    def __str__(self) -> str:
        """Names the bucket, its sender and what is in it, for messages."""
        first, *others = [entry.name for entry in self.tensors] or ["nothing"]
        more = f" and {len(others)} more" if others else ""
        return f"{self.place} ({first}{more})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> BucketManifest:
        """Raises ValueError when a field is missing, a path leaves the transfer directory, or tensors overlap."""
        try:
            raw = json.loads(text)
            entries = raw.pop("tensors")
            if not isinstance(entries, list):
                raise TypeError(f"tensors must be a list, not {entries!r}.")
            tensors = tuple(TensorEntry(**{**t, "shape": tuple(t["shape"])}) for t in entries)
            manifest = BucketManifest(tensors=tensors, **raw)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a bucket manifest: {error}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        of_bucket = {"version": int, "sender": str, "bucket": int, "file": str, "num_bytes": int, "file_offset": int}
        _check_types(self, of_bucket)
        for entry in self.tensors:
            _check_types(entry, {"name": str, "dtype": str, "offset": int, "digest": str})
        path = PurePosixPath(self.file)
        if path.is_absolute() or len(path.parts) != 1 or path.name in ("", ".", ".."):
            raise ValueError(f"manifest file {self.file!r} must be a plain name inside the transfer directory.")
        if self.file_offset < 0:
            raise ValueError(f"manifest file_offset is {self.file_offset}; it must not be negative.")
        end = 0
        for entry in sorted(self.tensors, key=lambda e: e.offset):
            if entry.dtype not in DTYPE_BYTES or any(type(n) is not int or n < 0 for n in entry.shape):
                raise ValueError(f"tensor {entry.name!r} has dtype {entry.dtype!r} and shape {entry.shape}.")
            if entry.offset < end:
                raise ValueError(f"tensor {entry.name!r} overlaps the one before it in bucket {self.bucket}.")
            end = entry.offset + entry.num_bytes
        if end > self.num_bytes:
            raise ValueError(f"tensors end at byte {end} but bucket {self.bucket} has {self.num_bytes}.")


def _check_types(holder: BucketManifest | TensorEntry, types: Mapping[str, type]) -> None:
    for name, wanted in types.items():
        if type(value := getattr(holder, name)) is not wanted:
            raise ValueError(f"not a bucket manifest: {name} must be {wanted.__name__}, not {value!r}.")
