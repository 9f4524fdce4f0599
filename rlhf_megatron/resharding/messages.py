"""Messages of a weight sync over a link: what each rank of a copy sends of one bucket to each rank of an engine.

A message has the parts that stand in this rank of the engine, as the engine itself has told, and nothing else. The
engine is told what comes, so no lengths are exchanged. Pure but for `pack`, `take` and `OpenLinks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rlhf_megatron.models.table import HFTensor, Rule, Span
from rlhf_megatron.parallel.links import Invitation, Link
from rlhf_megatron.resharding.manifest import DTYPE_BYTES, BucketManifest, TensorEntry
from rlhf_megatron.resharding.plan import Bucket, Slot
from rlhf_megatron.resharding.shards import overlap

JOIN_TIMEOUT_S = 180.0
BUCKET_TIMEOUT_S = 600.0
Held = Mapping[str, Sequence[Span]]
"""By name of a tensor: the parts of it that stand in one rank of an engine."""
Roster = Sequence[Held]
"""By rank of an engine."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor inside a message."""

    key: str  # `TensorEntry.key` of what the sender laid into its bucket
    span: tuple[int, int, int]  # (axis, start, count) of the whole tensor
    offset: int  # bytes


@dataclass(frozen=True)
class Message:
    """The bytes that one rank of a copy sends to one rank of an engine."""

    source: int  # place in the copy
    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True)
class Exchange:
    """One bucket on its way to one engine, as the engine is told."""

    link: str  # name
    num_senders: int
    messages: tuple[tuple[Message, ...], ...]  # by rank of the engine; none that would be empty


