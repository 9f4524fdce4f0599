"""rollout.weight_transport tensor: buckets in memory of the same host. Mapped files, which engines read, or device
memory, which they open; an engine without the run's loader gets the bytes inside the request."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.parallel.device import can_share, device_id, share
from rlhf_megatron.resharding.buffers import Buffers, Deliver, num_buffers
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import Engine, EngineAddress
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


class SharedMemoryBuffers(Buffers):
    """Buffers in memory-mapped files, which disappear with `close`."""

    def __init__(self, directory: Path, sender: str, capacity: int, num_buckets: int, deliver: Deliver) -> None:
        """`sender` names the files; `capacity`: bytes of the largest bucket. Raises ValueError when the directory has
        no room."""
        stem = sender.replace(" ", "-")
        self._paths = [directory / f"{stem}-{i}.bin" for i in range(num_buffers(num_buckets))]
        try:
            super().__init__([_map_new_file(path, max(capacity, 1)) for path in self._paths], deliver)
        except BaseException:
            self._remove()
            raise

    def file(self, bucket: int) -> str:
        return self._paths[self._slot(bucket)].name

    def close(self) -> None:
        super().close()
        self._remove()

    def _remove(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


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
    """Gives the bundled server each bucket as device memory, where it sees the sender's device, or as a file."""

    def __init__(self, engine: LocalEngine, device: torch.device) -> None:
        """`device`: of the sender."""
        super().__init__(engine, "shared_memory")
        self._client = engine
        self._device = device

    def open(self) -> None:
        if can_share(self._device) and device_id(self._device) in self._client.info()["devices"]:
            self.memory = "device_memory"

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        if bucket.device.type == "cpu":
            return super().deliver(manifest, bucket)
        self._client.open_weights(manifest, share(bucket))
        return Traffic(manifest.tensor_bytes, manifest.tensor_bytes)


class SGLangTensorTransport(Transport):
    """Gives stock SGLang each bucket as device memory, as a file to read, or inside the request."""

    def __init__(self, address: EngineAddress, transfer_dir: Path, device: torch.device) -> None:
        """`device`: of the sender."""
        self.name = address.name
        self.memory = "shared_memory" if address.has_loader else "device_memory"
        self._address = address
        self._device = device
        self._verbs = SGLangVerbs(address, transfer_dir)

    def open(self) -> None:
        """Ask each rank whether it sees the sender's device; otherwise it gets mapped files. A rank that does not see
        it would end its server when it is told to open memory there."""
        if self._address.has_loader and can_share(self._device):
            receipts = self._verbs.order({"describe": True}, "question for its devices")
            mine = device_id(self._device)
            if all(mine in receipt["devices"] for receipt in receipts):
                self.memory = "device_memory"

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        if not self._address.has_loader:
            self._verbs.load_by_value(manifest, bucket)
            return unseen_traffic(manifest, self._address.tp_size)
        shared = bucket if bucket.device.type != "cpu" else None
        return traffic_of(self._verbs.load(manifest, shared))


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
