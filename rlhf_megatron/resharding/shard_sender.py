"""A weight sync shard to shard: every rank of a copy lays what it holds into its own part of one buffer, from which
each rank of an engine takes its own. What the ranks exchange is manifests, a few bytes a tensor."""

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

from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.device import SharedMemory, share, shareable_id, synchronize
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.buffers import Buffers, Segment, num_buffers
from rlhf_megatron.resharding.manifest import BucketManifest, TensorEntry
from rlhf_megatron.resharding.plan import ALIGNMENT, Bucket, fingerprint, oversized, plan_buckets
from rlhf_megatron.resharding.sender import Order, Place, SendReport, SyncAbortedError, agree, write_bucket
from rlhf_megatron.resharding.shards import copy_of, shares_of

logger = logging.getLogger(__name__)
PAGE = mmap.ALLOCATIONGRANULARITY  # bytes; a rank's part of a buffer begins at a multiple: it is mapped alone
_FAILED = -1  # in place of a number of bytes

OpenShardBuffers = Callable[[Sequence[int], int, Sequence[str]], Buffers]
"""Given the bytes of each rank's part, the number of rounds and what `shareable_id` says of each rank's device, returns
buffers: all parts one after the other in memory of the host, or the first part on the device of its rank."""

OpenLinkBuffers = Callable[["Rounds"], Buffers]
"""Called on every rank of a copy at once, returns buffers for this rank's part, from which it sends itself. All return,
or all raise."""

Attach = Callable[[str, int, int, int], Sequence[Tensor]]
"""Given the coordinates of the copy's first rank, where this rank's part of each buffer begins, its bytes and the
number of rounds, returns these parts: [bytes] uint8 of memory of the host that the first rank has opened."""


class Filled(msgspec.Struct):
    """The tensors that one rank has laid into its part of a buffer."""

    entries: list[TensorEntry] = []
    lent: list[SharedMemory] = []  # by reader, where the part is device memory


@dataclass(frozen=True)
class Rounds:
    """The buckets of all ranks of a copy, by place: the nth of each travel together."""

    buckets: tuple[tuple[Bucket, ...], ...]

    @property
    def count(self) -> int:
        return max(map(len, self.buckets), default=0)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each rank's part of a buffer."""
        largest = (max((bucket.num_bytes for bucket in mine), default=0) for mine in self.buckets)
        return [-(-size // PAGE) * PAGE for size in largest]

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))


