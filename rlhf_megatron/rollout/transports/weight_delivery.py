"""One sender's buckets to several engines. An engine that fails is left out of the rest; the others
get all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.device import get_shareable_device_id
from rlhf_megatron.ranks.resharding.shard_sender import (
    SendRounds,
    broadcast_bytes,
    gather_bytes_on_first_rank,
    send_shards,
)
from rlhf_megatron.ranks.resharding.weight_sender import (
    SenderWorld,
    SendReport,
    SendRequest,
    SingleRankWorld,
    send_whole_tensors,
)
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, WeightTransport
from rlhf_megatron.rollout.engine_kinds import get_engine_kind
from rlhf_megatron.rollout.transports.bucket_transport import BucketTransport, DeliveryTraffic
from rlhf_megatron.rollout.transports.disk_transport import SafetensorsFileBuffers
from rlhf_megatron.rollout.transports.link_transport import LinkTransport
from rlhf_megatron.rollout.transports.process_group_transport import (
    MAX_ENGINES_AT_ONCE,
    EngineProcessGroups,
)
from rlhf_megatron.rollout.transports.tensor_transport import (
    MappedFilePool,
    SharedMemoryBuffers,
    attach_shared_buffers,
    decline_lent_segments,
)
from rlhf_megatron.weights.bucket_buffers import BucketBuffers, LentSegments, make_memory_buffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import HeldSpansByRank
from rlhf_megatron.weights.bucket_plan import ALIGNMENT, plan_buckets
from rlhf_megatron.weights.engine_links import LinkInvitation
from rlhf_megatron.weights.fp8_engine_weights import make_fp8_rule
from rlhf_megatron.weights.shard_plan import count_serving_copies, find_copy_index
from rlhf_megatron.weights.weight_table import TensorSpan, WeightRule

logger = logging.getLogger(__name__)
T = TypeVar("T")
Kind = TypeVar("Kind", bound=BucketTransport)
_BEFORE_FIRST_BUCKET = "before its first bucket"


class WeightDelivery:
    """Delivers buckets from a sending rank to its engines. A context manager; called with a bucket,
    it returns when all engines that still take part have read the bucket.

    The failure of an engine is not raised: it would end the training ranks, whose weights are
    needed to mend it. It is noted in `failure_by_engine`, and the engine gets no further bucket.
    """

    def __init__(
        self,
        transports: Sequence[BucketTransport],
        transport_kind: WeightTransport,
        transfer_dir: Path,
        world: SenderWorld,
        file_pool: MappedFilePool | None = None,
    ) -> None:
        """Deliver through `transports`, one for each engine. `world` is the sender's. `file_pool`
        holds the mapped files that the rank keeps between syncs.
        """
        # a broadcast and a safetensors file have no gaps
        self.alignment = ALIGNMENT if transport_kind == "tensor" else 1
        # engine name -> what it said first; it has not got everything
        self.failure_by_engine: dict[str, str] = {}
        self.traffic = DeliveryTraffic()
        self._transport_kind = transport_kind
        # over links the first rank of a copy does, and the others only send
        self._makes_engine_requests = True
        self._transfer_dir = transfer_dir
        self._world = world
        self._file_pool = file_pool
        self._transports = tuple(transports)
        # the same ones on all ranks of a copy that send together
        self._num_engines_at_once = max(1, len(transports))
        self._thread_pool = ThreadPoolExecutor(
            max(1, len(self._transports)), thread_name_prefix="deliver"
        )

    @property
    def num_reading_ranks(self) -> int:
        """Return the number of engine ranks that open lent device memory."""
        return sum(transport.num_reading_ranks for transport in self._transports)

    def open_buffers(self, buffer_bytes: int, num_buckets: int) -> BucketBuffers:
        """Prepare the transports for a sync, and return buffers from which all of them can take
        buckets of up to `buffer_bytes`.
        """
        return self.open_shard_buffers(
            [buffer_bytes], num_buckets, [get_shareable_device_id(self._world.device)]
        )

    def open_shard_buffers(
        self, part_bytes: Sequence[int], num_buckets: int, device_ids: Sequence[str]
    ) -> BucketBuffers:
        """Prepare the transports for a sync, and return buffers in which each bucket has a part of
        each rank: see `shard_sender.OpenShardBuffers`. `part_bytes` are the bytes of each rank's
        part, `device_ids` the devices of the ranks.
        """
        self._run_on_transports(
            lambda transport: transport.prepare_sync(device_ids),
            _BEFORE_FIRST_BUCKET,
            self._transports,
        )
        standing = {
            transport.bucket_memory
            for transport in self._transports
            if transport.engine_name not in self.failure_by_engine
        }
        if self._transport_kind != "disk" and standing == {"device_memory"}:
            return make_memory_buffers(self._world.device, part_bytes[0], num_buckets, self)
        sender = str(self._world.coordinates)
        buffers: BucketBuffers
        if self._transport_kind == "disk":
            buffers = SafetensorsFileBuffers(
                self._transfer_dir, sender, sum(part_bytes), num_buckets, self
            )
        else:
            buffers = SharedMemoryBuffers(
                self._transfer_dir, sender, sum(part_bytes), num_buckets, self, self._file_pool
            )
        buffers.lock_pages(self._world.device)
        return buffers

    def open_link_buffers(
        self, links: Sequence[LinkTransport], rounds: SendRounds, engine_dtype: str
    ) -> BucketBuffers:
        """Put all ranks of this copy and the ranks of each engine into one process group, and
        return this rank's buffers; every rank of the copy must call it. `engine_dtype` is the
        engines' weight type. An engine that one rank does not reach is left out on all. Where a
        rank fails, raise its error there, and SyncAbortedError on the others.
        """
        for link in links:
            link.set_send_rounds(rounds, engine_dtype)
        invited = self._invite_engines(links)
        new = [link for link in links if link.engine_name in invited]
        self._run_on_transports(
            lambda link: link.join_link(invited[link.engine_name]), _BEFORE_FIRST_BUCKET, new
        )
        own = self._world.copy_group.rank()
        rosters: Mapping[str, HeldSpansByRank] = {}
        if own == 0:
            rosters = dict(
                self._run_on_transports(
                    lambda link: (link.engine_name, link.fetch_roster()), _BEFORE_FIRST_BUCKET, new
                )
            )
        self.failure_by_engine, rosters = self._share_failures_and_rosters(
            self.failure_by_engine, rosters
        )
        for link in links:
            if link.engine_name in rosters:
                link.store_roster(rosters[link.engine_name])
            if link.engine_name in self.failure_by_engine:
                link.drop_link()
        self._makes_engine_requests = own == 0
        self._num_engines_at_once = MAX_ENGINES_AT_ONCE
        return make_memory_buffers(
            self._world.device, rounds.part_bytes[own], rounds.num_rounds, self
        )

    def _invite_engines(self, links: Sequence[LinkTransport]) -> dict[str, LinkInvitation]:
        """Open a new link with each engine with which the ranks of the copy do not all keep the
        same link, and return the invitations by engine name, on all ranks of the copy. All must
        call it.
        """
        group = self._world.copy_group
        device = self._world.device
        kept = gather_bytes_on_first_rank(
            msgspec.json.encode(
                {link.engine_name: link.get_reusable_link_name() for link in links}
            ),
            group,
            device,
        )
        answer = None
        failure = None
        if group.rank() == 0:
            try:
                found = [msgspec.json.decode(one, type=dict[str, str]) for one in kept or ()]
                names = {
                    link.engine_name: {one[link.engine_name] for one in found} for link in links
                }
                new = [
                    link
                    for link in links
                    if len(names[link.engine_name]) > 1 or "" in names[link.engine_name]
                ]
                made = self._run_on_transports(
                    lambda link: (link.engine_name, link.open_link()), _BEFORE_FIRST_BUCKET, new
                )
                answer = msgspec.json.encode(dict(made))
            except Exception as error:  # told to the other ranks first
                failure = error
        told = broadcast_bytes(answer, group, device)
        if failure is not None:
            raise failure
        return msgspec.json.decode(told, type=dict[str, LinkInvitation])

    def _share_failures_and_rosters(
        self, failure_by_engine: dict[str, str], roster_by_engine: Mapping[str, HeldSpansByRank]
    ) -> tuple[dict[str, str], Mapping[str, HeldSpansByRank]]:
        """Return the failures of all ranks of the copy together, and the rosters that the first
        rank holds. All ranks of the copy must call it.
        """
        group = self._world.copy_group
        device = self._world.device
        union: dict[str, str] = {}
        for one in (
            gather_bytes_on_first_rank(msgspec.json.encode(failure_by_engine), group, device) or ()
        ):
            union = msgspec.json.decode(one, type=dict[str, str]) | union
        told = broadcast_bytes(msgspec.json.encode((union, roster_by_engine)), group, device)
        return msgspec.json.decode(
            told, type=tuple[dict[str, str], dict[str, list[dict[str, list[TensorSpan]]]]]
        )

    def __call__(
        self, manifest: BucketManifest, bucket: Tensor, lent_segments: LentSegments = ()
    ) -> None:
        """Deliver a bucket to all engines that have not failed, a limited number at once, and add
        the traffic. `lent_segments` are the parts of the bucket in memory of other ranks' devices,
        by reading engine rank.
        """

        def deliver_to_engine(transport: BucketTransport) -> DeliveryTraffic:
            """Deliver the bucket to one engine, with its part of the lent segments."""
            if not lent_segments:
                return transport.deliver_bucket(manifest, bucket)
            return transport.lend_bucket(
                manifest, bucket, lent_segments[self._get_reader_slice(transport)]
            )

        if lent_segments:
            for transport in self._transports:
                if transport.engine_name in self.failure_by_engine:
                    # it opens no more memory
                    decline_lent_segments(lent_segments[self._get_reader_slice(transport)])
        for start in range(0, len(self._transports), self._num_engines_at_once):
            some = self._transports[start : start + self._num_engines_at_once]
            for traffic in self._run_on_transports(
                deliver_to_engine, f"while it was given {manifest}", some
            ):
                self.traffic += traffic
        if self._makes_engine_requests:
            faults.reach_fault_point("sync.after_bucket")

    def _get_reader_slice(self, transport: BucketTransport) -> slice:
        """Return the slice of this engine's ranks in the list of all reading ranks."""
        before = self._transports[: self._transports.index(transport)]
        first = sum(one.num_reading_ranks for one in before)
        return slice(first, first + transport.num_reading_ranks)

    def _run_on_transports(
        self, action: Callable[[Kind], T], stage: str, transports: Sequence[Kind]
    ) -> list[T]:
        """Run `action` on all transports that have not failed, at once, and wait for all. Return
        the results of those that succeed. Note an EngineError as the failure of its engine, with
        the stage; raise other errors.
        """
        standing = [
            transport
            for transport in transports
            if transport.engine_name not in self.failure_by_engine
        ]
        futures = [
            (transport, self._thread_pool.submit(action, transport)) for transport in standing
        ]
        # while one reads the bucket nobody may be told that it can go
        wait([future for _, future in futures])
        results = []
        for transport, future in futures:
            error = future.exception()  # raised, it would keep the bucket's memory
            if isinstance(error, EngineError):
                self.failure_by_engine[transport.engine_name] = (
                    f"{str(error).rstrip('.')}, {stage}."
                )
                logger.warning(
                    "%s is left out of this weight sync: %s", transport.engine_name, error
                )
            else:
                results.append(future.result())
        return results

    def __enter__(self) -> WeightDelivery:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread_pool.shutdown(wait=True)


