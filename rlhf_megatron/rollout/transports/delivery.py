"""One sender's buckets to several engines. An engine that fails is left out of the rest; the others get all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.models.table import Rule
from rlhf_megatron.resharding.buffers import Buffers, in_memory
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.plan import ALIGNMENT
from rlhf_megatron.resharding.sender import Place, SendReport, send_weights
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, WeightTransport
from rlhf_megatron.rollout.kinds import engine_kind
from rlhf_megatron.rollout.transports.base import Traffic, Transport
from rlhf_megatron.rollout.transports.disk import FileBuffers
from rlhf_megatron.rollout.transports.process_group import Groups
from rlhf_megatron.rollout.transports.tensor import SharedMemoryBuffers

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Delivery:
    """A context manager on a sending rank. Callable with a bucket: returns when all engines that still take part have
    read it.

    The failure of an engine is not raised: it would end the training ranks, whose weights are needed to mend it.
    """

    def __init__(
        self, transports: Sequence[Transport], kind: WeightTransport, transfer_dir: Path, place: Place
    ) -> None:
        """`transports`: one an engine. `place`: of the sender."""
        self.alignment = ALIGNMENT if kind == "tensor" else 1  # a broadcast and a safetensors file have no gaps
        self.failures: dict[str, str] = {}  # engine name -> what it said first; it has not got everything
        self.traffic = Traffic()
        self._kind = kind
        self._transfer_dir = transfer_dir
        self._place = place
        self._transports = tuple(transports)
        self._threads = ThreadPoolExecutor(max(1, len(self._transports)), thread_name_prefix="deliver")

    def open_buffers(self, capacity: int, num_buckets: int) -> Buffers:
        """Buffers that all transports can take buckets from; opens the transports, since some know where only then."""
        self._each(lambda transport: transport.open(), "before its first bucket")
        if self._kind != "disk" and {transport.memory for transport in self._transports} == {"device_memory"}:
            return in_memory(self._place.device, capacity, num_buckets, self)
        in_files = FileBuffers if self._kind == "disk" else SharedMemoryBuffers
        buffers = in_files(self._transfer_dir, str(self._place.coordinates), capacity, num_buckets, self)
        buffers.lock_pages(self._place.device)
        return buffers

    def __call__(self, manifest: BucketManifest, bucket: Tensor) -> None:
        for traffic in self._each(lambda one: one.deliver(manifest, bucket), f"while it was given {manifest}"):
            self.traffic += traffic
        faults.reach("sync.after_bucket")

    def _each(self, act: Callable[[Transport], T], when: str) -> list[T]:
        """Act on all that have not failed, at once; return what `act` returned for those that do not fail now."""
        standing = [transport for transport in self._transports if transport.name not in self.failures]
        futures = [(transport, self._threads.submit(act, transport)) for transport in standing]
        results = []
        for transport, future in futures:
            try:
                results.append(future.result())  # has the deadline of the transport
            except EngineError as error:
                self.failures[transport.name] = f"{str(error).rstrip('.')}, {when}."
                logger.warning("%s is left out of this weight sync: %s", transport.name, error)
        return results

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True)


def deliver_weights(
    export: Iterable[tuple[Rule, Tensor | None]],
    place: Place,
    groups: Groups,
    *,
    version: int,
    engines: Sequence[EngineAddress],
    transfer_dir: Path,
    bucket_bytes: int,
    dtype: str,
    transport: WeightTransport,
) -> SendReport:
    """Send what `export` yields to all engines, as `resharding.sender.send_weights` says, which every rank calls.

    `groups`: this process's groups with engines, kept between calls. An engine that fails stands in the report.
    """
    transports = [engine_kind(a.kind).transport(a, transport, transfer_dir, place, groups) for a in engines]
    with Delivery(transports, transport, transfer_dir, place) as delivery:
        report = send_weights(
            export,
            place,
            version=version,
            dtype=getattr(torch, dtype),
            bucket_bytes=bucket_bytes,
            open_buffers=delivery.open_buffers,
            alignment=delivery.alignment,
        )
    moved, needed = delivery.traffic.moved, delivery.traffic.needed
    return replace(report, failures=delivery.failures, bytes_moved=moved, bytes_needed=needed)