def plan_rounds(
    rules: Sequence[Rule], layout: Layout, dtype: str, bucket_bytes: int, alignment: int = ALIGNMENT
) -> Rounds:
    """Plans for all ranks of a copy, which share `bucket_bytes`. `alignment`: see `plan_buckets`."""
    shares = shares_of(rules, layout)
    own_bytes = -(-bucket_bytes // len(shares))
    return Rounds(tuple(plan_buckets(share.rules, dtype, own_bytes, alignment, share.spans) for share in shares))


def send_shards(
    export: Iterable[tuple[Rule, Tensor | None]],
    place: Place,
    order: Order,
    open_buffers: OpenShardBuffers | None = None,
    attach: Attach | None = None,
    num_readers: int = 1,
    open_links: OpenLinkBuffers | None = None,
) -> SendReport:
    """Stream this stage's weights from the ranks of a copy. Call on every rank of a copy that serves an engine, and of
    the first one.

    `export`: the rules of this stage with this rank's shards, in table order. `open_buffers` is called on the copy's
    first rank. Where it returns memory of the host, `attach` is called on the others; where device memory, each rank
    has buffers on its own device and lends them to `num_readers` ranks of engines. `open_links` stands in for both:
    each rank has buffers of its own and sends from them.

    The report has digests on the first copy only. Raises what failed on the rank where it failed, and SyncAbortedError
    on the other ranks of its copy: no rank is left waiting. The caller must then take the engines as stale.
    """
    start = time.monotonic()
    sending = _Sending(place, order, num_readers)
    try:
        sending.plan(export, ALIGNMENT if open_links is None else 1)
        if open_links is not None:
            sending.open_links(open_links)
        else:
            assert open_buffers is not None and attach is not None, "parts lie in memory of some kind"
            sending.open(open_buffers, attach)
        for number in range(sending.rounds.count):
            sending.turn(number)
        sending.finish()
    finally:
        if sending.buffers is not None:
            sending.buffers.close()
    is_first = copy_of(place.layout, place.rank) == 0
    return SendReport(
        sending.num_bytes if is_first else 0, time.monotonic() - start, sending.digests if is_first else {}
    )


class _Sending:
    """One rank's part of a sync."""

    def __init__(self, place: Place, order: Order, num_readers: int) -> None:
        self.place = place
        self.order = order
        self.num_readers = num_readers
        self.own = place.copy_group.rank()
        self.rounds = Rounds(())
        self.buffers: Buffers | None = None  # on the first rank: of all, or its own; over links on every rank
        self.num_bytes = 0
        self.digests: dict[str, str] = {}
        self._parts: Sequence[Tensor] = ()  # of the buffers, on the other ranks
        self._is_lent = False  # each rank's part is memory of its own device
        self._unsent: Exception | None = None  # what failed on the first rank since the others were last told
        self._shards: dict[str, Tensor] = {}

    def plan(self, export: Iterable[tuple[Rule, Tensor | None]], alignment: int) -> None:
        """All ranks of the copy have planned the same then, or all raise."""
        failure: Exception | None = None
        plan = 0
        try:
            exported = list(export)
            self._shards = {rule.megatron_name: tensor for rule, tensor in exported if tensor is not None}
            rules = [rule for rule, _ in exported]
            how = (self.order.type_name, self.order.bucket_bytes, alignment)
            self.rounds = plan_rounds(rules, self.place.layout, *how)
            plan = fingerprint([bucket for mine in self.rounds.buckets for bucket in mine])
        except Exception as error:  # told to the other ranks first
            failure = error
        self._agree(failure, plan)

    def open_links(self, open_links: OpenLinkBuffers) -> None:
        """Every rank has buffers then, or all raise."""
        if notice := oversized(self.rounds.buckets[self.own], self.order.bucket_bytes):
            logger.warning("%s: %s", self.place.coordinates, notice)
        self.buffers = open_links(self.rounds)

    def open(self, open_buffers: OpenShardBuffers, attach: Attach) -> None:
        """All ranks have a part of buffers then, or all raise."""
        failure: Exception | None = None
        devices = self._devices()
        try:
            if self.own == 0:
                if notice := oversized(self.rounds.buckets[0], self.order.bucket_bytes):
                    logger.warning("%s: %s", self.place.coordinates, notice)
                self.buffers = open_buffers(self.rounds.sizes, self.rounds.count, devices)
        except Exception as error:
            failure = error
        self._agree(failure)
        self._is_lent = self._told_by_first(self.buffers is not None and self.buffers.device.type != "cpu")
        try:
            if self.own:
                self._parts = self._own_parts(attach)
        except Exception as error:
            failure = error
        self._agree(failure)

    def _devices(self) -> list[str]:
        """Return, on the first rank, what `shareable_id` says of all ranks' devices."""
        mine = msgspec.json.encode(shareable_id(self.place.device))
        found = gather_bytes(mine, self.place.copy_group, self.place.device)
        return [msgspec.json.decode(one, type=str) for one in found or ()]

    def _told_by_first(self, is_so: bool) -> bool:
        """Return what the first rank of the copy says."""
        if self.place.copy_group.size() > 1:
            said = torch.tensor(int(is_so), device=self.place.device)
            dist.broadcast(said, group=self.place.copy_group, group_src=0)
            return bool(said)
        return is_so

    def _own_parts(self, attach: Attach) -> Sequence[Tensor]:
        count, num_bytes = self.rounds.count, self.rounds.sizes[self.own]
        if self._is_lent:
            parts = range(num_buffers(count))
            return [torch.empty(num_bytes, dtype=torch.uint8, device=self.place.device) for _ in parts]
        first = str(self.place.layout.coordinates(self.place.rank - self.own))
        return attach(first, self.rounds.starts[self.own], num_bytes, count)

    def turn(self, number: int) -> None:
        """Fill buckets of that number on all ranks and start their delivery."""
        failure: Exception | None = None
        buffer = torch.empty(0)
        try:
            buffer = self._parts[number % len(self._parts)] if self.buffers is None else self.buffers.buffer(number)
        except Exception as error:
            failure = error
        self._agree(failure)
        mine = Filled()
        try:
            mine.entries = self._fill(number, buffer)
            if self._is_lent and self.own and mine.entries:
                synchronize(buffer.device)  # other processes read it
                mine.lent = [share(buffer) for _ in range(self.num_readers)]
        except Exception as error:
            failure = error
        found = self._told(mine, failure)
        if self.buffers is not None:
            file, num_bytes = self.buffers.file(number), self.rounds.starts[-1] if self.own == 0 else buffer.numel()
            merged = tuple(
                replace(entry, offset=entry.offset + start)
                for start, one in zip(self.rounds.starts, found, strict=False)
                for entry in one.entries
            )
            manifest = BucketManifest(self.order.version, str(self.place.coordinates), number, file, num_bytes, merged)
            try:
                self.buffers.send(manifest, *self._lent(found))
            except Exception as error:  # the other ranks wait for the next agreement
                self._unsent = error

    def finish(self) -> None:
        failure: Exception | None = None
        try:
            if self.buffers is not None:
                self.buffers.drain()
        except Exception as error:
            failure = error
        self._agree(failure)

    def _lent(self, found: Sequence[Filled]) -> list[list[list[Segment]]]:
        """Return the device memory that the other ranks lend, by reader, where they do."""
        others = [(start, one.lent) for start, one in zip(self.rounds.starts, found, strict=False) if one.lent]
        readers = range(self.num_readers)
        return [[[Segment(start, lent[reader]) for start, lent in others] for reader in readers]] if others else []

    def _fill(self, number: int, buffer: Tensor) -> list[TensorEntry]:
        mine = self.rounds.buckets[self.own]
        if number >= len(mine):
            return []
        bucket = mine[number]
        shards = {rule.megatron_name: [self._shards[rule.megatron_name]] for rule in bucket.rules}
        entries = write_bucket(bucket, shards, self.order.type_name, buffer)
        self.digests |= {entry.name: entry.digest for entry in entries}
        self.num_bytes += sum(entry.num_bytes for entry in entries)
        return entries

    def _agree(self, failure: Exception | None, plan: int = 0) -> None:
        failure = self._unsent or failure
        agree(failure, self.place.copy_group, self.place.device, plan)

    def _told(self, mine: Filled, failure: Exception | None) -> list[Filled]:
        """Return, on the first rank, what all ranks have filled, by place."""
        text = msgspec.json.encode(mine)
        found = gather_bytes(None if failure else text, self.place.copy_group, self.place.device)
        if failure is not None:
            raise failure
        if found is None:
            raise SyncAbortedError("given up because another rank of this copy failed; see its error.")
        return [msgspec.json.decode(one, type=Filled) for one in found]


def gather_bytes(mine: bytes | None, group: ProcessGroup, device: torch.device) -> list[bytes] | None:
    """Gather bytes, by rank, on the first rank; [] on the others. Returns None on all where one rank gave None."""
    if group.size() == 1:
        return None if mine is None else [mine]
    size = torch.tensor([_FAILED if mine is None else len(mine)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    if _FAILED in lengths:
        return None
    assert mine is not None, "it was told to all"
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    if group.rank():
        dist.send(data, group=group, group_dst=0)
        return []
    parts = [data, *(torch.empty(length, dtype=torch.uint8, device=device) for length in lengths[1:])]
    for rank, part in enumerate(parts[1:], 1):
        dist.recv(part, group=group, group_src=rank)
    return [bytes(part.cpu().numpy()) for part in parts]


def tell(said: bytes | None, group: ProcessGroup, device: torch.device) -> bytes:
    """Broadcast `said` of a group's first rank. Where it is None there, that rank has failed, and the others raise
    SyncAbortedError.
    """
    if group.size() == 1:
        return said or b""
    size = torch.tensor([_FAILED if said is None else len(said)], dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=0)
    if int(size) == _FAILED:
        if group.rank() == 0:
            return b""
        raise SyncAbortedError("given up because the first rank of this copy failed; see its error.")
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if group.rank() == 0 and said:
        data.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    dist.broadcast(data, group=group, group_src=0)
    return bytes(data.cpu().numpy())