def deliver_weights(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: SenderWorld,
    process_groups: EngineProcessGroups,
    *,
    version: int,
    engines: Sequence[EngineAddress],
    transfer_dir: Path,
    bucket_bytes: int,
    engine_dtype: str,
    transport_kind: WeightTransport,
    ranks_per_machine: int | None = None,
) -> SendReport:
    """Send the tensors of `exported_shards` to all engines and return the report of this rank:
    shard to shard where all engines take parts of tensors (through memory of this machine, or over
    process groups), else as whole tensors. Every rank must call it.

    `process_groups`: this process's groups with engines, kept between calls. `ranks_per_machine`:
    None where all ranks and engines are on one machine. The failure of an engine stands in the
    report and is not raised.
    """
    order = SendRequest(version, getattr(torch, engine_dtype), bucket_bytes)
    if engines and engines[0].quantization is not None:  # those of a run are alike
        exported_shards = (
            (make_fp8_rule(rule, engine_dtype), tensor) for rule, tensor in exported_shards
        )
    by_copy = assign_engines_to_copies(world, transport_kind, engines, ranks_per_machine)
    own = find_copy_index(world.layout, world.rank)
    served = by_copy.get(own, ()) if by_copy else engines[: 0 if own else None]
    if own and not served:
        return SendReport(0, 0.0, {})
    transports: list[BucketTransport] = []
    links: list[LinkTransport] = []
    sender: SenderWorld = (
        SingleRankWorld(world.device)
        if world.is_in_pieces and transport_kind == "process_group"
        else world
    )
    if transport_kind == "process_group" and (
        by_copy or (world.is_in_pieces and all_engines_take_parts(served))
    ):
        links = [
            LinkTransport(
                a, get_engine_kind(a.kind).make_link_verbs(a, transfer_dir), sender, process_groups
            )
            for a in served
        ]
        transports += links
    else:
        transports += [
            get_engine_kind(a.kind).make_transport(
                a, transport_kind, transfer_dir, world, process_groups
            )
            for a in served
        ]
    with WeightDelivery(
        transports, transport_kind, transfer_dir, sender, process_groups.file_pool
    ) as delivery:
        if links and by_copy:
            opened = partial(delivery.open_link_buffers, links, engine_dtype=engine_dtype)
            report = send_shards(exported_shards, world, order, open_links=opened)
        elif links:
            report = _send_tensor_pieces(exported_shards, world, order, delivery, links)
        elif by_copy:
            attach = partial(attach_shared_buffers, transfer_dir)
            report = send_shards(
                exported_shards,
                world,
                order,
                delivery.open_shard_buffers,
                attach,
                delivery.num_reading_ranks,
            )
        else:
            report = send_whole_tensors(
                exported_shards, world, order, delivery.open_buffers, delivery.alignment
            )
    if links and world.copy_group.rank():
        return report  # what went wrong is told by the first rank, which asks the engines
    moved = delivery.traffic.bytes_moved
    needed = delivery.traffic.bytes_needed
    return replace(
        report, failures=delivery.failure_by_engine, bytes_moved=moved, bytes_needed=needed
    )