def message_of(source: int, bucket: Bucket, dtype: str, held: Held) -> Message:
    """Return what the engine's rank needs of a bucket of the rank at place `source`. `dtype`: the engine's. Raises
    ValueError where parts are cut along another axis than the sender's, or a rank holds several apart.
    """
    pieces, end = [], 0
    for rule, slot in _slots(bucket):
        spans = held.get(slot.hf.name, ()) if slot.num_bytes else ()
        commons = {common for span in spans if (common := overlap(slot.span, span, slot.hf.shape)) is not None}
        if len(commons) > 1:
            raise ValueError(f"a rank of the engine holds several parts of {slot.hf.name}, {commons}; send it whole.")
        for common in commons:
            width = DTYPE_BYTES[rule.type_of(slot.hf, dtype)]
            end = -(-end // width) * width
            pieces.append(Piece(key_of(slot.hf, slot.span), (common.axis, common.start, common.count), end))
            end += prod(common.shape_in(slot.hf.shape)) * width
    return Message(source, tuple(pieces), end)


def _slots(bucket: Bucket) -> Iterator[tuple[Rule, Slot]]:
    slots = iter(bucket.slots)
    for rule in bucket.rules:
        for _ in rule.hf:
            yield rule, next(slots)


def key_of(hf: HFTensor, span: Span) -> str:
    """`TensorEntry.key` of a part of a tensor."""
    part = None if span.shape_in(hf.shape) == hf.shape else (span.axis, span.start, span.count)
    return TensorEntry(hf.name, "", hf.shape, 0, "", part).key


def pack(message: Message, bucket: Bucket, dtype: str, memory: Tensor) -> Tensor:
    """[num_bytes] uint8: the message's bytes. `memory` ([bytes] uint8) holds the bucket of its sender; no copy is made
    where the message is all of it."""
    slots = {key_of(slot.hf, slot.span): (rule, slot) for rule, slot in _slots(bucket) if slot.num_bytes}
    whole = [(key, slot.offset, slot.span) for key, (_, slot) in slots.items()]
    if [(piece.key, piece.offset, Span(*piece.span)) for piece in message.pieces] == whole:
        return memory[: message.num_bytes]
    packed = torch.empty(message.num_bytes, dtype=torch.uint8, device=memory.device)
    for piece in message.pieces:
        rule, slot = slots[piece.key]
        kind, span = getattr(torch, rule.type_of(slot.hf, dtype)), Span(*piece.span)
        held = memory[slot.offset : slot.offset + slot.num_bytes].view(kind).view(slot.span.shape_in(slot.hf.shape))
        shape = span.shape_in(slot.hf.shape)
        room = packed[piece.offset : piece.offset + prod(shape) * kind.itemsize].view(kind).view(shape)
        room.copy_(within(held, slot.span, span))
    return packed


def within(values: Tensor, held: Span, span: Span) -> Tensor:
    """Return the part `span` of a tensor, given the values of its part `held`, in which it lies."""
    return values.narrow(span.axis, span.start - (held.start if span.axis == held.axis else 0), span.count)


def turns(num_targets: int, source: int) -> Iterator[int]:
    """The ranks of an engine in the order in which the rank at place `source` sends to them: in each turn every rank of
    the engine hears from other senders, and nobody waits for who waits for him."""
    for turn in range(num_targets):
        yield (source + turn) % num_targets


def take(
    exchange: Exchange, manifest: BucketManifest, link: Link, rank: int, device: torch.device, timeout_s: float
) -> dict[str, tuple[Span, Tensor]]:
    """Receive a bucket on the engine's rank: by `TensorEntry.key` the part that came, and its values. It allocates what
    this rank takes of the bucket. Raises RuntimeError where a sender died or is late, ValueError for a message that is
    not of this bucket.
    """
    entries = {entry.key: entry for entry in manifest.tensors}
    mine = {message.source: message for message in exchange.messages[rank]}
    num_targets = len(exchange.messages)
    buffers = {source: torch.empty(one.num_bytes, dtype=torch.uint8, device=device) for source, one in mine.items()}
    for turn in range(num_targets):
        now = [source for source in mine if (source + turn) % num_targets == rank]
        link.exchange([], [(buffers[source], source) for source in now], timeout_s)
    found: dict[str, tuple[Span, Tensor]] = {}
    for source, message in mine.items():
        found |= _opened(message, entries, buffers[source])
    return found


def _opened(
    message: Message, entries: Mapping[str, TensorEntry], memory: Tensor
) -> Iterator[tuple[str, tuple[Span, Tensor]]]:
    for piece in message.pieces:
        entry, span = entries.get(piece.key), Span(*piece.span)
        if entry is None:
            raise ValueError(f"a message has {piece.key!r}, which the bucket's manifest has not.")
        kind, shape = getattr(torch, entry.dtype), span.shape_in(entry.shape)
        raw = memory[piece.offset : piece.offset + prod(shape) * kind.itemsize]
        yield piece.key, (span, raw.view(kind).view(shape))


def exchange_of(link: str, buckets: Sequence[Bucket | None], dtype: str, roster: Roster) -> Exchange:
    """`buckets`: by place in the copy, of one number; None: that rank has no more."""
    found = []
    for held in roster:
        messages = (message_of(place, b, dtype, held) for place, b in enumerate(buckets) if b is not None)
        found.append(tuple(message for message in messages if message.num_bytes))
    return Exchange(link, len(buckets), tuple(found))


class OpenLinks:
    """The links of one engine rank with the copies of a trainer, one each. Used by one thread."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}  # by sender

    def join(self, invitation: Invitation, sender: str, num_senders: int, rank: int, device: torch.device) -> None:
        """Join as rank `num_senders + rank`. `sender`: coordinates of the copy's first rank, whose older link goes."""
        self._links.pop(sender, None)
        link = Link(invitation, num_senders + rank, JOIN_TIMEOUT_S)
        link.join()
        link.greet(num_senders, device, JOIN_TIMEOUT_S)
        self._links[sender] = link

    def find(self, name: str) -> Link:
        """Raises ValueError where this rank is in no such link."""
        for link in self._links.values():
            if link.name == name:
                return link
        raise ValueError(f"this rank is in no link {name!r}; its copy of the trainer must invite it first.")

    def leave(self, name: str) -> None:
        """Close a link. Whatever the others of that link wait for fails then."""
        for sender, link in list(self._links.items()):
            if link.name == name:
                del self._links[sender]
                link.close()
