"""rollout.weight_transport tensor: buckets in memory of the same host. Mapped files, which engines read, or device
memory, which they open; an engine without the run's loader gets the bytes inside the request."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.parallel.device import decline, share
from rlhf_megatron.resharding.buffers import Buffers, Deliver, Lent, Segment, num_buffers
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import Engine, EngineAddress, EngineUnreachableError
from rlhf_megatron.rollout.local.client import LocalEngine
from rlhf_megatron.rollout.sglang.weights import SGLangVerbs
from rlhf_megatron.rollout.transports.base import (
    BucketMemory,
    Traffic,
    Transport,
    traffic_of,
    unseen_traffic,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SharedFiles:
    """Memory-mapped files of one rank, kept from sync to sync: fresh pages cost several times what a copy does."""

    def __init__(self) -> None:
        self._mapped: dict[Path, Tensor] = {}

    def take(self, paths: Sequence[Path], num_bytes: int) -> list[Tensor]:
        """One for each path, [num_bytes] uint8; all others go. Raises ValueError when the directory has no room."""
        for path in set(self._mapped) - set(paths):
            self._drop(path)
        for path in paths:
            kept = self._mapped.get(path)
            if kept is None or kept.numel() < num_bytes or not path.exists():
                self._drop(path)
                self._mapped[path] = _map_new_file(path, num_bytes)
        return [self._mapped[path][:num_bytes] for path in paths]

    def close(self) -> None:
        for path in list(self._mapped):
            self._drop(path)

    def _drop(self, path: Path) -> None:
        if self._mapped.pop(path, None) is not None:
            path.unlink(missing_ok=True)


class SharedMemoryBuffers(Buffers):
    """Buffers in memory-mapped files."""

    def __init__(
        self,
        directory: Path,
        sender: str,
        capacity: int,
        num_buckets: int,
        deliver: Deliver,
        kept: SharedFiles | None = None,
    ) -> None:
        """`sender` names the files; `capacity`: bytes of the largest bucket. `kept`: where the files stay afterwards;
        None: they disappear with `close`. Raises ValueError when the directory has no room."""
        self._paths = _paths_of(directory, sender, num_buckets)
        self._files, self._is_kept = kept or SharedFiles(), kept is not None
        try:
            super().__init__(self._files.take(self._paths, max(capacity, 1)), deliver)
        except BaseException:
            self._files.close()
            raise

    def file(self, bucket: int) -> str:
        return self._paths[self._slot(bucket)].name

    def close(self) -> None:
        super().close()
        if not self._is_kept:
            self._files.close()


def _paths_of(directory: Path, sender: str, num_buckets: int) -> list[Path]:
    return [directory / f"{sender.replace(' ', '-')}-{i}.bin" for i in range(num_buffers(num_buckets))]


def attach_buffers(directory: Path, sender: str, start: int, num_bytes: int, num_buckets: int) -> list[Tensor]:
    """Bytes start .. start + num_bytes - 1 of each buffer that another rank has opened as SharedMemoryBuffers."""
    parts = []
    for path in _paths_of(directory, sender, num_buckets):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            mapped = mmap.mmap(descriptor, num_bytes, offset=start) if num_bytes else bytearray()
            parts.append(torch.frombuffer(mapped, dtype=torch.uint8) if num_bytes else torch.empty(0))
        finally:
            os.close(descriptor)
    return parts


class FileTransport(Transport):
    """Has an engine read each bucket from its file."""

    def __init__(self, engine: Engine, memory: BucketMemory) -> None:
        """`memory`: any that has files."""
        self.name = engine.address.name
        self.memory = memory
        self._engine = engine

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        self._engine.update_weights(manifest)
        return Traffic(manifest.tensor_bytes, manifest.tensor_bytes)


class LocalTensorTransport(FileTransport):
    """Gives the bundled server each bucket as device memory, where it sees the senders' devices, or as a file."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine, "shared_memory")
        self._client = engine

    def open(self, devices: Collection[str] = ("",)) -> None:
        if all(devices) and set(devices) <= set(self._client.info()["devices"]):
            self.memory = "device_memory"

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        return super().deliver(manifest, bucket) if bucket.device.type == "cpu" else self.lend(manifest, bucket, [()])

    def lend(self, manifest: BucketManifest, bucket: Tensor, others: Lent) -> Traffic:
        segments = [Segment(0, share(bucket)), *others[0]]
        with given_back([segments]):
            self._client.open_weights(manifest, segments)
        return Traffic(manifest.tensor_bytes, manifest.tensor_bytes)


class SGLangTensorTransport(Transport):
    """Gives stock SGLang each bucket as device memory, as a file to read, or inside the request."""

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.name = address.name
        self.memory = "shared_memory" if address.has_loader else "device_memory"
        self.num_readers = address.tp_size
        self._address = address
        self._verbs = SGLangVerbs(address, transfer_dir)

    def open(self, devices: Collection[str] = ("",)) -> None:
        """Ask each rank whether it sees the senders' devices; otherwise it gets mapped files."""
        if self._address.has_loader and all(devices):
            receipts = self._verbs.order({"describe": True}, "question for its devices")
            if all(set(devices) <= set(receipt["devices"]) for receipt in receipts):
                self.memory = "device_memory"

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        if not self._address.has_loader:
            self._verbs.load_by_value(manifest, bucket)
            return unseen_traffic(manifest, self._address.tp_size)
        if bucket.device.type == "cpu":
            return traffic_of(self._verbs.load(manifest))
        return self.lend(manifest, bucket, [()] * self.num_readers)

    def lend(self, manifest: BucketManifest, bucket: Tensor, others: Lent) -> Traffic:
        lent: list[list[Segment]] = []

        def lend() -> Lent:
            lent[:] = [[Segment(0, share(bucket)), *segments] for segments in others]
            return lent

        with given_back(lent):
            return traffic_of(self._verbs.load(manifest, lend, is_lent_once=any(others)))


@contextlib.contextmanager
def given_back(lent: Lent) -> Iterator[None]:
    """Around a request: an engine that has died opens nothing of it any more. One that answers has closed what it
    opened, and one that is late may open it yet."""
    try:
        yield
    except EngineUnreachableError:
        decline_all(lent)
        raise


def decline_all(lent: Lent) -> None:
    """Take all of that for closed."""
    for segments in lent:
        for segment in segments:
            decline(segment.memory)


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
