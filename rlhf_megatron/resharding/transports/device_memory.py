"""Buckets in the sender's own memory, a GPU's where it has one: what is broadcast, or opened by CUDA IPC.

Nothing lies in the transfer directory; a courier takes the bytes from the buffer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rlhf_megatron.parallel.device import synchronize
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Deliver, Turns


class DeviceMemoryTransport:
    """Implements `transport.Transport`."""

    def __init__(self, device: torch.device, capacity: int, num_buckets: int, deliver: Deliver) -> None:
        """`capacity`: bytes of the largest bucket."""
        self._deliver = deliver
        self._turns = Turns(num_buckets)
        self._device = device
        self._buffers = [
            torch.empty(max(capacity, 1), dtype=torch.uint8, device=device) for _ in range(self._turns.num_buffers)
        ]

    def buffer(self, bucket: int) -> Tensor:
        self._turns.wait(bucket)
        return self._buffers[self._turns.slot(bucket)]

    def file(self, bucket: int) -> str:
        return f"in-memory-{self._turns.slot(bucket)}"

    def send(self, manifest: BucketManifest) -> None:
        # Other processes, and other streams of this one, read it: what fills it must have ended by then.
        synchronize(self._device)
        raw = self._buffers[self._turns.slot(manifest.bucket)][: manifest.num_bytes]
        self._turns.start(manifest.bucket, partial(self._deliver, manifest, raw))

    def drain(self) -> None:
        self._turns.drain()

    def close(self) -> None:
        self._turns.close()
        self._buffers = []
