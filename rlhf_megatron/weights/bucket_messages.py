"""Messages of a weight sync over a link: what each rank of a copy sends of one bucket to each
rank of an engine.

A message has the parts that stand in this rank of the engine, as the engine itself has told, and
nothing else. The engine is told what comes, so no lengths are exchanged. Pure but for
`pack_message`, `receive_bucket` and `EngineRankLinks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES, BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_plan import BucketSlot, WeightBucket
from rlhf_megatron.weights.engine_links import EngineLink, LinkInvitation
from rlhf_megatron.weights.shard_plan import intersect_spans
from rlhf_megatron.weights.weight_table import HFTensor, TensorSpan, WeightRule

JOIN_TIMEOUT_S = 180.0
BUCKET_TIMEOUT_S = 600.0
HeldSpansByName = Mapping[str, Sequence[TensorSpan]]
"""By name of a tensor: the parts of it that stand in one rank of an engine."""
HeldSpansByRank = Sequence[HeldSpansByName]
"""By rank of an engine."""


@dataclass(frozen=True)
class MessagePiece:
    """A part of a tensor inside a message."""

    key: str  # `TensorEntry.key` of what the sender laid into its bucket
    span: tuple[int, int, int]  # (axis, start, count) of the whole tensor
    offset: int  # bytes


@dataclass(frozen=True)
class BucketMessage:
    """The bytes that one rank of a copy sends to one rank of an engine."""

    source: int  # place in the copy
    pieces: tuple[MessagePiece, ...]
    num_bytes: int


@dataclass(frozen=True)
class BucketExchange:
    """One bucket on its way to one engine, as the engine is told."""

    link: str  # name
    num_senders: int
    # by rank of the engine; none that would be empty
    messages: tuple[tuple[BucketMessage, ...], ...]


def plan_bucket_message(
    sender_rank: int, bucket: WeightBucket, engine_dtype: str, held_spans: HeldSpansByName
) -> BucketMessage:
    """Return the message with the parts of `bucket` that an engine rank, which holds `held_spans`,
    needs from the sender at place `sender_rank`; it is empty if the rank needs none.
    `engine_dtype`: the engine's weight type. Raise ValueError where the engine's part is cut along
    another axis than the sender's, or the engine rank holds several separate parts of the sender's.
    """
    pieces = []
    end = 0
    for rule, slot in _iterate_rule_slots(bucket):
        spans = held_spans.get(slot.hf_tensor.name, ()) if slot.num_bytes else ()
        commons = {
            common
            for span in spans
            if (common := intersect_spans(slot.span, span, slot.hf_tensor.shape)) is not None
        }
        if len(commons) > 1:
            raise ValueError(
                f"a rank of the engine holds several parts of {slot.hf_tensor.name}, {commons};"
                " send it whole."
            )
        for common in commons:
            width = DTYPE_BYTES[rule.get_sent_dtype(slot.hf_tensor, engine_dtype)]
            end = -(-end // width) * width
            pieces.append(
                MessagePiece(
                    make_entry_key(slot.hf_tensor, slot.span),
                    (common.dim, common.start, common.num_entries),
                    end,
                )
            )
            end += prod(common.shape_within(slot.hf_tensor.shape)) * width
    return BucketMessage(sender_rank, tuple(pieces), end)


def _iterate_rule_slots(bucket: WeightBucket) -> Iterator[tuple[WeightRule, BucketSlot]]:
    """Yield (rule, slot) of each tensor in a bucket, in order."""
    slots = iter(bucket.slots)
    for rule in bucket.rules:
        for _ in rule.hf_tensors:
            yield rule, next(slots)


def make_entry_key(hf_tensor: HFTensor, span: TensorSpan) -> str:
    """Return the `TensorEntry.key` of the part `span` of a tensor."""
    part = (
        None
        if span.shape_within(hf_tensor.shape) == hf_tensor.shape
        else (span.dim, span.start, span.num_entries)
    )
    return TensorEntry(hf_tensor.name, "", hf_tensor.shape, 0, "", part).key


def pack_message(
    message: BucketMessage, bucket: WeightBucket, engine_dtype: str, bucket_memory: Tensor
) -> Tensor:
    """Return the message's bytes, [num_bytes] uint8, taken from `bucket_memory` ([bytes] uint8),
    which holds the sender's bucket. Where the message is the whole bucket the result is a view,
    else a copy.
    """
    slots = {
        make_entry_key(slot.hf_tensor, slot.span): (rule, slot)
        for rule, slot in _iterate_rule_slots(bucket)
        if slot.num_bytes
    }
    whole = [(key, slot.offset, slot.span) for key, (_, slot) in slots.items()]
    if [(piece.key, piece.offset, TensorSpan(*piece.span)) for piece in message.pieces] == whole:
        return bucket_memory[: message.num_bytes]
    packed = torch.empty(message.num_bytes, dtype=torch.uint8, device=bucket_memory.device)
    for piece in message.pieces:
        rule, slot = slots[piece.key]
        kind = getattr(torch, rule.get_sent_dtype(slot.hf_tensor, engine_dtype))
        span = TensorSpan(*piece.span)
        held = (
            bucket_memory[slot.offset : slot.offset + slot.num_bytes]
            .view(kind)
            .view(slot.span.shape_within(slot.hf_tensor.shape))
        )
        shape = span.shape_within(slot.hf_tensor.shape)
        room = (
            packed[piece.offset : piece.offset + prod(shape) * kind.itemsize].view(kind).view(shape)
        )
        room.copy_(narrow_to_span(held, slot.span, span))
    return packed


def narrow_to_span(values: Tensor, held_span: TensorSpan, span: TensorSpan) -> Tensor:
    """Return the view of part `span` of a tensor, given the values of the part `held_span` that
    contains it.
    """
    return values.narrow(
        span.dim,
        span.start - (held_span.start if span.dim == held_span.dim else 0),
        span.num_entries,
    )


def iterate_receivers_in_rotation(num_engine_ranks: int, sender_rank: int) -> Iterator[int]:
    """Yield the ranks of an engine in the order in which the rank at place `sender_rank` sends to
    them. The start rotates with the sender, so that in each turn the engine's ranks hear from
    different senders and no two ranks wait for each other.
    """
    for turn in range(num_engine_ranks):
        yield (sender_rank + turn) % num_engine_ranks


def receive_bucket(
    exchange: BucketExchange,
    manifest: BucketManifest,
    link: EngineLink,
    engine_rank: int,
    device: torch.device,
    timeout_s: float,
) -> dict[str, tuple[TensorSpan, Tensor]]:
    """Receive the messages of a bucket on one rank of the engine. Return, by `TensorEntry.key`, the
    span that arrived and its values, in newly allocated memory on `device`. Raise RuntimeError
    where a sender died or is late, ValueError for a message that does not belong to this bucket.
    """
    entries = {entry.key: entry for entry in manifest.tensors}
    mine = {message.source: message for message in exchange.messages[engine_rank]}
    num_targets = len(exchange.messages)
    buffers = {
        source: torch.empty(one.num_bytes, dtype=torch.uint8, device=device)
        for source, one in mine.items()
    }
    for turn in range(num_targets):
        now = [source for source in mine if (source + turn) % num_targets == engine_rank]
        link.exchange_tensors([], [(buffers[source], source) for source in now], timeout_s)
    found: dict[str, tuple[TensorSpan, Tensor]] = {}
    for source, message in mine.items():
        found |= _unpack_message(message, entries, buffers[source])
    return found


def _unpack_message(
    message: BucketMessage, entry_by_key: Mapping[str, TensorEntry], memory: Tensor
) -> Iterator[tuple[str, tuple[TensorSpan, Tensor]]]:
    """Yield (key, (span, values)) of each piece of a received message, as views of `memory`. Raise
    ValueError for a piece that is not in the bucket's manifest.
    """
    for piece in message.pieces:
        entry = entry_by_key.get(piece.key)
        span = TensorSpan(*piece.span)
        if entry is None:
            raise ValueError(f"a message has {piece.key!r}, which the bucket's manifest has not.")
        kind = getattr(torch, entry.dtype)
        shape = span.shape_within(entry.shape)
        raw = memory[piece.offset : piece.offset + prod(shape) * kind.itemsize]
        yield piece.key, (span, raw.view(kind).view(shape))


def plan_bucket_exchange(
    link_name: str,
    bucket_by_sender: Sequence[WeightBucket | None],
    engine_dtype: str,
    held_spans_by_rank: HeldSpansByRank,
) -> BucketExchange:
    """Return the messages that all senders of a copy send to all ranks of one engine for one bucket
    number. `bucket_by_sender`: each sender's bucket, by place in the copy; None: that sender has no
    more buckets. Empty messages are left out.
    """
    found = []
    for held in held_spans_by_rank:
        messages = (
            plan_bucket_message(place, b, engine_dtype, held)
            for place, b in enumerate(bucket_by_sender)
            if b is not None
        )
        found.append(tuple(message for message in messages if message.num_bytes))
    return BucketExchange(link_name, len(bucket_by_sender), tuple(found))


class EngineRankLinks:
    """The links of one engine rank with the copies of a trainer, one each. Used by one thread."""

    def __init__(self) -> None:
        self._link_by_sender: dict[str, EngineLink] = {}  # by sender

    def join_link(
        self,
        invitation: LinkInvitation,
        sender: str,
        num_senders: int,
        engine_rank: int,
        device: torch.device,
    ) -> None:
        """Join the group of a copy as rank `num_senders + engine_rank` and open its connections.
        `sender`: coordinates of the copy's first rank; an older link with the same sender is
        dropped.
        """
        self._link_by_sender.pop(sender, None)
        link = EngineLink(invitation, num_senders + engine_rank, JOIN_TIMEOUT_S)
        link.join_group()
        link.open_connections(num_senders, device, JOIN_TIMEOUT_S)
        self._link_by_sender[sender] = link

    def find_link(self, link_name: str) -> EngineLink:
        """Return the link of this name. Raise ValueError where this rank has none."""
        for link in self._link_by_sender.values():
            if link.name == link_name:
                return link
        raise ValueError(
            f"this rank is in no link {link_name!r}; its copy of the trainer must invite it first."
        )

    def close_link(self, link_name: str) -> None:
        """Close a link and forget it; calls of its other members that wait for it then fail. Do
        nothing for an unknown name.
        """
        for sender, link in list(self._link_by_sender.items()):
            if link.name == link_name:
                del self._link_by_sender[sender]
                link.close()
