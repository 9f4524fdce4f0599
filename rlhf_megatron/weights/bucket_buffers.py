"""The two buffers of a sender, which take turns: while one bucket is delivered the next one is
filled. And how an engine reads a bucket that lies in a file.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.device import (
    SharedDeviceMemory,
    open_shared_memory,
    page_lock_memory,
    page_unlock_memory,
    synchronize_device,
)
from rlhf_megatron.weights.bucket_manifest import BucketManifest

_RULE = "only plain files of the transfer directory are read."


@dataclass(frozen=True)
class LentSegment:
    """The bytes of a bucket from `start` on, in device memory of the rank that filled them.
    For one reader.
    """

    start: int
    memory: SharedDeviceMemory


LentSegments = Sequence[Sequence[LentSegment]]
"""By reader, in the order of engines and of their ranks: the segments of a bucket that lie
with other ranks.
"""

DeliverBucket = Callable[..., None]
"""Given a bucket, the bytes in its buffer ([num_bytes] uint8; this rank's, where others lend
theirs) and `LentSegments` where there is any, returns when all engines have read it, or raises.
"""


class BucketBuffers:
    """Buffers in plain memory, of a GPU or the host. Used by one thread; deliveries run in another,
    one at a time.
    """

    def __init__(self, memory: Sequence[Tensor], deliver_bucket: DeliverBucket) -> None:
        """Keep the buffers `memory`, each [capacity] uint8, and the function that delivers a filled
        one.
        """
        self._buffers = list(memory)
        self._deliver_bucket = deliver_bucket
        self._locked_buffers: list[Tensor] = []
        self._pending_deliveries: list[Future[None] | None] = [None] * len(self._buffers)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-delivery")

    def lock_pages(self, device: torch.device) -> None:
        """Page-lock the buffers that lie in host memory, so that copies from `device` are fast."""
        self._locked_buffers = [
            memory for memory in self._buffers if page_lock_memory(memory, device)
        ]

    @property
    def device(self) -> torch.device:
        """Return the device of the buffers; the CPU where there are no buffers."""
        return next((memory.device for memory in self._buffers), torch.device("cpu"))

    def wait_for_buffer(self, bucket_index: int) -> Tensor:
        """Return the buffer, [capacity] uint8, that bucket number `bucket_index` is to be written
        into.

        Wait first until the earlier delivery from the same buffer has ended, and raise the error of
        that delivery if it failed.
        """
        slot = self._buffer_index(bucket_index)
        pending = self._pending_deliveries[slot]
        self._pending_deliveries[slot] = None
        if pending is not None:
            pending.result()  # transports have deadlines
        return self._buffers[slot]

    def get_file_name(self, bucket_index: int) -> str:
        """Return the file name that the bucket's manifest gives. The bucket lies in memory: there
        is no such file.
        """
        return f"in-memory-{self._buffer_index(bucket_index)}"

    def start_delivery(
        self, manifest: BucketManifest, lent_segments: LentSegments | None = None
    ) -> None:
        """Start to deliver the bucket that was written into its buffer, and return without waiting.
        `lent_segments`: the parts of the bucket that lie in other ranks' memory, if there are any.
        """
        slot = self._buffer_index(manifest.bucket)
        assert self._pending_deliveries[slot] is None, f"buffer {slot} is still being delivered"
        raw = self._buffers[slot][: manifest.num_bytes]
        synchronize_device(raw.device)  # other processes, and other streams of this one, read it
        if lent_segments is None:
            delivery = self._executor.submit(self._deliver_bucket, manifest, raw)
        else:
            delivery = self._executor.submit(self._deliver_bucket, manifest, raw, lent_segments)
        self._pending_deliveries[slot] = delivery

    def wait_for_deliveries(self) -> None:
        """Wait until all deliveries have ended. Raise the first error among them."""
        failures = []
        for slot in range(len(self._buffers)):
            try:
                self.wait_for_buffer(slot)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for the delivery in progress, drop the deliveries that have not begun, and free the
        buffers. Never raise; a second call does nothing.
        """
        self._executor.shutdown(wait=True, cancel_futures=True)
        for memory in self._locked_buffers:
            page_unlock_memory(memory)
        self._buffers = []
        self._locked_buffers = []
        self._pending_deliveries = []

    def _buffer_index(self, bucket_index: int) -> int:
        """Return the number of the buffer that a bucket uses: buckets take the buffers in turn."""
        return bucket_index % len(self._buffers)


