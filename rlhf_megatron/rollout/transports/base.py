"""What brings buckets of weights from one sender to one engine; one file beside this one for each
rollout.weight_transport."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_megatron.resharding.buffers import Lent
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.sglang.weights import Receipt

BucketMemory = Literal["shared_memory", "device_memory", "files"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one delivery, summed over the ranks of the engine."""

    moved: int = 0  # that travelled to them: what they read, or were sent
    needed: int = 0  # of what stands in them afterwards

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.needed + other.needed)


class Transport:
    """Used by one thread at a time. Every call has a deadline and raises EngineError."""

    name: str  # of the engine
    memory: BucketMemory  # where buckets must lie; known once it is open
    num_readers: int = 1  # ranks of the engine that open device memory

    def open(self, devices: Collection[str] = ("",)) -> None:
        """Prepare, once, before the first bucket of a sync. `devices`: what `parallel.device.shareable_id` says of
        those whose memory would be opened.
        """

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        """Returns when the engine has loaded the bucket, whose bytes may be overwritten then."""
        raise NotImplementedError

    def lend(self, manifest: BucketManifest, bucket: Tensor, others: Lent) -> Traffic:
        """Deliver a bucket of which parts lie in memory of other ranks' devices: `others`, by reader."""
        raise NotImplementedError


def traffic_of(receipts: Sequence[Receipt]) -> Traffic:
    """The traffic of a bucket that the ranks which wrote these receipts have taken."""
    moved = sum(receipt["num_bytes_read"] for receipt in receipts)
    return Traffic(moved, sum(receipt["num_bytes_standing"] for receipt in receipts))


def unseen_traffic(manifest: BucketManifest, num_ranks: int) -> Traffic:
    """The traffic to ranks that write no receipts: all of it goes to each, and stands in them once at least."""
    return Traffic(manifest.tensor_bytes * num_ranks, manifest.tensor_bytes)
