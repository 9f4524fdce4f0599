"""One sender's buckets to several engines. An engine that fails is left out of the rest; the others get all of it."""

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
from rlhf_megatron.models.table import Rule, Span
from rlhf_megatron.parallel.device import shareable_id
from rlhf_megatron.parallel.links import Invitation
from rlhf_megatron.resharding.buffers import Buffers, Lent, in_memory
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import Roster
from rlhf_megatron.resharding.plan import ALIGNMENT, plan_buckets
from rlhf_megatron.resharding.quantised import quantised_rule
from rlhf_megatron.resharding.sender import Alone, Order, Place, SendReport, send_weights
from rlhf_megatron.resharding.shard_sender import Rounds, gather_bytes, send_shards, tell
from rlhf_megatron.resharding.shards import copy_of, num_copies
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, WeightTransport
from rlhf_megatron.rollout.kinds import engine_kind
from rlhf_megatron.rollout.transports.base import Traffic, Transport
from rlhf_megatron.rollout.transports.disk import FileBuffers
from rlhf_megatron.rollout.transports.links import LinkTransport
from rlhf_megatron.rollout.transports.process_group import MAX_AT_ONCE, Groups
from rlhf_megatron.rollout.transports.tensor import SharedFiles, SharedMemoryBuffers, attach_buffers, decline_all

logger = logging.getLogger(__name__)
T = TypeVar("T")
Kind = TypeVar("Kind", bound=Transport)
_BEFORE = "before its first bucket"


