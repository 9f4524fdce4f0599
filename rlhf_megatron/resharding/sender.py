"""The trainer's side of a weight sync: every rank calls `send_weights`, one rank of each pipeline stage sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.data import codec
from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.layout import Coordinates
from rlhf_megatron.resharding.agreement import agree
from rlhf_megatron.resharding.gather import gather_packed, pack_shards, unpack_shards, write_bucket
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.plan import ALIGNMENT, Bucket, fingerprint, oversized, plan_buckets
from rlhf_megatron.resharding.transports.base import Deliver, Medium, Transport
from rlhf_megatron.resharding.transports.device_memory import DeviceMemoryTransport
from rlhf_megatron.resharding.transports.disk import DiskTransport
from rlhf_megatron.resharding.transports.shared_memory import SharedMemoryTransport

logger = logging.getLogger(__name__)


class Place(Protocol):
    """What is needed of a `parallel.world.World`."""

    @property
    def coordinates(self) -> Coordinates: ...
    @property
    def tp_group(self) -> ProcessGroup: ...
    @property
    def device(self) -> torch.device: ...


@codec.register
@dataclass(frozen=True)
class SendReport:
    """What one rank sent; all zero and empty on ranks that are no senders."""

    num_bytes: int  # of tensors
    seconds: float
    digests: dict[str, str]  # Hugging Face name -> digest of what was exported, in the engine's type
    failures: dict[str, str] = field(default_factory=dict)  # engine that did not get everything -> what it said
    bytes_moved: int = 0  # to the ranks of all engines: what they read or were sent
    bytes_needed: int = 0  # of what stands in the ranks of all engines afterwards


def _shared_memory() -> Medium:
    return "shared_memory"


def send_weights(
    export: Iterable[tuple[Rule, Tensor]],
    place: Place,
    *,
    version: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    transfer_dir: Path,
    deliver: Deliver,
    choose_medium: Callable[[], Medium] = _shared_memory,
    alignment: int = ALIGNMENT,
) -> SendReport:
    """Stream this stage's weights to the engines. Call on every rank of the pool.

    Of each pipeline stage the rank (dp 0, cp 0, tp 0) sends; the other tp ranks of dp 0 and cp 0 give it their shards;
    all others, which hold the same shards, return at once. `export`: this rank's shards in table order. `dtype`: the
    engines'. `deliver` is called on senders only, from one other thread, one bucket at a time; it returns when every
    engine has read the bucket, or raises. `choose_medium` is called on senders only, once, before that. `alignment`:
    see `plan_buckets`; broadcasts and files take 1.

    Raises what failed on the rank where it failed, and SyncAbortedError on the other ranks of its tp group: no rank is
    left in a collective. Engines must then be taken as stale.
    """
    if place.coordinates.dp != 0 or place.coordinates.cp != 0:
        return SendReport(0, 0.0, {})
    start = time.monotonic()
    shards: dict[str, Tensor] = {}
    buckets: tuple[Bucket, ...] = ()
    transport: Transport | None = None
    failure: Exception | None = None
    try:
        try:
            exported = list(export)
            shards = {rule.megatron_name: tensor for rule, tensor in exported}
            rules = [rule for rule, _ in exported]
            buckets = plan_buckets(rules, str(dtype).removeprefix("torch."), bucket_bytes, alignment)
            if place.coordinates.tp == 0:
                transport = _open_transport(buckets, place, bucket_bytes, transfer_dir, deliver, choose_medium())
        except Exception as error:  # told to the other ranks first
            failure = error
        agree(failure, place.tp_group, place.device, plan=fingerprint(buckets))
        digests = _send_buckets(buckets, shards, place, version, dtype, transport)
    finally:
        if transport is not None:
            transport.close()
    num_bytes = sum(slot.num_bytes for bucket in buckets for slot in bucket.slots) if digests else 0
    return SendReport(num_bytes, time.monotonic() - start, digests)


def _open_transport(
    buckets: tuple[Bucket, ...],
    place: Place,
    bucket_bytes: int,
    transfer_dir: Path,
    deliver: Deliver,
    medium: Medium,
) -> Transport:
    notice = oversized(buckets, bucket_bytes)
    if notice is not None:
        logger.warning("%s: %s", place.coordinates, notice)
    capacity = max((bucket.num_bytes for bucket in buckets), default=0)
    if medium == "device_memory":
        return DeviceMemoryTransport(place.device, capacity, len(buckets), deliver)
    in_files = DiskTransport if medium == "disk" else SharedMemoryTransport
    return in_files(transfer_dir, str(place.coordinates), capacity, len(buckets), deliver)


def _send_buckets(
    buckets: tuple[Bucket, ...],
    shards: Mapping[str, Tensor],
    place: Place,
    version: int,
    dtype: torch.dtype,
    transport: Transport | None,
) -> dict[str, str]:
    """Digests by name on the sender. A failure is kept until the ranks agree, before the next gather."""
    digests: dict[str, str] = {}
    failure: Exception | None = None
    for bucket in buckets:
        packed, parts = torch.empty(0), []
        if failure is None:
            try:
                if place.tp_group.size() > 1:
                    packed = pack_shards(bucket, shards, dtype)
            except Exception as error:  # told to the other ranks first
                failure = error
        agree(failure, place.tp_group, place.device)
        if place.tp_group.size() > 1:
            parts = gather_packed(packed, place.tp_group)
        if transport is not None:
            try:
                manifest = _fill(bucket, parts, shards, place, version, dtype, transport)
                digests |= {entry.name: entry.digest for entry in manifest.tensors}
                transport.send(manifest)
            except Exception as error:  # told to the other ranks first
                failure = error
    if transport is not None and failure is None:
        try:
            transport.drain()
        except Exception as error:  # told to the other ranks first
            failure = error
    agree(failure, place.tp_group, place.device)
    return digests


def _fill(
    bucket: Bucket,
    parts: list[Tensor],
    shards: Mapping[str, Tensor],
    place: Place,
    version: int,
    dtype: torch.dtype,
    transport: Transport,
) -> BucketManifest:
    gathered = unpack_shards(bucket, parts, shards)
    buffer = transport.buffer(bucket.index)
    entries = write_bucket(bucket, gathered, str(dtype).removeprefix("torch."), buffer)
    return BucketManifest(
        version=version,
        sender=str(place.coordinates),
        bucket=bucket.index,
        file=transport.file(bucket.index),
        num_bytes=bucket.num_bytes,
        tensors=tuple(entries),
    )
