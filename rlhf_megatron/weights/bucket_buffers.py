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
        """`memory`: the buffers, each [capacity] uint8."""
        self._buffers = list(memory)
        self._deliver_bucket = deliver_bucket
        self._locked_buffers: list[Tensor] = []
        self._pending_deliveries: list[Future[None] | None] = [None] * len(self._buffers)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-delivery")

    def lock_pages(self, device: torch.device) -> None:
        """Make copies from `device` fast, where the buffers are host memory."""
        self._locked_buffers = [
            memory for memory in self._buffers if page_lock_memory(memory, device)
        ]

    @property
    def device(self) -> torch.device:
        """The device of the memory; a CPU where there is none."""
        return next((memory.device for memory in self._buffers), torch.device("cpu"))

    def wait_for_buffer(self, bucket_index: int) -> Tensor:
        """[capacity] uint8 to fill with bucket number `bucket_index`.

        Waits until the delivery that used it before has ended; raises that delivery's error.
        """
        slot = self._buffer_index(bucket_index)
        pending = self._pending_deliveries[slot]
        self._pending_deliveries[slot] = None
        if pending is not None:
            pending.result()  # transports have deadlines
        return self._buffers[slot]

    def get_file_name(self, bucket_index: int) -> str:
        """Name of the file in the transfer directory that holds the bucket, for the manifest."""
        return f"in-memory-{self._buffer_index(bucket_index)}"

    def start_delivery(
        self, manifest: BucketManifest, lent_segments: LentSegments | None = None
    ) -> None:
        """Start the delivery of a filled buffer and return. `lent_segments`: what other ranks have
        filled of it, if any did."""
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
        """Wait for all deliveries; raises the first error."""
        failures = []
        for slot in range(len(self._buffers)):
            try:
                self.wait_for_buffer(slot)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for the delivery that runs, drop the others, free the memory. Never raises; safe
        to call twice.
        """
        self._executor.shutdown(wait=True, cancel_futures=True)
        for memory in self._locked_buffers:
            page_unlock_memory(memory)
        self._buffers = []
        self._locked_buffers = []
        self._pending_deliveries = []

    def _buffer_index(self, bucket_index: int) -> int:
        return bucket_index % len(self._buffers)


OpenBuffers = Callable[[int, int], BucketBuffers]
"""Given the bytes of the largest bucket and the number of buckets, returns the sender's buffers."""


def choose_num_buffers(num_buckets: int) -> int:
    return min(2, num_buckets)


def make_memory_buffers(
    device: torch.device, buffer_bytes: int, num_buckets: int, deliver_bucket: DeliverBucket
) -> BucketBuffers:
    """`buffer_bytes`: bytes of the largest bucket."""
    shape = (choose_num_buffers(num_buckets), max(buffer_bytes, 1))
    return BucketBuffers(
        [torch.empty(shape[1], dtype=torch.uint8, device=device) for _ in range(shape[0])],
        deliver_bucket,
    )


def view_bucket_tensors(
    manifest: BucketManifest, memory_pieces: Sequence[tuple[int, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of a bucket, by `TensorEntry.key`. `memory_pieces`: pieces of the bucket,
    [bytes] uint8, each with the byte at which it begins. Raises ValueError for a tensor that lies
    whole in no piece.
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
    """The pieces of a bucket that other processes lend, for `view_bucket_tensors`. Raises
    ValueError where one cannot be opened.
    """
    return [(segment.start, open_shared_memory(segment.memory)) for segment in segments]


def map_bucket_file(path: Path, manifest: BucketManifest) -> Tensor:
    """[num_bytes] uint8, the bucket in its file, mapped privately: writing to it changes nothing
    outside. Valid while the file stays as it is.

    Raises ValueError for what is no plain file of the directory's owner or too short, OSError where
    there is none.
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
