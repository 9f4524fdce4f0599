"""The trainer's side of a weight sync, in two ways; of each every rank calls it.

`send_shards`: each rank lays what it holds into its own part of a buffer, and nothing is gathered
but manifests. `send_whole_tensors`: one rank of each pipeline stage gathers whole tensors, for
those who take nothing else: files in Hugging Face layout, broadcasts, engines without
the run's loader.
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
from rlhf_megatron.weights.bucket_buffers import BucketBuffers, OpenBuffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_plan import (
    ALIGNMENT,
    WeightBucket,
    describe_oversized_buckets,
    fingerprint_bucket_plan,
    list_gathered_shards,
    plan_buckets,
)
from rlhf_megatron.weights.parallel_layout import GridCoordinates, ParallelLayout
from rlhf_megatron.weights.tensor_digest import digest_tensor_part, format_digest
from rlhf_megatron.weights.update_rounding import LostUpdateSums
from rlhf_megatron.weights.weight_table import WeightRule, find_holder_places, join_shards

logger = logging.getLogger(__name__)


class SenderWorld(Protocol):
    """The part of a `ranks.parallel.world.World` that sending needs."""

    @property
    def layout(self) -> ParallelLayout:
        """Return the parallel layout of the pool."""
        ...

    @property
    def rank(self) -> int:
        """Return this rank's number in the pool."""
        ...

    @property
    def coordinates(self) -> GridCoordinates:
        """Return this rank's coordinates in the layout."""
        ...

    @property
    def is_in_pieces(self) -> bool:
        """Return whether shards may end anywhere in a tensor's rows, as FSDP2's do."""
        ...

    @property
    def is_first_copy(self) -> bool:
        """Return whether this rank's copy group sends the weights of its stage."""
        ...

    @property
    def copy_group(self) -> ProcessGroup:
        """Return the group of ranks that hold the tensors of this stage once together."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the device on which the ranks communicate."""
        ...


class SingleRankWorld:
    """A `SenderWorld` of one rank that sends alone: whole tensors that it has gathered from pieces,
    or read from files.
    """

    layout = ParallelLayout(1)
    coordinates = GridCoordinates(dp=0, pp=0, tp=0)
    rank = 0
    is_in_pieces = False
    is_first_copy = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def copy_group(self) -> ProcessGroup:
        """Return a stand-in for a process group of one rank."""
        return cast(ProcessGroup, _SingleRankGroup())


class _SingleRankGroup:
    """A stand-in for a process group of one rank, with the methods that sending needs."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@codec.register("SendReport")
@dataclass(frozen=True)
class SendReport:
    """The report of one rank on the weights that it sent; all zero and empty on ranks that send
    nothing.
    """

    num_bytes: int  # of tensors
    seconds: float
    # Hugging Face name -> digest of what this rank exported of it, in the engine's type
    digests: dict[str, str]
    # engine that did not get everything -> what it said
    failures: dict[str, str] = field(default_factory=dict)
    bytes_moved: int = 0  # to the ranks of all engines: what they read or were sent
    bytes_needed: int = 0  # of what stands in the ranks of all engines afterwards
    # of weights that this rank alone sends; None where nothing was merged or cast, or where there
    # was no send before
    lost_update: LostUpdateSums | None = None


@dataclass(frozen=True)
class SendRequest:
    """The version, type and bucket size of the weights to send."""

    policy_version: int
    engine_dtype: torch.dtype  # the engines'
    bucket_bytes: int  # of all ranks of a copy together

    @property
    def dtype_name(self) -> str:
        """Return the engines' type by name, such as bfloat16."""
        return str(self.engine_dtype).removeprefix("torch.")


class SyncAbortedError(RuntimeError):
    """Another rank of the group failed; its own error says why."""


