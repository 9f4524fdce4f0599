"""rollout.weight_transport tensor: buckets in memory of the same host. Mapped files, which engines
read, or device memory, which they open; an engine without the run's loader gets the bytes
inside the request.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.device import release_unopened_memory, share_device_memory
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineUnreachableError,
    InferenceEngine,
)
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import SGLangWeightVerbs
from rlhf_megatron.rollout.transports.bucket_transport import (
    BucketMemory,
    BucketTransport,
    DeliveryTraffic,
    estimate_traffic_without_receipts,
    sum_receipt_traffic,
)
from rlhf_megatron.weights.bucket_buffers import (
    BucketBuffers,
    DeliverBucket,
    LentSegment,
    LentSegments,
    choose_num_buffers,
)
from rlhf_megatron.weights.bucket_manifest import BucketManifest

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class MappedFilePool:
    """Memory-mapped files of one rank, kept from sync to sync, because fresh pages cost several
    times what a copy costs.
    """

    def __init__(self) -> None:
        self._tensor_by_path: dict[Path, Tensor] = {}

    def map_files(self, paths: Sequence[Path], num_bytes: int) -> list[Tensor]:
        """Return a mapped tensor [num_bytes] uint8 for each path, a kept one where it is large
        enough; unmap and remove all other files. Raise ValueError when the directory has no room.
        """
        for path in set(self._tensor_by_path) - set(paths):
            self._unmap_file(path)
        for path in paths:
            kept = self._tensor_by_path.get(path)
            if kept is None or kept.numel() < num_bytes or not path.exists():
                self._unmap_file(path)
                self._tensor_by_path[path] = _map_new_file(path, num_bytes)
        return [self._tensor_by_path[path][:num_bytes] for path in paths]

    def close(self) -> None:
        """Unmap and remove all files."""
        for path in list(self._tensor_by_path):
            self._unmap_file(path)

    def _unmap_file(self, path: Path) -> None:
        """Unmap and remove the file at `path`, where the pool has it."""
        if self._tensor_by_path.pop(path, None) is not None:
            path.unlink(missing_ok=True)


class SharedMemoryBuffers(BucketBuffers):
    """Buffers in memory-mapped files."""

    def __init__(
        self,
        directory: Path,
        sender: str,
        buffer_bytes: int,
        num_buckets: int,
        deliver_bucket: DeliverBucket,
        file_pool: MappedFilePool | None = None,
    ) -> None:
        """Open the buffers. `sender` names the files; `buffer_bytes` is the size of the largest
        bucket. The files stay in `file_pool`; None: they are removed by `close`. Raise ValueError
        when the directory has no room.
        """
        self._file_paths = _list_buffer_paths(directory, sender, num_buckets)
        self._file_pool = file_pool or MappedFilePool()
        self._keeps_files = file_pool is not None
        try:
            super().__init__(
                self._file_pool.map_files(self._file_paths, max(buffer_bytes, 1)), deliver_bucket
            )
        except BaseException:
            self._file_pool.close()
            raise

    def get_file_name(self, bucket_index: int) -> str:
        """Return the name of the file in which the bucket of this index lies."""
        return self._file_paths[self._buffer_index(bucket_index)].name

    def close(self) -> None:
        """Close the buffers, and remove the files unless a pool keeps them."""
        super().close()
        if not self._keeps_files:
            self._file_pool.close()


def _list_buffer_paths(directory: Path, sender: str, num_buckets: int) -> list[Path]:
    """Return the paths of the sender's buffer files, one for each buffer."""
    return [
        directory / f"{sender.replace(' ', '-')}-{i}.bin"
        for i in range(choose_num_buffers(num_buckets))
    ]


def attach_shared_buffers(
    directory: Path, sender: str, start_byte: int, num_bytes: int, num_buckets: int
) -> list[Tensor]:
    """Map bytes start_byte .. start_byte + num_bytes - 1 of each buffer that another rank of this
    machine has opened as SharedMemoryBuffers, and return the tensors; writes reach the other rank.
    """
    parts = []
    for path in _list_buffer_paths(directory, sender, num_buckets):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            mapped = (
                mmap.mmap(descriptor, num_bytes, offset=start_byte) if num_bytes else bytearray()
            )
            parts.append(
                torch.frombuffer(mapped, dtype=torch.uint8) if num_bytes else torch.empty(0)
            )
        finally:
            os.close(descriptor)
    return parts


