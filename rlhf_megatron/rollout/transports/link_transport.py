"""rollout.weight_transport process_group, shard to shard: the ranks of a copy and those of an
engine are one process group, in which each sends to each just what that one takes.

Copies cannot block one another: an engine works on one request at a time, and all ranks of the copy
that made it send meanwhile, in threads that wait for nothing but this engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from rlhf_megatron.device import choose_distributed_backend, synchronize_device
from rlhf_megatron.ranks.resharding.shard_sender import SendRounds
from rlhf_megatron.ranks.resharding.weight_sender import SenderWorld
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import SGLangWeightVerbs
from rlhf_megatron.rollout.transports.bucket_transport import (
    BucketMemory,
    BucketTransport,
    DeliveryTraffic,
    sum_receipt_traffic,
)
from rlhf_megatron.rollout.transports.process_group_transport import (
    LEAVE_TIMEOUT_S,
    EngineProcessGroups,
    open_engine_group,
)
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import (
    BUCKET_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    BucketExchange,
    HeldSpansByRank,
    iterate_receivers_in_rotation,
    pack_message,
    plan_bucket_exchange,
    plan_bucket_message,
)
from rlhf_megatron.weights.bucket_plan import WeightBucket
from rlhf_megatron.weights.engine_links import EngineLink, LinkInvitation
from rlhf_megatron.weights.weight_table import HFTensor, TensorSpan

T = TypeVar("T")


class EngineLinkVerbs(Protocol):
    """The link calls to an engine, made by the first rank of a copy. All raise EngineError."""

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        """Make the engine's ranks join as the ranks after the senders. Return when they have
        joined.
        """

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        """Return for each rank of the engine, by tensor name, the spans of these tensors that it
        holds.
        """

    def receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> DeliveryTraffic:
        """Make the engine receive and load what the ranks send of a bucket, and return the
        traffic.
        """

    def leave_link(self, link_name: str) -> None:
        """Make the engine leave the link of this name."""


class LinkTransport(BucketTransport):
    """Delivers over a link, a process group with one engine that every rank of the copy which
    serves it takes part in. The link stays for the next sync.
    """

    bucket_memory: BucketMemory = "device_memory"

    def __init__(
        self,
        address: EngineAddress,
        link_verbs: EngineLinkVerbs,
        world: SenderWorld,
        process_groups: EngineProcessGroups,
    ) -> None:
        self.engine_name = address.name
        self._address = address
        self._link_verbs = link_verbs
        self._world = world
        self._process_groups = process_groups
        self._copy_rank = world.copy_group.rank()
        self._num_senders = world.copy_group.size()
        self._send_rounds = SendRounds(())
        self._engine_dtype = ""

    def get_reusable_link_name(self) -> str:
        """Return the name of this rank's kept link with this server; "" where it has none."""
        link = self._process_groups.find_group(self._address)
        return (
            ""
            if link is None or link.name not in self._process_groups.roster_by_group
            else link.name
        )

    def open_link(self) -> LinkInvitation:
        """Open a new link on the copy's first rank, and return the invitation for the other ranks
        and the engine.
        """
        place = self._world
        size = self._num_senders + self._address.tp_size
        link = open_engine_group(
            self._address,
            str(place.coordinates),
            size,
            choose_distributed_backend(place.device),
            JOIN_TIMEOUT_S,
        )
        self._process_groups.store_group(
            self._address, link, lambda: self._link_verbs.leave_link(link.name)
        )
        return link.invitation

    def join_link(self, invitation: LinkInvitation) -> None:
        """Join the link. All ranks of the copy must call it at once; the first makes the engine
        join too. Raise EngineError.
        """
        link = self._process_groups.find_group(self._address)
        if link is None or link.name != invitation.name:
            link = EngineLink(invitation, self._copy_rank, JOIN_TIMEOUT_S)
            self._process_groups.store_group(self._address, link)
        sender = str(self._world.coordinates)
        what = f"process group {invitation.name}"
        joined = link

        def join_and_greet() -> None:
            """Join the group and open the connections, on this rank's side."""
            joined.join_group()
            joined.open_connections(self._num_senders, self._world.device, JOIN_TIMEOUT_S)

        self._run_beside_engine(
            what,
            lambda: self._link_verbs.join_link(invitation, sender, self._num_senders),
            join_and_greet,
            JOIN_TIMEOUT_S,
        )

    def fetch_roster(self) -> HeldSpansByRank:
        """Ask the engine, on the copy's first rank, which parts of the planned tensors each of its
        ranks holds.
        """
        slots = (
            slot
            for mine in self._send_rounds.buckets_by_rank
            for bucket in mine
            for slot in bucket.slots
        )
        return self._link_verbs.list_held_parts(
            list({slot.hf_tensor.name: slot.hf_tensor for slot in slots}.values())
        )

    def store_roster(self, roster: HeldSpansByRank) -> None:
        """Store the roster that `fetch_roster` returned, on every rank of the copy."""
        link = self._process_groups.find_group(self._address)
        if link is not None:
            self._process_groups.roster_by_group[link.name] = roster

    def drop_link(self) -> None:
        """Give up this rank's end of the link, because another rank could not join it."""
        self._process_groups.drop_group(self.engine_name)

    def set_send_rounds(self, rounds: SendRounds, engine_dtype: str) -> None:
        """Set the plan of the buckets of all ranks of the copy, and the engine's weight type."""
        self._send_rounds = rounds
        self._engine_dtype = engine_dtype

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Send this rank's bucket over the link. On the first rank, return the traffic when the
        engine has loaded what all ranks sent; on the others, return empty traffic when the engine
        has taken this rank's messages. Raise EngineError.
        """
        link = self._process_groups.find_group(self._address)
        if link is None:
            raise EngineError(
                f"{self.engine_name}: {self._world.coordinates} has no process group with"
                " it any more."
            )
        now = self._list_round_buckets(manifest.bucket)
        roster = self._process_groups.roster_by_group[link.name]
        kept = link

        def receive_in_engine() -> DeliveryTraffic:
            """Make the engine receive the messages of all ranks in this round."""
            return self._link_verbs.receive_exchange(
                manifest, plan_bucket_exchange(kept.name, now, self._engine_dtype, roster)
            )

        def send_own_messages() -> None:
            """Send this rank's messages."""
            self._send_bucket_messages(kept, roster, now[self._copy_rank], bucket)

        return (
            self._run_beside_engine(
                manifest.label, receive_in_engine, send_own_messages, BUCKET_TIMEOUT_S
            )
            or DeliveryTraffic()
        )

    def _list_round_buckets(self, round_index: int) -> list[WeightBucket | None]:
        """Return each rank's bucket of a round, by rank of the copy; None where a rank has none
        left.
        """
        return [
            mine[round_index] if round_index < len(mine) else None
            for mine in self._send_rounds.buckets_by_rank
        ]

    def _send_bucket_messages(
        self,
        link: EngineLink,
        roster: HeldSpansByRank,
        bucket: WeightBucket | None,
        bucket_memory: Tensor,
    ) -> None:
        """Send each engine rank its message of the bucket, one after the other, so that only one
        message has a copy in memory.
        """
        if bucket is None:
            return
        for target in iterate_receivers_in_rotation(len(roster), self._copy_rank):
            message = plan_bucket_message(
                self._copy_rank, bucket, self._engine_dtype, roster[target]
            )
            if message.num_bytes:
                raw = pack_message(message, bucket, self._engine_dtype, bucket_memory)
                synchronize_device(raw.device)
                link.exchange_tensors([(raw, self._num_senders + target)], [], BUCKET_TIMEOUT_S)

    def _run_beside_engine(
        self,
        operation: str,
        engine_request: Callable[[], T],
        local_action: Callable[[], None],
        timeout_s: float,
    ) -> T | None:
        """Run this rank's `local_action`; on the first rank make the engine's request at the same
        time, and return its answer (None on other ranks). Where it fails, drop the link and raise
        EngineError.
        """
        if self._copy_rank == 0:
            return self._process_groups.run_on_both_sides(
                self.engine_name, operation, engine_request, local_action, timeout_s
            )
        try:
            local_action()
        except (RuntimeError, OSError, ValueError) as error:
            self._process_groups.drop_group(self.engine_name)
            raise EngineError(
                f"{self.engine_name}, {operation}, from {self._world.coordinates}: {error}"
            ) from error
        return None