def _send_tensor_pieces(
    exported_shards: Iterable[tuple[WeightRule, Tensor | None]],
    world: SenderWorld,
    request: SendRequest,
    delivery: WeightDelivery,
    links: Sequence[LinkTransport],
) -> SendReport:
    """Send tensors of which each rank has a piece, over links: the first rank joins the pieces, and
    cuts the tensors as the engines do.
    """
    rules: list[WeightRule] = []

    def record_rules() -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Yield the shards, and record their rules for the plan of the buckets."""
        for rule, tensor in exported_shards:
            rules.append(rule)
            yield rule, tensor

    def open_cut_buffers(*_: int) -> BucketBuffers:
        """Plan the buckets by the recorded rules, and open the link buffers for them."""
        rounds = SendRounds(
            (plan_buckets(rules, request.dtype_name, request.bucket_bytes, delivery.alignment),)
        )
        return delivery.open_link_buffers(links, rounds, request.dtype_name)

    return send_whole_tensors(record_rules(), world, request, open_cut_buffers, delivery.alignment)


def all_engines_take_parts(engines: Sequence[EngineAddress]) -> bool:
    """Return whether all of these engines take parts of tensors."""
    return all(engine.has_loader and engine.takes_parts for engine in engines)


def assign_engines_to_copies(
    world: SenderWorld,
    transport_kind: WeightTransport,
    engines: Sequence[EngineAddress],
    ranks_per_machine: int | None,
) -> dict[int, Sequence[EngineAddress]]:
    """Return, by number of a copy of the model, the engines that the copy serves shard to shard: in
    turns, through memory only those of its own machine. {}: the first copy must send whole tensors
    to all engines.

    All ranks get the same result.
    """
    layout = world.layout
    if transport_kind == "disk" or world.is_in_pieces or not all_engines_take_parts(engines):
        return {}
    copies = range(count_serving_copies(layout))
    if ranks_per_machine is None or transport_kind == "process_group":
        return {copy: engines[copy :: len(copies)] for copy in copies}
    first_of_last_stage = layout.world_size - layout.stage_size
    found: dict[int, Sequence[EngineAddress]] = {}
    for machine in {engine.machine for engine in engines}:
        ranks = range(machine * ranks_per_machine, (machine + 1) * ranks_per_machine)
        here = [
            copy
            for copy in copies
            if copy * layout.copy_size in ranks
            and first_of_last_stage + (copy + 1) * layout.copy_size - 1 in ranks
        ]
        if not here:
            return {}
        mine = [engine for engine in engines if engine.machine == machine]
        found |= {copy: mine[turn :: len(here)] for turn, copy in enumerate(here)}
    return found
