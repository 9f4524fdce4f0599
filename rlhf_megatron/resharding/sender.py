"""The trainer's side of a weight sync, in two ways; of each every rank calls it.

`send_shards`: each rank lays what it holds into its own part of a buffer, and nothing is gathered but manifests.
`send_weights`: one rank of each pipeline stage gathers whole tensors, for those who take nothing else: files in Hugging
Face layout, broadcasts, engines without the run's loader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.data import codec
from rlhf_megatron.models.table import Rule, holders, join
from rlhf_megatron.parallel.layout import Coordinates, Layout
from rlhf_megatron.resharding.buffers import Buffers, OpenBuffers
from rlhf_megatron.resharding.digest import as_hex, digest_part
from rlhf_megatron.resharding.manifest import BucketManifest, TensorEntry
from rlhf_megatron.resharding.plan import ALIGNMENT, Bucket, fingerprint, oversized, plan_buckets, sent_by

logger = logging.getLogger(__name__)


class Place(Protocol):
    """The part of a `parallel.world.World` that sending needs."""

    @property
    def layout(self) -> Layout: ...
    @property
    def rank(self) -> int: ...
    @property
    def coordinates(self) -> Coordinates: ...
    @property
    def is_in_pieces(self) -> bool: ...
    @property
    def is_first_copy(self) -> bool: ...
    @property
    def copy_group(self) -> ProcessGroup: ...
    @property
    def device(self) -> torch.device: ...


class Alone:
    """A `Place` of one rank that sends without others: what it has gathered of their pieces, or read from files."""

    layout = Layout(1)
    coordinates = Coordinates(dp=0, pp=0, tp=0)
    rank = 0
    is_in_pieces = False
    is_first_copy = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def copy_group(self) -> ProcessGroup:
        return cast(ProcessGroup, _OneRank())


class _OneRank:
    """Stands for a process group of one rank, with what sending asks of it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@codec.register
@dataclass(frozen=True)
class SendReport:
    """The report of one rank on what it sent; all zero and empty on ranks that are no senders."""

    num_bytes: int  # of tensors
    seconds: float
    digests: dict[str, str]  # Hugging Face name -> digest of what this rank exported of it, in the engine's type
    failures: dict[str, str] = field(default_factory=dict)  # engine that did not get everything -> what it said
    bytes_moved: int = 0  # to the ranks of all engines: what they read or were sent
    bytes_needed: int = 0  # of what stands in the ranks of all engines afterwards


@dataclass(frozen=True)
class Order:
    """Which weights are to be sent, and in what pieces."""

    version: int
    dtype: torch.dtype  # the engines'
    bucket_bytes: int  # of all ranks of a copy together

    @property
    def type_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class SyncAbortedError(RuntimeError):
    """Another rank of the group failed; its own error says why."""


def agree(failure: BaseException | None, group: ProcessGroup, device: torch.device, plan: int = 0) -> None:
    """Collective over `group`. Raises `failure` where there is one, and SyncAbortedError on the other ranks.

    `plan`: a number in [0, 2^48) that must be the same on all ranks. Raises ValueError on all of them otherwise.
    """
    if group.size() == 1:
        if failure is not None:
            raise failure
        return
    state = torch.tensor([int(failure is not None), plan, -plan], dtype=torch.int64, device=device)
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    failed, highest, negated_lowest = state.tolist()
    if failure is not None:
        raise failure
    if failed:
        raise SyncAbortedError(
            "given up because another rank that sends weights together with this one failed; see its error."
        )
    if highest != -negated_lowest:
        raise ValueError(
            "the ranks that hold the tensors of this stage planned different weight buckets; bucket size, engine type"
            " and config.json must be the same on all of them."
        )


def pack_shards(
    bucket: Bucket, shards: Mapping[str, Tensor], dtype: torch.dtype, layout: Layout, place: int, device: torch.device
) -> Tensor:
    """Return what the rank at `place` of its copy gives to `gather_packed`, cast and flat."""
    rules = sent_by(bucket.rules, layout)[place]
    flat = [shards[rule.megatron_name].to(dtype).reshape(-1) for rule, _ in rules]
    return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)


def gather_packed(bucket: Bucket, mine: Tensor, layout: Layout, group: ProcessGroup) -> list[Tensor]:
    """Gather what all ranks of a copy packed, by place, on its first rank; [] elsewhere. Call on all ranks of the
    copy.
    """
    if group.rank() != 0:
        if mine.numel():
            dist.send(mine.view(torch.uint8), group=group, group_dst=0)
        return []
    sizes = [sum(prod(shape) for _, shape in sent) for sent in sent_by(bucket.rules, layout)]
    parts = [mine.new_empty(size) for size in sizes]
    calls = [dist.irecv(p.view(torch.uint8), group=group, group_src=i) for i, p in enumerate(parts) if p.numel()]
    for call in calls:
        assert call is not None, "this rank is of the group"
        call.wait()
    return parts


def unpack_shards(
    bucket: Bucket, packed: list[Tensor], shards: Mapping[str, Tensor], layout: Layout
) -> dict[str, list[Tensor]]:
    """Returns by Megatron name the shards of all ranks that have one, in their order; `shards`: the sender's own."""
    gathered: dict[str, list[Tensor]] = {}
    for rule in bucket.rules:
        gathered[rule.megatron_name] = [shards[rule.megatron_name]] if 0 in holders(rule, layout) else []
    for part, sent in zip(packed, sent_by(bucket.rules, layout), strict=False):  # nothing is packed by one rank
        start = 0
        for rule, shape in sent:
            gathered[rule.megatron_name].append(part[start : start + prod(shape)].view(shape))
            start += prod(shape)
    return gathered


