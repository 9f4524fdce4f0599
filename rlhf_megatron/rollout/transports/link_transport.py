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
    """The calls to an engine, made by the first rank of a copy. All raise EngineError."""

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        """Make the engine's ranks those after the senders; returns when they have joined."""

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        """Which parts of them stand in its ranks."""

    def receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> DeliveryTraffic:
        """Take what is sent of a bucket, and load it."""

    def leave_link(self, link_name: str) -> None:
        """End its part of that link."""


class LinkTransport(BucketTransport):
    """A link with an engine, on every rank of the copy that serves it.
    It stays for the next sync.
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
        """Name of this rank's link with this server; "": none."""
        link = self._process_groups.find_group(self._address)
        return (
            ""
            if link is None or link.name not in self._process_groups.roster_by_group
            else link.name
        )

    def open_link(self) -> LinkInvitation:
        """Open a new link, on the copy's first rank."""
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
        """Join the link. Call on all ranks of the copy at once."""
        link = self._process_groups.find_group(self._address)
        if link is None or link.name != invitation.name:
            link = EngineLink(invitation, self._copy_rank, JOIN_TIMEOUT_S)
            self._process_groups.store_group(self._address, link)
        sender = str(self._world.coordinates)
        what = f"process group {invitation.name}"
        joined = link

        def join_and_greet() -> None:
            joined.join_group()
            joined.open_connections(self._num_senders, self._world.device, JOIN_TIMEOUT_S)

        self._run_beside_engine(
            what,
            lambda: self._link_verbs.join_link(invitation, sender, self._num_senders),
            join_and_greet,
            JOIN_TIMEOUT_S,
        )

    def fetch_roster(self) -> HeldSpansByRank:
        """Ask, on the copy's first rank, which parts of this stage the ranks of the engine hold."""
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
        """Remember, on all ranks, what `fetch_roster` returned."""
        link = self._process_groups.find_group(self._address)
        if link is not None:
            self._process_groups.roster_by_group[link.name] = roster

    def drop_link(self) -> None:
        """This rank's end of a link that another rank did not come to."""
        self._process_groups.drop_group(self.engine_name)

    def set_send_rounds(self, rounds: SendRounds, engine_dtype: str) -> None:
        """Set the plan of all ranks of the copy. `engine_dtype`: the engine's."""
        self._send_rounds = rounds
        self._engine_dtype = engine_dtype

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """`bucket`: this rank's. On the first rank returns when the engine has loaded what all
        sent, on the others when it has taken what this one did.
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
            return self._link_verbs.receive_exchange(
                manifest, plan_bucket_exchange(kept.name, now, self._engine_dtype, roster)
            )

        def send_own_messages() -> None:
            self._send_bucket_messages(kept, roster, now[self._copy_rank], bucket)

        return (
            self._run_beside_engine(
                manifest.label, receive_in_engine, send_own_messages, BUCKET_TIMEOUT_S
            )
            or DeliveryTraffic()
        )

    def _list_round_buckets(self, round_index: int) -> list[WeightBucket | None]:
        """Return the buckets of a round, by place."""
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
        """One message after the other: no more than one has a copy of its own."""
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
        """Make this rank's part while, on the first rank, the engine is asked; returns
        its answer there.
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
    """Through the run's loader."""

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self._weight_verbs = SGLangWeightVerbs(address, transfer_dir)

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        self._weight_verbs.join_link(invitation, sender, num_senders)

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        return self._weight_verbs.list_held_parts(tensors)

    def receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> DeliveryTraffic:
        return sum_receipt_traffic(self._weight_verbs.receive_exchange(manifest, exchange))

    def leave_link(self, link_name: str) -> None:
        self._weight_verbs.leave_link(link_name, LEAVE_TIMEOUT_S)


class LocalLinkVerbs:
    """The link's calls to the bundled server."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        self._engine.join_link(invitation, sender, num_senders, JOIN_TIMEOUT_S)

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        return [{hf.name: [TensorSpan.cover_whole_tensor(hf)] for hf in tensors}]

    def receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> DeliveryTraffic:
        self._engine.receive_weights(manifest, exchange, BUCKET_TIMEOUT_S)
        moved = sum(message.num_bytes for messages in exchange.messages for message in messages)
        return DeliveryTraffic(moved, manifest.tensor_bytes)

    def leave_link(self, link_name: str) -> None:
        self._engine.leave_link(link_name, LEAVE_TIMEOUT_S)
