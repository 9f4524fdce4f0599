"""Buckets in memory-mapped files of a directory that the engines of the same host can read."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest

_NUM_BUFFERS = 2


class SharedMemoryTransport:
    """Implements `transport.Transport`. The files disappear with `close`."""

    def __init__(
        self,
        directory: Path,
        sender: str,
        capacity: int,
        num_buckets: int,
        deliver: Callable[[BucketManifest], None],
    ) -> None:
        """`sender` names the files; `capacity`: bytes of the largest bucket; `deliver` returns when all engines have
        read the bucket, or raises. Raises ValueError when the directory has no room."""
        self._deliver = deliver
        self._paths = [directory / f"{sender.replace(' ', '-')}-{i}.bin" for i in range(min(_NUM_BUFFERS, num_buckets))]
        self._pending: list[Future[None] | None] = [None] * len(self._paths)
        self._buffers: list[Tensor] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-delivery")
        try:
            self._buffers = [_map_new_file(path, max(capacity, 1)) for path in self._paths]
        except BaseException:
            self.close()
            raise

    def buffer(self, bucket: int) -> Tensor:
        self._wait(bucket % len(self._buffers))
        return self._buffers[bucket % len(self._buffers)]

    def file(self, bucket: int) -> str:
        return self._paths[bucket % len(self._paths)].name

    def send(self, manifest: BucketManifest) -> None:
        slot = manifest.bucket % len(self._buffers)
        assert self._pending[slot] is None, f"buffer {slot} is still being delivered"
        self._pending[slot] = self._executor.submit(self._deliver, manifest)

    def drain(self) -> None:
        failures = []
        for slot in range(len(self._pending)):
            try:
                self._wait(slot)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pending = [None] * len(self._paths)
        self._buffers = []
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _wait(self, slot: int) -> None:
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            pending.result()


def _map_new_file(path: Path, num_bytes: int) -> Tensor:
    """[num_bytes] uint8, mapped and allocated: a full file system is an error now, not a SIGBUS while copying."""
    path.unlink(missing_ok=True)  # left behind by a process that was killed
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise ValueError(
            f"no room for a weight buffer of {num_bytes} bytes at {path}: {error.strerror}. Lower"
            " rollout.update_weights_bucket_megabytes or set rollout.transfer_dir to a larger file system."
        ) from error
    finally:
        os.close(descriptor)