class SGLangLinkVerbs:
    """The link calls to an SGLang server, through the run's loader."""

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self._weight_verbs = SGLangWeightVerbs(address, transfer_dir)

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        """Make the engine's ranks join the link, as the ranks after the senders."""
        self._weight_verbs.join_link(invitation, sender, num_senders)

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        """Return for each rank of the engine the spans of these tensors that it holds."""
        return self._weight_verbs.list_held_parts(tensors)

    def receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> DeliveryTraffic:
        """Make the engine receive and load the messages of a bucket, and return the traffic by its
        receipts.
        """
        return sum_receipt_traffic(self._weight_verbs.receive_exchange(manifest, exchange))

    def leave_link(self, link_name: str) -> None:
        """Make the engine leave the link of this name."""
        self._weight_verbs.leave_link(link_name, LEAVE_TIMEOUT_S)


class LocalLinkVerbs:
    """The link's calls to the bundled server."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        """Make the server join the link, as the rank after the senders."""
        self._engine.join_link(invitation, sender, num_senders, JOIN_TIMEOUT_S)

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        """Return the whole of every tensor: the server's one rank holds them all."""
        return [{hf.name: [TensorSpan.cover_whole_tensor(hf)] for hf in tensors}]

    def receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> DeliveryTraffic:
        """Make the server receive and load the messages of a bucket, and return the traffic."""
        self._engine.receive_weights(manifest, exchange, BUCKET_TIMEOUT_S)
        moved = sum(message.num_bytes for messages in exchange.messages for message in messages)
        return DeliveryTraffic(moved, manifest.tensor_bytes)

    def leave_link(self, link_name: str) -> None:
        """Make the server leave the link of this name."""
        self._engine.leave_link(link_name, LEAVE_TIMEOUT_S)
