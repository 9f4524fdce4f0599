"""What accompanies a bucket of weights on its way to an engine: JSON beside raw bytes,
never a pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath

import msgspec
import torch
from torch import Tensor

from rlhf_megatron.weights.weight_table import TensorSpan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TensorEntry:
    """A Hugging Face tensor inside a bucket, or a part of it."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]  # of the whole tensor
    offset: int  # bytes from the start of the bucket
    digest: str  # weights.tensor_digest of what lies here, taken at its place in the tensor, hex
    # (axis, start, count) of what lies here; None: all of it
    part: tuple[int, int, int] | None = None

    @property
    def span(self) -> TensorSpan:
        """Return the part of the tensor that lies in the bucket, as a span."""
        return TensorSpan(0, 0, self.shape[0]) if self.part is None else TensorSpan(*self.part)

    @property
    def key(self) -> str:
        """Return a key that tells the parts of one tensor apart: the name and, for a part, its
        axis, start and count.
        """
        return self.name if self.part is None else f"{self.name}[{':'.join(map(str, self.part))}]"

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the part takes in the bucket."""
        return prod(self.span.shape_within(self.shape)) * DTYPE_BYTES[self.dtype]

    def view_in_bucket(self, bucket: Tensor) -> Tensor:
        """Return this tensor's part as a view of `bucket` [bytes] uint8, or as a copy where its
        offset is not a multiple of its element size.
        """
        raw = bucket[self.offset : self.offset + self.num_bytes]
        dtype = getattr(torch, self.dtype)
        is_odd = raw.storage_offset() % dtype.itemsize != 0
        return (raw.clone() if is_odd else raw).view(dtype).view(self.span.shape_within(self.shape))


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
    def tensor_bytes(self) -> int:
        """Return the bytes of the bucket's tensors, without the gaps between them."""
        return sum(entry.num_bytes for entry in self.tensors)

    @property
    def label(self) -> str:
        """Return "bucket N of SENDER", for messages and receipts."""
        return f"bucket {self.bucket} of {self.sender}"

    def __str__(self) -> str:
        """Return the label and the bucket's tensors, for messages."""
        first, *others = [entry.name for entry in self.tensors] or ["nothing"]
        more = f" and {len(others)} more" if others else ""
        return f"{self.label} ({first}{more})"

    def encode_json(self) -> str:
        """Return the manifest as JSON text, which `parse_json` reads."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def parse_json(text: str) -> BucketManifest:
        """Return the manifest that JSON text holds. Raise ValueError when a field is missing, a
        path leaves the transfer directory, or tensors overlap.
        """
        try:
            manifest = msgspec.json.decode(text, type=BucketManifest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"not a bucket manifest: {error}") from error
        manifest._require_valid()
        return manifest

    def _require_valid(self) -> None:
        """Raise ValueError for a path outside of the transfer directory, an unknown type, a part
        outside of its tensor, and tensors that overlap or exceed the bucket.
        """
        path = PurePosixPath(self.file)
        if path.is_absolute() or len(path.parts) != 1 or path.name in ("", ".", ".."):
            raise ValueError(
                f"manifest file {self.file!r} must be a plain name inside the transfer directory."
            )
        if self.file_offset < 0:
            raise ValueError(
                f"manifest file_offset is {self.file_offset}; it must not be negative."
            )
        end = 0
        for entry in sorted(self.tensors, key=lambda e: e.offset):
            if entry.dtype not in DTYPE_BYTES or any(n < 0 for n in entry.shape):
                raise ValueError(
                    f"tensor {entry.name!r} has dtype {entry.dtype!r} and shape {entry.shape};"
                    f" known types are {', '.join(DTYPE_BYTES)}, and no size is negative."
                )
            if not _is_part_inside(entry.part, entry.shape):
                raise ValueError(
                    f"tensor {entry.name!r} of shape {entry.shape} has no part {entry.part}."
                )
            if entry.offset < end:
                raise ValueError(
                    f"tensor {entry.name!r} overlaps the one before it in bucket {self.bucket}."
                )
            end = entry.offset + entry.num_bytes
        if end > self.num_bytes:
            raise ValueError(
                f"tensors end at byte {end} but bucket {self.bucket} has {self.num_bytes}."
            )


def _is_part_inside(part: tuple[int, int, int] | None, shape: tuple[int, ...]) -> bool:
    """Return whether (axis, start, count) lies inside of a tensor of `shape`; None, the whole
    tensor, does unless the shape is ().
    """
    if part is None:
        return bool(shape)
    axis, start, count = part
    return 0 <= axis < len(shape) and start >= 0 and count >= 0 and start + count <= shape[axis]