def write_bucket(bucket: Bucket, gathered: Mapping[str, list[Tensor]], dtype: str, buffer: Tensor) -> list[TensorEntry]:
    """Join, convert and cast into `buffer` ([>= bucket.num_bytes] uint8). Returns the manifest's entries, with digests
    of what stands in the buffer. `gathered`: by Megatron name the shards that the bucket's spans are made of."""
    entries = []
    slots = iter(bucket.slots)
    for rule in bucket.rules:
        for tensor in rule.to_hf(join(rule.split, gathered[rule.megatron_name])):
            slot = next(slots)
            hf, span, own = slot.hf, slot.span, rule.type_of(slot.hf, dtype)
            shape = span.shape_in(hf.shape)
            if not slot.num_bytes:
                continue  # of a shard that is all padding
            values = tensor.narrow(span.axis, 0, span.count)
            assert tuple(values.shape) == shape, f"{hf.name}: {tuple(tensor.shape)} has no {shape}"
            target = buffer[slot.offset : slot.offset + slot.num_bytes].view(getattr(torch, own)).view(shape)
            target.copy_(values)
            found = as_hex(digest_part(target, hf.shape, span.axis, span.start))
            part = None if shape == hf.shape else (span.axis, span.start, span.count)
            entries.append(TensorEntry(hf.name, own, hf.shape, slot.offset, found, part))
    return entries


def send_weights(
    export: Iterable[tuple[Rule, Tensor | None]],
    place: Place,
    order: Order,
    open_buffers: OpenBuffers,
    alignment: int = ALIGNMENT,
) -> SendReport:
    """Stream this stage's weights, whole tensors. Call on every rank of the pool.

    Of each pipeline stage the rank (dp 0, cp 0, tp 0) sends; the other ranks of its copy, which hold tp shards of dp 0
    and cp 0 or experts, give it theirs; all others return at once. `export`: the rules of this stage with this rank's
    shards, in table order. `open_buffers` is called on senders only, once; a delivery from these buffers returns when
    every engine has read the bucket. `alignment`: see `plan_buckets`; broadcasts and files take 1.

    Raises what failed on the rank where it failed, and SyncAbortedError on the other ranks of its copy: no rank is
    left in a collective. The caller must then take the engines as stale.
    """
    if not place.is_first_copy:
        return SendReport(0, 0.0, {})
    start = time.monotonic()
    group, layout = place.copy_group, place.layout
    name, is_split = order.type_name, group.size() > 1
    digests: dict[str, str] = {}
    failure: Exception | None = None  # kept until the ranks agree, before the next gather
    with _prepared(export, place, order, open_buffers, alignment) as (shards, buckets, buffers):
        for bucket in buckets:
            packed, parts = torch.empty(0), []
            try:
                if is_split and failure is None:
                    packed = pack_shards(bucket, shards, order.dtype, layout, group.rank(), place.device)
            except Exception as error:
                failure = error
            agree(failure, group, place.device)
            if is_split:
                parts = gather_packed(bucket, packed, layout, group)
            if buffers is None:
                continue
            try:
                gathered, number = unpack_shards(bucket, parts, shards, layout), bucket.index
                entries = tuple(write_bucket(bucket, gathered, name, buffers.buffer(number)))
                digests |= {entry.name: entry.digest for entry in entries}
                sender, file = str(place.coordinates), buffers.file(number)
                buffers.send(BucketManifest(order.version, sender, number, file, bucket.num_bytes, entries))
            except Exception as error:
                failure = error
        try:
            if buffers is not None and failure is None:
                buffers.drain()
        except Exception as error:
            failure = error
        agree(failure, group, place.device)
    num_bytes = sum(slot.num_bytes for bucket in buckets for slot in bucket.slots) if digests else 0
    return SendReport(num_bytes, time.monotonic() - start, digests)


@contextmanager
def _prepared(
    export: Iterable[tuple[Rule, Tensor | None]],
    place: Place,
    order: Order,
    open_buffers: OpenBuffers,
    alignment: int,
) -> Iterator[tuple[dict[str, Tensor], tuple[Bucket, ...], Buffers | None]]:
    """This rank's shards by Megatron name, the buckets, and on the sender its buffers, closed at the end. All ranks of
    the copy have planned the same buckets then, or all raise."""
    shards: dict[str, Tensor] = {}
    buckets: tuple[Bucket, ...] = ()
    buffers: Buffers | None = None
    failure: Exception | None = None
    try:
        try:
            exported = list(export)
            shards = {rule.megatron_name: tensor for rule, tensor in exported if tensor is not None}
            rules = [rule for rule, _ in exported]
            buckets = plan_buckets(rules, order.type_name, order.bucket_bytes, alignment)
            if place.copy_group.rank() == 0:
                if notice := oversized(buckets, order.bucket_bytes):
                    logger.warning("%s: %s", place.coordinates, notice)
                buffers = open_buffers(max((bucket.num_bytes for bucket in buckets), default=0), len(buckets))
        except Exception as error:  # told to the other ranks first
            failure = error
        agree(failure, place.copy_group, place.device, plan=fingerprint(buckets))
        yield shards, buckets, buffers
    finally:
        if buffers is not None:
            buffers.close()
