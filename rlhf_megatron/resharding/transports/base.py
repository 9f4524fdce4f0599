"""How filled buckets leave a sender. One file a medium: `shared_memory`, `device_memory`, `disk`; `sender` picks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol

from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest

NUM_BUFFERS = 2
Medium = Literal["shared_memory", "device_memory", "disk"]
Deliver = Callable[[BucketManifest, Tensor], None]
"""Given a bucket and the bytes in its buffer ([num_bytes] uint8), returns when all engines have read it, or raises."""


class Transport(Protocol):
    """Two buffers that take turns: while one is being delivered the other is filled. Used by one thread."""

    def buffer(self, bucket: int) -> Tensor:
        """[capacity] uint8 to fill with bucket number `bucket`.

        Waits until the delivery that used it before has ended; raises that delivery's error.
        """

    def file(self, bucket: int) -> str:
        """Name under which that bucket lies in the transfer directory, for the manifest."""

    def send(self, manifest: BucketManifest) -> None:
        """Start the delivery of a filled buffer and return."""

    def drain(self) -> None:
        """Wait for all deliveries; raises the first error."""

    def close(self) -> None:
        """Wait for what is being delivered, free the buffers. Never raises a delivery's error; safe to call twice."""


class Turns:
    """Deliveries in a thread of their own, one after the other; and which buffers wait for theirs."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buffers = min(NUM_BUFFERS, num_buckets)
        self._pending: list[Future[None] | None] = [None] * self.num_buffers
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-delivery")

    def slot(self, bucket: int) -> int:
        """Which buffer a bucket uses."""
        return bucket % self.num_buffers

    def start(self, bucket: int, deliver: Callable[[], None]) -> None:
        slot = self.slot(bucket)
        assert self._pending[slot] is None, f"buffer {slot} is still being delivered"
        self._pending[slot] = self._executor.submit(deliver)

    def wait(self, bucket: int) -> None:
        """Until the last delivery from this bucket's buffer has ended; raises its error."""
        slot = self.slot(bucket)
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            pending.result()  # couriers have deadlines

    def drain(self) -> None:
        """Wait for all deliveries; raises the first error."""
        failures = []
        for slot in range(self.num_buffers):
            try:
                self.wait(slot)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for the delivery that runs; those that have not begun never do. Safe to call twice."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pending = [None] * self.num_buffers