class FileBucketTransport(BucketTransport):
    """Makes an engine read each bucket from its file."""

    def __init__(self, engine: InferenceEngine, bucket_memory: BucketMemory) -> None:
        """Deliver to this engine. `bucket_memory` is any kind that has files."""
        self.engine_name = engine.address.name
        self.bucket_memory = bucket_memory
        self._engine = engine

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Make the engine load the bucket from its file."""
        self._engine.update_weights(manifest)
        return DeliveryTraffic(manifest.tensor_bytes, manifest.tensor_bytes)


class LocalTensorTransport(FileBucketTransport):
    """Delivers each bucket to the bundled server as device memory, where the server sees the
    senders' devices, else as a file.
    """

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine, "shared_memory")
        self._local_engine = engine

    def prepare_sync(self, device_ids: Collection[str] = ("",)) -> None:
        """Ask the server for its devices, and choose device memory where it sees all of the
        senders'.
        """
        if all(device_ids) and set(device_ids) <= set(
            self._local_engine.fetch_server_info()["devices"]
        ):
            self.bucket_memory = "device_memory"

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Deliver the bucket as a file where it lies in main memory, else as lent device memory."""
        return (
            super().deliver_bucket(manifest, bucket)
            if bucket.device.type == "cpu"
            else self.lend_bucket(manifest, bucket, [()])
        )

    def lend_bucket(
        self, manifest: BucketManifest, bucket: Tensor, segments_by_reader: LentSegments
    ) -> DeliveryTraffic:
        """Lend the server the device memory of the bucket and of its parts on other devices."""
        segments = [LentSegment(0, share_device_memory(bucket)), *segments_by_reader[0]]
        with decline_if_unreachable([segments]):
            self._local_engine.load_lent_weights(manifest, segments)
        return DeliveryTraffic(manifest.tensor_bytes, manifest.tensor_bytes)


class SGLangTensorTransport(BucketTransport):
    """Delivers each bucket to stock SGLang as device memory, as a file to read, or, without the
    run's loader, inside the request.
    """

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.engine_name = address.name
        self.bucket_memory = "shared_memory" if address.has_loader else "device_memory"
        self.num_reading_ranks = address.tp_size
        self._address = address
        self._weight_verbs = SGLangWeightVerbs(address, transfer_dir)

    def prepare_sync(self, device_ids: Collection[str] = ("",)) -> None:
        """Ask each rank whether it sees the senders' devices, and choose device memory where all
        do; otherwise the ranks read mapped files.
        """
        if self._address.has_loader and all(device_ids):
            receipts = self._weight_verbs.send_order({"describe": True}, "question for its devices")
            if all(set(device_ids) <= set(receipt["devices"]) for receipt in receipts):
                self.bucket_memory = "device_memory"

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Deliver the bucket inside the request, from its file or as lent device memory, whichever
        fits.
        """
        if not self._address.has_loader:
            self._weight_verbs.load_bucket_by_value(manifest, bucket)
            return estimate_traffic_without_receipts(manifest, self._address.tp_size)
        if bucket.device.type == "cpu":
            return sum_receipt_traffic(self._weight_verbs.load_bucket(manifest))
        return self.lend_bucket(manifest, bucket, [()] * self.num_reading_ranks)

    def lend_bucket(
        self, manifest: BucketManifest, bucket: Tensor, segments_by_reader: LentSegments
    ) -> DeliveryTraffic:
        """Lend each rank the device memory of the bucket and of its parts on other devices."""
        lent: list[list[LentSegment]] = []

        def share_segments() -> LentSegments:
            """Lend the memory anew for one request, and note the segments for the case that the
            engine dies.
            """
            lent[:] = [
                [LentSegment(0, share_device_memory(bucket)), *segments]
                for segments in segments_by_reader
            ]
            return lent

        with decline_if_unreachable(lent):
            return sum_receipt_traffic(
                self._weight_verbs.load_bucket(
                    manifest, share_segments, is_lent_once=any(segments_by_reader)
                )
            )


@contextlib.contextmanager
def decline_if_unreachable(lent_segments: LentSegments) -> Iterator[None]:
    """Count the segments as closed where the block raises EngineUnreachableError: an engine that
    has died opens no memory any more. An engine that answers has closed what it opened, and a late
    one may still open it.
    """
    try:
        yield
    except EngineUnreachableError:
        decline_lent_segments(lent_segments)
        raise


def decline_lent_segments(lent_segments: LentSegments) -> None:
    """Count all of these lent segments as closed, because no engine will open them."""
    for segments in lent_segments:
        for segment in segments:
            release_unopened_memory(segment.memory)


def _map_new_file(path: Path, num_bytes: int) -> Tensor:
    """Return a new file as [num_bytes] uint8, mapped and allocated, so that a full file system is
    an error now instead of a SIGBUS while copying. Raise ValueError where there is no room.
    """
    path.unlink(missing_ok=True)  # left behind by a process that was killed
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise ValueError(
            f"no room for a weight buffer of {num_bytes} bytes at {path}: {error.strerror}. Lower"
            " rollout.update_weights_bucket_megabytes or set rollout.transfer_dir to a larger"
            " file system."
        ) from error
    finally:
        os.close(descriptor)