def raise_if_any_rank_failed(
    failure: BaseException | None,
    group: ProcessGroup,
    device: torch.device,
    plan_fingerprint: int = 0,
) -> None:
    """Raise `failure` where there is one, and SyncAbortedError on the other ranks of the group;
    return where no rank has failed. All ranks of the group must call it.

    `plan_fingerprint` is a number in [0, 2^48) that must be the same on all ranks; else raise
    ValueError on all of them.
    """
    if group.size() == 1:
        if failure is not None:
            raise failure
        return
    state = torch.tensor(
        [int(failure is not None), plan_fingerprint, -plan_fingerprint],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    failed, highest, negated_lowest = state.tolist()
    if failure is not None:
        raise failure
    if failed:
        raise SyncAbortedError(
            "given up because another rank that sends weights together with this one failed;"
            " see its error."
        )
    if highest != -negated_lowest:
        raise ValueError(
            "the ranks that hold the tensors of this stage planned different weight buckets;"
            " bucket size, engine type and config.json must be the same on all of them."
        )


def pack_shards(
    bucket: WeightBucket,
    shards: Mapping[str, Tensor],
    dtype: torch.dtype,
    layout: ParallelLayout,
    copy_rank: int,
    device: torch.device,
) -> Tensor:
    """Return the shards that the rank at `copy_rank` of its copy gives to `gather_packed_shards`:
    one flat tensor in `dtype`, empty where the rank gives none.
    """
    rules = list_gathered_shards(bucket.rules, layout)[copy_rank]
    flat = [shards[rule.megatron_name].to(dtype).reshape(-1) for rule, _ in rules]
    return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)


def gather_packed_shards(
    bucket: WeightBucket, packed_shards: Tensor, layout: ParallelLayout, group: ProcessGroup
) -> list[Tensor]:
    """Return the packed tensors of all ranks of a copy, by rank, on its first rank; [] elsewhere.
    All ranks of the copy must call it.
    """
    if group.rank() != 0:
        if packed_shards.numel():
            dist.send(packed_shards.view(torch.uint8), group=group, group_dst=0)
        return []
    sizes = [
        sum(prod(shape) for _, shape in sent) for sent in list_gathered_shards(bucket.rules, layout)
    ]
    parts = [packed_shards.new_empty(size) for size in sizes]
    calls = [
        dist.irecv(p.view(torch.uint8), group=group, group_src=i)
        for i, p in enumerate(parts)
        if p.numel()
    ]
    for call in calls:
        assert call is not None, "this rank is of the group"
        call.wait()
    return parts


def unpack_shards(
    bucket: WeightBucket,
    packed_by_rank: list[Tensor],
    own_shards: Mapping[str, Tensor],
    layout: ParallelLayout,
) -> dict[str, list[Tensor]]:
    """Return, by Megatron name, the shards of all ranks that hold the tensor, in rank order.
    `own_shards` holds the shards of the sender itself.
    """
    gathered: dict[str, list[Tensor]] = {}
    for rule in bucket.rules:
        gathered[rule.megatron_name] = (
            [own_shards[rule.megatron_name]] if 0 in find_holder_places(rule, layout) else []
        )
    # nothing is packed by one rank
    for part, sent in zip(packed_by_rank, list_gathered_shards(bucket.rules, layout), strict=False):
        start = 0
        for rule, shape in sent:
            gathered[rule.megatron_name].append(part[start : start + prod(shape)].view(shape))
            start += prod(shape)
    return gathered


def fill_bucket_buffer(
    bucket: WeightBucket,
    gathered_shards: Mapping[str, list[Tensor]],
    engine_dtype: str,
    buffer: Tensor,
) -> list[TensorEntry]:
    """Join the shards of each tensor, convert them to Hugging Face form, and cast them into
    `buffer` ([>= bucket.num_bytes] uint8). Return the manifest's entries, with digests of the bytes
    in the buffer. `gathered_shards` holds, by Megatron name, the shards that the bucket's spans are
    made of.
    """
    entries = []
    slots = iter(bucket.slots)
    for rule in bucket.rules:
        for tensor in rule.to_hf(join_shards(rule.split, gathered_shards[rule.megatron_name])):
            slot = next(slots)
            hf = slot.hf_tensor
            span = slot.span
            own = rule.get_sent_dtype(slot.hf_tensor, engine_dtype)
            shape = span.shape_within(hf.shape)
            if not slot.num_bytes:
                continue  # of a shard that is all padding
            values = tensor.narrow(span.dim, 0, span.num_entries)
            assert tuple(values.shape) == shape, f"{hf.name}: {tuple(tensor.shape)} has no {shape}"
            target = (
                buffer[slot.offset : slot.offset + slot.num_bytes]
                .view(getattr(torch, own))
                .view(shape)
            )
            target.copy_(values)
            found = format_digest(digest_tensor_part(target, hf.shape, span.dim, span.start))
            part = None if shape == hf.shape else (span.dim, span.start, span.num_entries)
            entries.append(TensorEntry(hf.name, own, hf.shape, slot.offset, found, part))
    return entries


