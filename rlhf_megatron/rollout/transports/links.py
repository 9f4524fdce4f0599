"""rollout.weight_transport process_group, shard to shard: the ranks of a copy and those of an engine are one process
group, in which each sends to each just what that one takes.

Copies cannot block one another: an engine works on one request at a time, and all ranks of the copy that made it send
meanwhile, in threads that wait for nothing but this engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from rlhf_megatron.models.table import HFTensor, Span
from rlhf_megatron.parallel.device import backend, synchronize
from rlhf_megatron.parallel.links import Invitation, Link
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import (
    BUCKET_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    Exchange,
    Roster,
    exchange_of,
    message_of,
    pack,
    turns,
)
from rlhf_megatron.resharding.plan import Bucket
from rlhf_megatron.resharding.sender import Place
from rlhf_megatron.resharding.shard_sender import Rounds
from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.local.client import LocalEngine
from rlhf_megatron.rollout.sglang.weights import SGLangVerbs
from rlhf_megatron.rollout.transports.base import BucketMemory, Traffic, Transport, traffic_of
from rlhf_megatron.rollout.transports.process_group import LEAVE_S, Groups, inviting

T = TypeVar("T")


class LinkVerbs(Protocol):
    """The calls to an engine, made by the first rank of a copy. All raise EngineError."""

    def join(self, invitation: Invitation, sender: str, num_senders: int) -> None:
        """Make the engine's ranks those after the senders; returns when they have joined."""

    def holds(self, tensors: Sequence[HFTensor]) -> Roster:
        """Which parts of them stand in its ranks."""

    def take(self, manifest: BucketManifest, exchange: Exchange) -> Traffic:
        """Take what is sent of a bucket, and load it."""

    def leave(self, name: str) -> None:
        """End its part of that link."""


class LinkTransport(Transport):
    """A link with an engine, on every rank of the copy that serves it. It stays for the next sync."""

    memory: BucketMemory = "device_memory"

    def __init__(self, address: EngineAddress, verbs: LinkVerbs, place: Place, groups: Groups) -> None:
        self.name = address.name
        self._address = address
        self._verbs = verbs
        self._place = place
        self._groups = groups
        self._own, self._num_senders = place.copy_group.rank(), place.copy_group.size()
        self._rounds = Rounds(())
        self._dtype = ""

    def kept(self) -> str:
        """Name of this rank's link with this server; "": none."""
        link = self._groups.find(self._address)
        return "" if link is None or link.name not in self._groups.rosters else link.name

    def invite(self) -> Invitation:
        """Open a new link, on the copy's first rank."""
        place = self._place
        size = self._num_senders + self._address.tp_size
        link = inviting(self._address, str(place.coordinates), size, backend(place.device), JOIN_TIMEOUT_S)
        self._groups.keep(self._address, link, lambda: self._verbs.leave(link.name))
        return link.invitation

    def join(self, invitation: Invitation) -> None:
        """Join the link. Call on all ranks of the copy at once."""
        link = self._groups.find(self._address)
        if link is None or link.name != invitation.name:
            link = Link(invitation, self._own, JOIN_TIMEOUT_S)
            self._groups.keep(self._address, link)
        sender, what = str(self._place.coordinates), f"process group {invitation.name}"
        joined = link

        def here() -> None:
            joined.join()
            joined.greet(self._num_senders, self._place.device, JOIN_TIMEOUT_S)

        self._together(what, lambda: self._verbs.join(invitation, sender, self._num_senders), here, JOIN_TIMEOUT_S)

    def ask(self) -> Roster:
        """Ask, on the copy's first rank, which parts of this stage the ranks of the engine hold."""
        slots = (slot for mine in self._rounds.buckets for bucket in mine for slot in bucket.slots)
        return self._verbs.holds(list({slot.hf.name: slot.hf for slot in slots}.values()))

    def know(self, roster: Roster) -> None:
        """Remember, on all ranks, what `ask` returned."""
        link = self._groups.find(self._address)
        if link is not None:
            self._groups.rosters[link.name] = roster

    def give_up(self) -> None:
        """This rank's end of a link that another rank did not come to."""
        self._groups.drop(self.name)

    def plan(self, rounds: Rounds, dtype: str) -> None:
        """Set the plan of all ranks of the copy. `dtype`: the engine's."""
        self._rounds, self._dtype = rounds, dtype

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        """`bucket`: this rank's. On the first rank returns when the engine has loaded what all sent, on the others when
        it has taken what this one did."""
        link = self._groups.find(self._address)
        if link is None:
            raise EngineError(f"{self.name}: {self._place.coordinates} has no process group with it any more.")
        now, roster, kept = self._buckets(manifest.bucket), self._groups.rosters[link.name], link

        def request() -> Traffic:
            return self._verbs.take(manifest, exchange_of(kept.name, now, self._dtype, roster))

        def here() -> None:
            self._send(kept, roster, now[self._own], bucket)

        return self._together(manifest.place, request, here, BUCKET_TIMEOUT_S) or Traffic()

    def _buckets(self, number: int) -> list[Bucket | None]:
        """Return the buckets of a round, by place."""
        return [mine[number] if number < len(mine) else None for mine in self._rounds.buckets]

    def _send(self, link: Link, roster: Roster, bucket: Bucket | None, memory: Tensor) -> None:
        """One message after the other: no more than one has a copy of its own."""
        if bucket is None:
            return
        for target in turns(len(roster), self._own):
            message = message_of(self._own, bucket, self._dtype, roster[target])
            if message.num_bytes:
                raw = pack(message, bucket, self._dtype, memory)
                synchronize(raw.device)
                link.exchange([(raw, self._num_senders + target)], [], BUCKET_TIMEOUT_S)

    def _together(self, what: str, request: Callable[[], T], here: Callable[[], None], timeout_s: float) -> T | None:
        """Make this rank's part while, on the first rank, the engine is asked; returns its answer there."""
        if self._own == 0:
            return self._groups.together(self.name, what, request, here, timeout_s)
        try:
            here()
        except (RuntimeError, OSError, ValueError) as error:
            self._groups.drop(self.name)
            raise EngineError(f"{self.name}, {what}, from {self._place.coordinates}: {error}") from error
        return None


class SGLangLinkVerbs:
    """Through the run's loader."""

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self._verbs = SGLangVerbs(address, transfer_dir)

    def join(self, invitation: Invitation, sender: str, num_senders: int) -> None:
        self._verbs.join_link(invitation, sender, num_senders)

    def holds(self, tensors: Sequence[HFTensor]) -> Roster:
        return self._verbs.holds(tensors)

    def take(self, manifest: BucketManifest, exchange: Exchange) -> Traffic:
        return traffic_of(self._verbs.take(manifest, exchange))

    def leave(self, name: str) -> None:
        self._verbs.leave_link(name, LEAVE_S)


class LocalLinkVerbs:
    """The link's calls to the bundled server."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def join(self, invitation: Invitation, sender: str, num_senders: int) -> None:
        self._engine.join_link(invitation, sender, num_senders, JOIN_TIMEOUT_S)

    def holds(self, tensors: Sequence[HFTensor]) -> Roster:
        return [{hf.name: [Span.whole(hf)] for hf in tensors}]

    def take(self, manifest: BucketManifest, exchange: Exchange) -> Traffic:
        self._engine.take_weights(manifest, exchange, BUCKET_TIMEOUT_S)
        moved = sum(message.num_bytes for messages in exchange.messages for message in messages)
        return Traffic(moved, manifest.tensor_bytes)

    def leave(self, name: str) -> None:
        self._engine.leave_link(name, LEAVE_S)
