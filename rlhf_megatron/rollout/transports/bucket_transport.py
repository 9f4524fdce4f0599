"""What brings buckets of weights from one sender to one engine; one file beside this one for each
rollout.weight_transport."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_megatron.rollout.sglang.sglang_weight_verbs import Receipt
from rlhf_megatron.weights.bucket_buffers import LentSegments
from rlhf_megatron.weights.bucket_manifest import BucketManifest

BucketMemory = Literal["shared_memory", "device_memory", "files"]


@dataclass(frozen=True)
class DeliveryTraffic:
    """Bytes of one delivery, summed over the ranks of the engine."""

    bytes_moved: int = 0  # that travelled to them: what they read, or were sent
    bytes_needed: int = 0  # of what stands in them afterwards

    def __add__(self, other: DeliveryTraffic) -> DeliveryTraffic:
        """Return the sum of both."""
        return DeliveryTraffic(
            self.bytes_moved + other.bytes_moved, self.bytes_needed + other.bytes_needed
        )


class BucketTransport:
    """Brings buckets of weights from one sender to one engine. One thread at a time uses it. Every
    call has a deadline and raises EngineError.
    """

    engine_name: str  # of the engine
    bucket_memory: BucketMemory  # where buckets must lie; known once it is open
    num_reading_ranks: int = 1  # ranks of the engine that open device memory

    def prepare_sync(self, device_ids: Collection[str] = ("",)) -> None:
        """Prepare, once, before the first bucket of a sync; it may set `bucket_memory`.
        `device_ids` are the ids by `device.get_shareable_device_id` of the devices whose memory the
        engine would open, "" for one that cannot be shared.
        """

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Deliver a bucket. Return when the engine has loaded it; its bytes may be overwritten
        then.
        """
        raise NotImplementedError

    def lend_bucket(
        self, manifest: BucketManifest, bucket: Tensor, segments_by_reader: LentSegments
    ) -> DeliveryTraffic:
        """Deliver a bucket of which parts lie in memory of other ranks' devices.
        `segments_by_reader` are those parts for each reading rank of the engine.
        """
        raise NotImplementedError


def sum_receipt_traffic(receipts: Sequence[Receipt]) -> DeliveryTraffic:
    """Return the traffic of a bucket, summed over the receipts of the engine's ranks."""
    moved = sum(receipt["num_bytes_read"] for receipt in receipts)
    return DeliveryTraffic(moved, sum(receipt["num_bytes_standing"] for receipt in receipts))


def estimate_traffic_without_receipts(manifest: BucketManifest, num_ranks: int) -> DeliveryTraffic:
    """Return the traffic to ranks that write no receipts: the whole bucket moves to each rank, and
    is held once at least.
    """
    return DeliveryTraffic(manifest.tensor_bytes * num_ranks, manifest.tensor_bytes)