OpenBuffers = Callable[[int, int], BucketBuffers]
"""Given the bytes of the largest bucket and the number of buckets, returns the sender's buffers."""


def choose_num_buffers(num_buckets: int) -> int:
    """Return the number of buffers of a sender: two, or as many as there are buckets if fewer."""
    return min(2, num_buckets)


def make_memory_buffers(
    device: torch.device, buffer_bytes: int, num_buckets: int, deliver_bucket: DeliverBucket
) -> BucketBuffers:
    """Allocate the sender's buffers on `device`: at most two, each of `buffer_bytes`, the bytes of
    the largest bucket (at least one byte).
    """
    shape = (choose_num_buffers(num_buckets), max(buffer_bytes, 1))
    return BucketBuffers(
        [torch.empty(shape[1], dtype=torch.uint8, device=device) for _ in range(shape[0])],
        deliver_bucket,
    )


def view_bucket_tensors(
    manifest: BucketManifest, memory_pieces: Sequence[tuple[int, Tensor]]
) -> dict[str, Tensor]:
    """Return views of the tensors of a bucket, by `TensorEntry.key`. `memory_pieces`: pieces of the
    bucket, [bytes] uint8, each with the number of its first byte in the bucket. Raise ValueError
    for a tensor that does not lie whole in one piece.
    """
    found = {}
    for entry in manifest.tensors:
        for start, piece in memory_pieces:
            if start <= entry.offset and entry.offset + entry.num_bytes <= start + piece.numel():
                found[entry.key] = replace(entry, offset=entry.offset - start).view_in_bucket(piece)
                break
        else:
            given = (
                ", ".join(f"{start} to {start + piece.numel()}" for start, piece in memory_pieces)
                or "none"
            )
            raise ValueError(
                f"{manifest.label}: tensor {entry.key!r} lies at bytes {entry.offset} to"
                f" {entry.offset + entry.num_bytes}, but the memory given has bytes {given}."
            )
    return found


def open_lent_segments(segments: Sequence[LentSegment]) -> list[tuple[int, Tensor]]:
    """Open the pieces of a bucket that other processes lend, and return (first byte, [bytes] uint8)
    of each, for `view_bucket_tensors`. Raise ValueError where a piece cannot be opened.
    """
    return [(segment.start, open_shared_memory(segment.memory)) for segment in segments]


def map_bucket_file(path: Path, manifest: BucketManifest) -> Tensor:
    """Map the file of a bucket and return the bucket's bytes, [num_bytes] uint8. The mapping is
    private: writing to it changes nothing outside. It is valid while the file is not changed.

    Raise ValueError for a link, a file of another user than the directory's, or a file that is too
    short; OSError where there is no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{manifest.label}: {path.name} is a link; {_RULE}") from error
        raise
    try:
        found = os.fstat(descriptor)
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_nlink != 1
            or found.st_uid != path.parent.stat().st_uid
        ):
            raise ValueError(
                f"{manifest.label}: {path.name} is a link, of another user or no plain"
                f" file; {_RULE}"
            )
        end = manifest.file_offset + manifest.num_bytes
        if found.st_size < end:
            before = f" after the first {manifest.file_offset}" if manifest.file_offset else ""
            raise ValueError(
                f"{manifest.label}: {path.name} has {found.st_size} bytes, the manifest says"
                f" {manifest.num_bytes}{before}."
            )
        if not manifest.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(descriptor, end, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8)[manifest.file_offset :]
    finally:
        os.close(descriptor)