def send_whole_tensors(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: SenderWorld,
    request: SendRequest,
    open_buffers: OpenBuffers,
    alignment: int = ALIGNMENT,
) -> SendReport:
    """Stream this stage's weights as whole tensors, and return the report. Call it on every rank of
    the pool.

    In each pipeline stage the rank (dp 0, cp 0, tp 0) sends; the other ranks of its copy, which
    hold tp shards of dp 0 and cp 0 or experts, give their shards to it; all others return an empty
    report at once. `exported_shards` yields the rules of this stage with this rank's shards, in
    table order. `open_buffers` is called on senders only, once; a delivery from these buffers
    returns when every engine has read the bucket. For `alignment` see `plan_buckets`; broadcasts
    and files take 1.

    Raise the failure on the rank where it happened, and SyncAbortedError on the other ranks of its
    copy: no rank is left in a collective. The caller must then treat the engines as stale.
    """
    if not world.is_first_copy:
        return SendReport(0, 0.0, {})
    start = time.monotonic()
    group = world.copy_group
    layout = world.layout
    name = request.dtype_name
    is_split = group.size() > 1
    digests: dict[str, str] = {}
    failure: Exception | None = None  # kept until the ranks agree, before the next gather
    with _open_planned_buffers(exported_shards, world, request, open_buffers, alignment) as (
        shards,
        buckets,
        buffers,
    ):
        for bucket in buckets:
            packed = torch.empty(0)
            parts = []
            try:
                if is_split and failure is None:
                    packed = pack_shards(
                        bucket, shards, request.engine_dtype, layout, group.rank(), world.device
                    )
            except Exception as error:
                failure = error
            raise_if_any_rank_failed(failure, group, world.device)
            if is_split:
                parts = gather_packed_shards(bucket, packed, layout, group)
            if buffers is None:
                continue
            try:
                gathered, number = unpack_shards(bucket, parts, shards, layout), bucket.index
                entries = tuple(
                    fill_bucket_buffer(bucket, gathered, name, buffers.wait_for_buffer(number))
                )
                digests |= {entry.name: entry.digest for entry in entries}
                sender, file = str(world.coordinates), buffers.get_file_name(number)
                buffers.start_delivery(
                    BucketManifest(
                        request.policy_version, sender, number, file, bucket.num_bytes, entries
                    )
                )
            except Exception as error:
                failure = error
        try:
            if buffers is not None and failure is None:
                buffers.wait_for_deliveries()
        except Exception as error:
            failure = error
        raise_if_any_rank_failed(failure, group, world.device)
    num_bytes = sum(slot.num_bytes for bucket in buckets for slot in bucket.slots) if digests else 0
    return SendReport(num_bytes, time.monotonic() - start, digests)


@contextmanager
def _open_planned_buffers(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: SenderWorld,
    request: SendRequest,
    open_buffers: OpenBuffers,
    alignment: int,
) -> Iterator[tuple[dict[str, Tensor], tuple[WeightBucket, ...], BucketBuffers | None]]:
    """Yield (this rank's shards by Megatron name, the buckets, the buffers, which are None but on
    the sender), and close the buffers at the end. All ranks of the copy have planned the same
    buckets then, or all raise.
    """
    shards: dict[str, Tensor] = {}
    buckets: tuple[WeightBucket, ...] = ()
    buffers: BucketBuffers | None = None
    failure: Exception | None = None
    try:
        try:
            exported = list(exported_shards)
            shards = {rule.megatron_name: tensor for rule, tensor in exported if tensor is not None}
            rules = [rule for rule, _ in exported]
            buckets = plan_buckets(rules, request.dtype_name, request.bucket_bytes, alignment)
            if world.copy_group.rank() == 0:
                if notice := describe_oversized_buckets(buckets, request.bucket_bytes):
                    logger.warning("%s: %s", world.coordinates, notice)
                buffers = open_buffers(
                    max((bucket.num_bytes for bucket in buckets), default=0), len(buckets)
                )
        except Exception as error:  # the other ranks must learn of it first
            failure = error
        raise_if_any_rank_failed(
            failure,
            world.copy_group,
            world.device,
            plan_fingerprint=fingerprint_bucket_plan(buckets),
        )
        yield shards, buckets, buffers
    finally:
        if buffers is not None:
            buffers.close()