class Delivery:
    """A context manager on a sending rank. Callable with a bucket: returns when all engines that still take part have
    read it.

    The failure of an engine is not raised: it would end the training ranks, whose weights are needed to mend it.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        kind: WeightTransport,
        transfer_dir: Path,
        place: Place,
        files: SharedFiles | None = None,
    ) -> None:
        """`transports`: one an engine. `place`: of the sender. `files`: those that it keeps between syncs."""
        self.alignment = ALIGNMENT if kind == "tensor" else 1  # a broadcast and a safetensors file have no gaps
        self.failures: dict[str, str] = {}  # engine name -> what it said first; it has not got everything
        self.traffic = Traffic()
        self._kind = kind
        self._asks_engines = True  # over links the first rank of a copy does, and the others only send
        self._transfer_dir = transfer_dir
        self._place = place
        self._files = files
        self._transports = tuple(transports)
        self._at_once = max(1, len(transports))  # the same ones on all ranks of a copy that send together
        self._threads = ThreadPoolExecutor(max(1, len(self._transports)), thread_name_prefix="deliver")

    @property
    def num_readers(self) -> int:
        """Ranks of engines that open device memory."""
        return sum(transport.num_readers for transport in self._transports)

    def open_buffers(self, capacity: int, num_buckets: int) -> Buffers:
        """Buffers that all transports can take buckets from; opens the transports, since some know where only then."""
        return self.open_shards([capacity], num_buckets, [shareable_id(self._place.device)])

    def open_shards(self, sizes: Sequence[int], num_buckets: int, devices: Sequence[str]) -> Buffers:
        """Open buffers in which buckets have a part of each rank: see `shard_sender.OpenShardBuffers`."""
        self._each(lambda transport: transport.open(devices), _BEFORE, self._transports)
        standing = {transport.memory for transport in self._transports if transport.name not in self.failures}
        if self._kind != "disk" and standing == {"device_memory"}:
            return in_memory(self._place.device, sizes[0], num_buckets, self)
        how = (self._transfer_dir, str(self._place.coordinates), sum(sizes), num_buckets, self)
        buffers = FileBuffers(*how) if self._kind == "disk" else SharedMemoryBuffers(*how, self._files)
        buffers.lock_pages(self._place.device)
        return buffers

    def open_links(self, links: Sequence[LinkTransport], rounds: Rounds, dtype: str) -> Buffers:
        """This rank's buffers, when all ranks of its copy and those of each engine are in one group; every rank of the
        copy calls it. `dtype`: the engines'. An engine that one rank does not reach is left out on all. Raises what
        failed, and SyncAbortedError on the other ranks."""
        for link in links:
            link.plan(rounds, dtype)
        invited = self._invited(links)
        new = [link for link in links if link.name in invited]
        self._each(lambda link: link.join(invited[link.name]), _BEFORE, new)
        own = self._place.copy_group.rank()
        rosters: Mapping[str, Roster] = {}
        if own == 0:
            rosters = dict(self._each(lambda link: (link.name, link.ask()), _BEFORE, new))
        self.failures, rosters = self._agreed(self.failures, rosters)
        for link in links:
            if link.name in rosters:
                link.know(rosters[link.name])
            if link.name in self.failures:
                link.give_up()
        self._asks_engines, self._at_once = own == 0, MAX_AT_ONCE
        return in_memory(self._place.device, rounds.sizes[own], rounds.count, self)

    def _invited(self, links: Sequence[LinkTransport]) -> dict[str, Invitation]:
        """Invite, to a new group, each engine with which the ranks of the copy have not all kept the same one."""
        group, device = self._place.copy_group, self._place.device
        kept = gather_bytes(msgspec.json.encode({link.name: link.kept() for link in links}), group, device)
        answer, failure = None, None
        if group.rank() == 0:
            try:
                found = [msgspec.json.decode(one, type=dict[str, str]) for one in kept or ()]
                names = {link.name: {one[link.name] for one in found} for link in links}
                new = [link for link in links if len(names[link.name]) > 1 or "" in names[link.name]]
                made = self._each(lambda link: (link.name, link.invite()), _BEFORE, new)
                answer = msgspec.json.encode(dict(made))
            except Exception as error:  # told to the other ranks first
                failure = error
        told = tell(answer, group, device)
        if failure is not None:
            raise failure
        return msgspec.json.decode(told, type=dict[str, Invitation])

    def _agreed(
        self, failures: dict[str, str], rosters: Mapping[str, Roster]
    ) -> tuple[dict[str, str], Mapping[str, Roster]]:
        """The failures of all ranks of the copy, and what the first one was told."""
        group, device = self._place.copy_group, self._place.device
        union: dict[str, str] = {}
        for one in gather_bytes(msgspec.json.encode(failures), group, device) or ():
            union = msgspec.json.decode(one, type=dict[str, str]) | union
        told = tell(msgspec.json.encode((union, rosters)), group, device)
        return msgspec.json.decode(told, type=tuple[dict[str, str], dict[str, list[dict[str, list[Span]]]]])

    def __call__(self, manifest: BucketManifest, bucket: Tensor, lent: Lent = ()) -> None:
        def deliver(transport: Transport) -> Traffic:
            if not lent:
                return transport.deliver(manifest, bucket)
            return transport.lend(manifest, bucket, lent[self._readers(transport)])

        if lent:
            for transport in self._transports:
                if transport.name in self.failures:
                    decline_all(lent[self._readers(transport)])  # it opens no more memory
        for start in range(0, len(self._transports), self._at_once):
            some = self._transports[start : start + self._at_once]
            for traffic in self._each(deliver, f"while it was given {manifest}", some):
                self.traffic += traffic
        if self._asks_engines:
            faults.reach("sync.after_bucket")

    def _readers(self, transport: Transport) -> slice:
        """The place of an engine's ranks among all readers."""
        before = self._transports[: self._transports.index(transport)]
        first = sum(one.num_readers for one in before)
        return slice(first, first + transport.num_readers)

    def _each(self, act: Callable[[Kind], T], when: str, transports: Sequence[Kind]) -> list[T]:
        """Act on all that have not failed, at once; return what `act` returned for those that do not fail now."""
        standing = [transport for transport in transports if transport.name not in self.failures]
        futures = [(transport, self._threads.submit(act, transport)) for transport in standing]
        wait([future for _, future in futures])  # while one reads the bucket nobody may be told that it can go
        results = []
        for transport, future in futures:
            error = future.exception()  # raised, it would keep the bucket's memory
            if isinstance(error, EngineError):
                self.failures[transport.name] = f"{str(error).rstrip('.')}, {when}."
                logger.warning("%s is left out of this weight sync: %s", transport.name, error)
            else:
                results.append(future.result())
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
    ranks_per_machine: int | None = None,
) -> SendReport:
    """Send what `export` yields to all engines, shard to shard where all of them take parts of tensors (from memory of
    this machine, or over process groups), else as whole tensors. Every rank calls it.

    `groups`: this process's groups with engines, kept between calls. `ranks_per_machine`: None where all ranks and
    engines are on one. An engine that fails stands in the report.
    """
    order = Order(version, getattr(torch, dtype), bucket_bytes)
    if engines and engines[0].quantization is not None:  # those of a run are alike
        export = ((quantised_rule(rule, dtype), tensor) for rule, tensor in export)
    by_copy = served_by_copies(place, transport, engines, ranks_per_machine)
    own = copy_of(place.layout, place.rank)
    served = by_copy.get(own, ()) if by_copy else engines[: 0 if own else None]
    if own and not served:
        return SendReport(0, 0.0, {})
    transports: list[Transport] = []
    links: list[LinkTransport] = []
    sender: Place = Alone(place.device) if place.is_in_pieces and transport == "process_group" else place
    if transport == "process_group" and (by_copy or (place.is_in_pieces and take_parts(served))):
        links = [LinkTransport(a, engine_kind(a.kind).link(a, transfer_dir), sender, groups) for a in served]
        transports += links
    else:
        transports += [engine_kind(a.kind).transport(a, transport, transfer_dir, place, groups) for a in served]
    with Delivery(transports, transport, transfer_dir, sender, groups.files) as delivery:
        if links and by_copy:
            opened = partial(delivery.open_links, links, dtype=dtype)
            report = send_shards(export, place, order, open_links=opened)
        elif links:
            report = _send_pieces(export, place, order, delivery, links)
        elif by_copy:
            attach = partial(attach_buffers, transfer_dir)
            report = send_shards(export, place, order, delivery.open_shards, attach, delivery.num_readers)
        else:
            report = send_weights(export, place, order, delivery.open_buffers, delivery.alignment)
    if links and place.copy_group.rank():
        return report  # what went wrong is told by the first rank, which asks the engines
    moved, needed = delivery.traffic.moved, delivery.traffic.needed
    return replace(report, failures=delivery.failures, bytes_moved=moved, bytes_needed=needed)


