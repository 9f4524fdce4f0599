"""Buckets in memory-mapped files of a directory that the engines of the same host can read."""

from __future__ import annotations

import errno
import mmap
import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Deliver, Turns

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SharedMemoryTransport:
    """Implements `transport.Transport`. The files disappear with `close`."""

    def __init__(self, directory: Path, sender: str, capacity: int, num_buckets: int, deliver: Deliver) -> None:
        """`sender` names the files; `capacity`: bytes of the largest bucket. Raises ValueError when the directory has
        no room."""
        self._deliver = deliver
        self._turns = Turns(num_buckets)
        stem = sender.replace(" ", "-")
        self._paths = [directory / f"{stem}-{i}.bin" for i in range(self._turns.num_buffers)]
        self._buffers: list[Tensor] = []
        try:
            self._buffers = [_map_new_file(path, max(capacity, 1)) for path in self._paths]
        except BaseException:
            self.close()
            raise

    def buffer(self, bucket: int) -> Tensor:
        self._turns.wait(bucket)
        return self._buffers[self._turns.slot(bucket)]

    def file(self, bucket: int) -> str:
        return self._paths[self._turns.slot(bucket)].name

    def send(self, manifest: BucketManifest) -> None:
        raw = self._buffers[self._turns.slot(manifest.bucket)][: manifest.num_bytes]
        self._turns.start(manifest.bucket, partial(self._deliver, manifest, raw))

    def drain(self) -> None:
        self._turns.drain()

    def close(self) -> None:
        self._turns.close()
        self._buffers = []
        for path in self._paths:
            path.unlink(missing_ok=True)


def _map_new_file(path: Path, num_bytes: int) -> Tensor:
    """[num_bytes] uint8, mapped and allocated: a full file system is an error now, not a SIGBUS while copying."""
    path.unlink(missing_ok=True)  # left behind by a process that was killed
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        raise ValueError(
            f"no room for a weight buffer of {num_bytes} bytes at {path}: {error.strerror}. Lower"
            " rollout.update_weights_bucket_megabytes or set rollout.transfer_dir to a larger file system."
        ) from error
    finally:
        os.close(descriptor)
