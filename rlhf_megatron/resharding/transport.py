"""How filled buckets get from a sender to the engines. One file a medium; `shared_memory` is the first."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest


class Transport(Protocol):
    """Two buffers that take turns: while one is being delivered the other is filled. Used by one thread."""

    def buffer(self, bucket: int) -> Tensor:
        """[capacity] uint8 in host memory to fill with bucket number `bucket`.

        Waits until the delivery that used it before has ended; raises that delivery's error.
        """

    def file(self, bucket: int) -> str:
        """Name of that buffer in the transfer directory, for the manifest."""

    def send(self, manifest: BucketManifest) -> None:
        """Start the delivery of a filled buffer and return."""

    def drain(self) -> None:
        """Wait for all deliveries; raises the first error."""

    def close(self) -> None:
        """Wait for what is being delivered, free the buffers. Never raises a delivery's error; safe to call twice."""