def _send_pieces(
    export: Iterable[tuple[Rule, Tensor | None]],
    place: Place,
    order: Order,
    delivery: Delivery,
    links: Sequence[LinkTransport],
) -> SendReport:
    """Send tensors of which each rank has a piece: the first rank puts them together, and cuts them as engines do."""
    rules: list[Rule] = []

    def noted() -> Iterator[tuple[Rule, Tensor | None]]:
        for rule, tensor in export:
            rules.append(rule)
            yield rule, tensor

    def cut(*_: int) -> Buffers:
        rounds = Rounds((plan_buckets(rules, order.type_name, order.bucket_bytes, delivery.alignment),))
        return delivery.open_links(links, rounds, order.type_name)

    return send_weights(noted(), place, order, cut, delivery.alignment)


def take_parts(engines: Sequence[EngineAddress]) -> bool:
    """Whether all of them take parts of tensors."""
    return all(engine.has_loader and engine.takes_parts for engine in engines)


def served_by_copies(
    place: Place, transport: WeightTransport, engines: Sequence[EngineAddress], ranks_per_machine: int | None
) -> dict[int, Sequence[EngineAddress]]:
    """Return, by number of a copy, the engines that it serves shard to shard, in turns (from memory those of its
    machine); {}: the first copy must send whole tensors to all.

    All ranks find the same."""
    layout = place.layout
    if transport == "disk" or place.is_in_pieces or not take_parts(engines):
        return {}
    copies = range(num_copies(layout))
    if ranks_per_machine is None or transport == "process_group":
        return {copy: engines[copy :: len(copies)] for copy in copies}
    first_of_last_stage = layout.world_size - layout.stage_size
    found: dict[int, Sequence[EngineAddress]] = {}
    for machine in {engine.machine for engine in engines}:
        ranks = range(machine * ranks_per_machine, (machine + 1) * ranks_per_machine)
        here = [
            copy
            for copy in copies
            if copy * layout.copy_size in ranks and first_of_last_stage + (copy + 1) * layout.copy_size - 1 in ranks
        ]
        if not here:
            return {}
        mine = [engine for engine in engines if engine.machine == machine]
        found |= {copy: mine[turn :: len(here)] for turn, copy in enumerate(here)}
    return found
