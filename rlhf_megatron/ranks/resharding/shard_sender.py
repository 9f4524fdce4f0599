"""A weight sync shard to shard: every rank of a copy lays what it holds into its own part of one
buffer, from which each rank of an engine takes its own. What the ranks exchange is manifests, a few
bytes a tensor.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.device import (
    SharedDeviceMemory,
    get_shareable_device_id,
    share_device_memory,
    synchronize_device,
)
from rlhf_megatron.ranks.resharding.weight_sender import (
    SenderWorld,
    SendReport,
    SendRequest,
    SyncAbortedError,
    fill_bucket_buffer,
    raise_if_any_rank_failed,
)
from rlhf_megatron.weights.bucket_buffers import BucketBuffers, LentSegment, choose_num_buffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_plan import (
    ALIGNMENT,
    WeightBucket,
    describe_oversized_buckets,
    fingerprint_bucket_plan,
    plan_buckets,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.shard_plan import find_copy_index, plan_send_shares
from rlhf_megatron.weights.weight_table import WeightRule

logger = logging.getLogger(__name__)
# bytes; a rank's part of a buffer begins at a multiple: it is mapped alone
PAGE = mmap.ALLOCATIONGRANULARITY
_FAILED = -1  # in place of a number of bytes

OpenShardBuffers = Callable[[Sequence[int], int, Sequence[str]], BucketBuffers]
"""Given the bytes of each rank's part, the number of rounds and what `get_shareable_device_id` says
of each rank's device, returns buffers: all parts one after the other in memory of the host, or the
first part on the device of its rank.
"""

OpenLinkBuffers = Callable[["SendRounds"], BucketBuffers]
"""Called on every rank of a copy at once, returns buffers for this rank's part, from which it sends
itself. All return, or all raise.
"""

AttachBuffers = Callable[[str, int, int, int], Sequence[Tensor]]
"""Given the coordinates of the copy's first rank, where this rank's part of each buffer begins, its
bytes and the number of rounds, returns these parts: [bytes] uint8 of memory of the host that the
first rank has opened.
"""


class FilledBufferPart(msgspec.Struct):
    """The tensors that one rank has written to its part of a buffer."""

    entries: list[TensorEntry] = []
    lent: list[SharedDeviceMemory] = []  # by reader, where the part is device memory


@dataclass(frozen=True)
class SendRounds:
    """The buckets of all ranks of a copy, by rank: the ranks send their nth buckets together."""

    buckets_by_rank: tuple[tuple[WeightBucket, ...], ...]

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds: the most buckets that one rank has."""
        return max(map(len, self.buckets_by_rank), default=0)

    @property
    def part_bytes(self) -> list[int]:
        """Return the bytes of each rank's part of a buffer: its largest bucket, rounded up to a
        page.
        """
        largest = (
            max((bucket.num_bytes for bucket in mine), default=0) for mine in self.buckets_by_rank
        )
        return [-(-size // PAGE) * PAGE for size in largest]

    @property
    def part_offsets(self) -> list[int]:
        """Return the offset of each rank's part in a buffer, and, last, the buffer's bytes."""
        return list(accumulate(self.part_bytes, initial=0))


def plan_send_rounds(
    rules: Sequence[WeightRule],
    layout: ParallelLayout,
    engine_dtype: str,
    bucket_bytes: int,
    alignment: int = ALIGNMENT,
) -> SendRounds:
    """Return the buckets of all ranks of a copy, which share `bucket_bytes` equally. For
    `alignment` see `plan_buckets`.
    """
    shares = plan_send_shares(rules, layout)
    own_bytes = -(-bucket_bytes // len(shares))
    return SendRounds(
        tuple(
            plan_buckets(share.rules, engine_dtype, own_bytes, alignment, share.spans_by_name)
            for share in shares
        )
    )


def send_shards(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: SenderWorld,
    request: SendRequest,
    open_buffers: OpenShardBuffers | None = None,
    attach_buffers: AttachBuffers | None = None,
    num_readers: int = 1,
    open_links: OpenLinkBuffers | None = None,
) -> SendReport:
    """Stream this stage's weights from the ranks of a copy, and return this rank's report. Call it
    on every rank of each copy that serves an engine, and of the first copy.

    `exported_shards` yields the rules of this stage with this rank's shards, in table order.
    `open_buffers` is called on the copy's first rank. Where it returns memory of the host,
    `attach_buffers` is called on the other ranks; where it returns device memory, each rank has
    buffers on its own device and lends them to `num_readers` ranks of engines. `open_links`
    replaces both: each rank has buffers of its own and sends from them.

    Only the first copy reports bytes and digests. Raise the failure on the rank where it happened,
    and SyncAbortedError on the other ranks of its copy: no rank is left waiting. The caller must
    then treat the engines as stale.
    """
    start = time.monotonic()
    sending = _ShardSender(world, request, num_readers)
    try:
        sending.plan_rounds_together(exported_shards, ALIGNMENT if open_links is None else 1)
        if open_links is not None:
            sending.open_link_buffers(open_links)
        else:
            assert open_buffers is not None and attach_buffers is not None, (
                "parts lie in memory of some kind"
            )
            sending.open_shared_buffers(open_buffers, attach_buffers)
        for number in range(sending.rounds.num_rounds):
            sending.send_round(number)
        sending.finish_deliveries()
    finally:
        if sending.buffers is not None:
            sending.buffers.close()
    is_first = find_copy_index(world.layout, world.rank) == 0
    return SendReport(
        sending.num_bytes if is_first else 0,
        time.monotonic() - start,
        sending.digests if is_first else {},
    )


class _ShardSender:
    """The part of one rank in a weight sync."""

    def __init__(self, world: SenderWorld, request: SendRequest, num_readers: int) -> None:
        self.world = world
        self.request = request
        self.num_readers = num_readers
        self.copy_rank = world.copy_group.rank()
        self.rounds = SendRounds(())
        # on the first rank: of all, or its own; over links on every rank
        self.buffers: BucketBuffers | None = None
        self.num_bytes = 0
        self.digests: dict[str, str] = {}
        self._buffer_parts: Sequence[Tensor] = ()  # of the buffers, on the other ranks
        self._is_device_memory_lent = False  # each rank's part is memory of its own device
        # a failure of the first rank that the other ranks do not know yet
        self._pending_failure: Exception | None = None
        self._shard_by_name: dict[str, Tensor] = {}

    def plan_rounds_together(
        self, exported_shards: Iterable[tuple[WeightRule, Tensor | None]], alignment: int
    ) -> None:
        """Plan the rounds and keep the shards by name. All ranks of the copy then have the same
        plan, or all raise.
        """
        failure: Exception | None = None
        plan = 0
        try:
            exported = list(exported_shards)
            self._shard_by_name = {
                rule.megatron_name: tensor for rule, tensor in exported if tensor is not None
            }
            rules = [rule for rule, _ in exported]
            self.rounds = plan_send_rounds(
                rules,
                self.world.layout,
                self.request.dtype_name,
                self.request.bucket_bytes,
                alignment,
            )
            plan = fingerprint_bucket_plan(
                [bucket for mine in self.rounds.buckets_by_rank for bucket in mine]
            )
        except Exception as error:  # the other ranks must learn of it first
            failure = error
        self._raise_if_any_failed(failure, plan)

    def open_link_buffers(self, open_links: OpenLinkBuffers) -> None:
        """Open this rank's own buffers, from which it sends. All ranks have buffers then, or all
        raise.
        """
        if notice := describe_oversized_buckets(
            self.rounds.buckets_by_rank[self.copy_rank], self.request.bucket_bytes
        ):
            logger.warning("%s: %s", self.world.coordinates, notice)
        self.buffers = open_links(self.rounds)

    def open_shared_buffers(
        self, open_buffers: OpenShardBuffers, attach_buffers: AttachBuffers
    ) -> None:
        """Open the buffers on the copy's first rank and this rank's part of them on each other
        rank. All ranks have their part then, or all raise.
        """
        failure: Exception | None = None
        devices = self._gather_device_ids()
        try:
            if self.copy_rank == 0:
                if notice := describe_oversized_buckets(
                    self.rounds.buckets_by_rank[0], self.request.bucket_bytes
                ):
                    logger.warning("%s: %s", self.world.coordinates, notice)
                self.buffers = open_buffers(self.rounds.part_bytes, self.rounds.num_rounds, devices)
        except Exception as error:
            failure = error
        self._raise_if_any_failed(failure)
        self._is_device_memory_lent = self._broadcast_flag(
            self.buffers is not None and self.buffers.device.type != "cpu"
        )
        try:
            if self.copy_rank:
                self._buffer_parts = self._open_own_parts(attach_buffers)
        except Exception as error:
            failure = error
        self._raise_if_any_failed(failure)

    def _gather_device_ids(self) -> list[str]:
        """Return, on the first rank, the shareable device id of each rank; [] elsewhere."""
        mine = msgspec.json.encode(get_shareable_device_id(self.world.device))
        found = gather_bytes_on_first_rank(mine, self.world.copy_group, self.world.device)
        return [msgspec.json.decode(one, type=str) for one in found or ()]

    def _broadcast_flag(self, flag: bool) -> bool:
        """Return the flag of the copy's first rank, on all its ranks."""
        if self.world.copy_group.size() > 1:
            said = torch.tensor(int(flag), device=self.world.device)
            dist.broadcast(said, group=self.world.copy_group, group_src=0)
            return bool(said)
        return flag

    def _open_own_parts(self, attach_buffers: AttachBuffers) -> Sequence[Tensor]:
        """Return this rank's part of each buffer: new memory of its own device where device memory
        is lent, else a part of the first rank's host memory.
        """
        count = self.rounds.num_rounds
        num_bytes = self.rounds.part_bytes[self.copy_rank]
        if self._is_device_memory_lent:
            parts = range(choose_num_buffers(count))
            return [
                torch.empty(num_bytes, dtype=torch.uint8, device=self.world.device) for _ in parts
            ]
        first = str(self.world.layout.locate_rank(self.world.rank - self.copy_rank))
        return attach_buffers(first, self.rounds.part_offsets[self.copy_rank], num_bytes, count)

    def send_round(self, round_number: int) -> None:
        """Fill this rank's bucket of the round into its part of a buffer, gather the manifests of
        all ranks, and start the delivery where this rank has buffers. A delivery that fails to
        start is raised on all ranks in the next round, or at the end.
        """
        failure: Exception | None = None
        buffer = torch.empty(0)
        try:
            buffer = (
                self._buffer_parts[round_number % len(self._buffer_parts)]
                if self.buffers is None
                else self.buffers.wait_for_buffer(round_number)
            )
        except Exception as error:
            failure = error
        self._raise_if_any_failed(failure)
        mine = FilledBufferPart()
        try:
            mine.entries = self._fill_own_bucket(round_number, buffer)
            if self._is_device_memory_lent and self.copy_rank and mine.entries:
                synchronize_device(buffer.device)  # other processes read it
                mine.lent = [share_device_memory(buffer) for _ in range(self.num_readers)]
        except Exception as error:
            failure = error
        found = self._gather_filled_parts(mine, failure)
        if self.buffers is not None:
            file = self.buffers.get_file_name(round_number)
            num_bytes = self.rounds.part_offsets[-1] if self.copy_rank == 0 else buffer.numel()
            merged = tuple(
                replace(entry, offset=entry.offset + start)
                for start, one in zip(self.rounds.part_offsets, found, strict=False)
                for entry in one.entries
            )
            manifest = BucketManifest(
                self.request.policy_version,
                str(self.world.coordinates),
                round_number,
                file,
                num_bytes,
                merged,
            )
            try:
                self.buffers.start_delivery(manifest, self._arrange_lent_segments(found))
            except Exception as error:  # the other ranks wait for the next agreement
                self._pending_failure = error

    def finish_deliveries(self) -> None:
        """Wait until all deliveries are done; raise on all ranks of the copy where one failed."""
        failure: Exception | None = None
        try:
            if self.buffers is not None:
                self.buffers.wait_for_deliveries()
        except Exception as error:
            failure = error
        self._raise_if_any_failed(failure)

    def _arrange_lent_segments(
        self, filled_parts: Sequence[FilledBufferPart]
    ) -> list[list[LentSegment]] | None:
        """Return, for each reader, the device memory that the other ranks lend to it; None where no
        rank lends memory.
        """
        others = [
            (start, part.lent)
            for start, part in zip(self.rounds.part_offsets, filled_parts, strict=False)
            if part.lent
        ]
        if not others:
            return None
        return [
            [LentSegment(start, lent[reader]) for start, lent in others]
            for reader in range(self.num_readers)
        ]

    def _fill_own_bucket(self, round_number: int, buffer: Tensor) -> list[TensorEntry]:
        """Fill this rank's bucket of the round into `buffer`, and return its manifest entries; []
        where this rank has no such bucket. Add the bucket to the digests and the count of bytes.
        """
        mine = self.rounds.buckets_by_rank[self.copy_rank]
        if round_number >= len(mine):
            return []
        bucket = mine[round_number]
        shards = {
            rule.megatron_name: [self._shard_by_name[rule.megatron_name]] for rule in bucket.rules
        }
        entries = fill_bucket_buffer(bucket, shards, self.request.dtype_name, buffer)
        self.digests |= {entry.name: entry.digest for entry in entries}
        self.num_bytes += sum(entry.num_bytes for entry in entries)
        return entries

    def _raise_if_any_failed(self, failure: Exception | None, plan_fingerprint: int = 0) -> None:
        """Raise on all ranks of the copy where one rank has a failure, this one's pending failure
        included, or where the plans differ.
        """
        failure = self._pending_failure or failure
        raise_if_any_rank_failed(
            failure, self.world.copy_group, self.world.device, plan_fingerprint
        )

    def _gather_filled_parts(
        self, filled_part: FilledBufferPart, failure: Exception | None
    ) -> list[FilledBufferPart]:
        """Return, on the first rank, the filled parts of all ranks, by rank; [] elsewhere. Raise
        this rank's failure, or SyncAbortedError where another rank failed.
        """
        text = msgspec.json.encode(filled_part)
        found = gather_bytes_on_first_rank(
            None if failure else text, self.world.copy_group, self.world.device
        )
        if failure is not None:
            raise failure
        if found is None:
            raise SyncAbortedError(
                "given up because another rank of this copy failed; see its error."
            )
        return [msgspec.json.decode(one, type=FilledBufferPart) for one in found]


def gather_bytes_on_first_rank(
    payload: bytes | None, group: ProcessGroup, device: torch.device
) -> list[bytes] | None:
    """Return the bytes of all ranks, by rank, on the group's first rank; [] on the others. Return
    None on all ranks where one rank's payload is None. All ranks of the group must call it.
    """
    if group.size() == 1:
        return None if payload is None else [payload]
    size = torch.tensor(
        [_FAILED if payload is None else len(payload)], dtype=torch.int64, device=device
    )
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    if _FAILED in lengths:
        return None
    assert payload is not None, "it was told to all"
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    if group.rank():
        dist.send(data, group=group, group_dst=0)
        return []
    parts = [
        data,
        *(torch.empty(length, dtype=torch.uint8, device=device) for length in lengths[1:]),
    ]
    for rank, part in enumerate(parts[1:], 1):
        dist.recv(part, group=group, group_src=rank)
    return [bytes(part.cpu().numpy()) for part in parts]


def broadcast_bytes(payload: bytes | None, group: ProcessGroup, device: torch.device) -> bytes:
    """Return the payload of the group's first rank, on all its ranks. A payload of None means that
    the first rank has failed: it returns b"", and the others raise SyncAbortedError.
    """
    if group.size() == 1:
        return payload or b""
    size = torch.tensor(
        [_FAILED if payload is None else len(payload)], dtype=torch.int64, device=device
    )
    dist.broadcast(size, group=group, group_src=0)
    if int(size) == _FAILED:
        if group.rank() == 0:
            return b""
        raise SyncAbortedError(
            "given up because the first rank of this copy failed; see its error."
        )
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if group.rank() == 0 and payload:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, group=group, group_src=0)
    return bytes(data.cpu().numpy())
