"""The two buffers of a sender, which take turns: while one bucket is delivered the next one is filled. And how an
engine reads a bucket that lies in a file."""

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

from rlhf_megatron.parallel.device import SharedMemory, open_shared, page_lock, page_unlock, synchronize
from rlhf_megatron.resharding.manifest import BucketManifest


@dataclass(frozen=True)
class Segment:
    """The bytes of a bucket from `start` on, in device memory of the rank that filled them. For one reader."""

    start: int
    memory: SharedMemory


Lent = Sequence[Sequence[Segment]]
"""By reader, in the order of engines and of their ranks: the segments of a bucket that lie with other ranks."""

Deliver = Callable[..., None]
"""Given a bucket, the bytes in its buffer ([num_bytes] uint8; this rank's, where others lend theirs) and `Lent` where
there is any, returns when all engines have read it, or raises."""


class Buffers:
    """Buffers in plain memory, of a GPU or the host. Used by one thread; deliveries run in another, one at a time."""

    def __init__(self, memory: Sequence[Tensor], deliver: Deliver) -> None:
        """`memory`: the buffers, each [capacity] uint8."""
        self._memory = list(memory)
        self._deliver = deliver
        self._locked: list[Tensor] = []
        self._pending: list[Future[None] | None] = [None] * len(self._memory)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-delivery")

    def lock_pages(self, device: torch.device) -> None:
        """Make copies from `device` fast, where the buffers are host memory."""
        self._locked = [memory for memory in self._memory if page_lock(memory, device)]

    @property
    def device(self) -> torch.device:
        """The device of the memory; a CPU where there is none."""
        return next((memory.device for memory in self._memory), torch.device("cpu"))

    def buffer(self, bucket: int) -> Tensor:
        """[capacity] uint8 to fill with bucket number `bucket`.

        Waits until the delivery that used it before has ended; raises that delivery's error.
        """
        slot = self._slot(bucket)
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            pending.result()  # transports have deadlines
        return self._memory[slot]

    def file(self, bucket: int) -> str:
        """Name of the file in the transfer directory that holds the bucket, for the manifest."""
        return f"in-memory-{self._slot(bucket)}"

    def send(self, manifest: BucketManifest, *lent: Lent) -> None:
        """Start the delivery of a filled buffer and return. `lent`: what other ranks have filled of it, if any did."""
        slot = self._slot(manifest.bucket)
        assert self._pending[slot] is None, f"buffer {slot} is still being delivered"
        raw = self._memory[slot][: manifest.num_bytes]
        synchronize(raw.device)  # other processes, and other streams of this one, read it
        self._pending[slot] = self._executor.submit(self._deliver, manifest, raw, *lent)

    def drain(self) -> None:
        """Wait for all deliveries; raises the first error."""
        failures = []
        for slot in range(len(self._memory)):
            try:
                self.buffer(slot)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for the delivery that runs, drop the others, free the memory. Never raises; safe to call twice."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        for memory in self._locked:
            page_unlock(memory)
        self._memory, self._locked, self._pending = [], [], []

    def _slot(self, bucket: int) -> int:
        return bucket % len(self._memory)


OpenBuffers = Callable[[int, int], Buffers]
"""Given the bytes of the largest bucket and the number of buckets, returns the sender's buffers."""


def num_buffers(num_buckets: int) -> int:
    return min(2, num_buckets)


def in_memory(device: torch.device, capacity: int, num_buckets: int, deliver: Deliver) -> Buffers:
    """`capacity`: bytes of the largest bucket."""
    shape = (num_buffers(num_buckets), max(capacity, 1))
    return Buffers([torch.empty(shape[1], dtype=torch.uint8, device=device) for _ in range(shape[0])], deliver)


def views(manifest: BucketManifest, *memory: tuple[int, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a bucket, by `TensorEntry.key`. `memory`: pieces of the bucket, [bytes] uint8, each with
    the byte at which it begins. Raises ValueError for a tensor that lies whole in no piece.
    """
    found = {}
    for entry in manifest.tensors:
        for start, piece in memory:
            if start <= entry.offset and entry.offset + entry.num_bytes <= start + piece.numel():
                found[entry.key] = replace(entry, offset=entry.offset - start).view(piece)
                break
        else:
            given = ", ".join(f"{start} to {start + piece.numel()}" for start, piece in memory) or "none"
            raise ValueError(
                f"{manifest.place}: tensor {entry.key!r} lies at bytes {entry.offset} to"
                f" {entry.offset + entry.num_bytes}, but the memory given has bytes {given}."
            )
    return found


def open_segments(segments: Sequence[Segment]) -> list[tuple[int, Tensor]]:
    """The pieces of a bucket that other processes lend, for `views`. Raises ValueError where one cannot be opened."""
    return [(segment.start, open_shared(segment.memory)) for segment in segments]


def map_bucket(path: Path, manifest: BucketManifest) -> Tensor:
    """[num_bytes] uint8, the bucket in its file, mapped privately: writing to it changes nothing outside. Valid while
    the file stays as it is.

    Raises ValueError for what is no plain file of the directory's owner or too short, OSError where there is none.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{manifest.place}: {path.name} is a link; {_RULE}") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != path.parent.stat().st_uid:
            raise ValueError(f"{manifest.place}: {path.name} is a link, of another user or no plain file; {_RULE}")
        end = manifest.file_offset + manifest.num_bytes
        if found.st_size < end:
            before = f" after the first {manifest.file_offset}" if manifest.file_offset else ""
            raise ValueError(
                f"{manifest.place}: {path.name} has {found.st_size} bytes, the manifest says"
                f" {manifest.num_bytes}{before}."
            )
        if not manifest.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(descriptor, end, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8)[manifest.file_offset :]
    finally:
        os.close(descriptor)


_RULE = "only plain files of the transfer directory are read."
