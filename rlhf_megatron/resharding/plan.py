"""Which tensors travel together, and where in a bucket each of them lies. Pure integers: provable on any machine.

A bucket is a flat buffer of Hugging Face tensors, or of the parts of them that one rank holds, in the engine's type.
Each rank that sends has buckets of its own; what it has of a fusion group is never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rlhf_megatron.models.table import HFTensor, Rule, Span, holders, rules_of_stage, shard_shape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

ALIGNMENT = 64  # bytes; the start of every tensor in a bucket is a multiple of it


@dataclass(frozen=True)
class Slot:
    """The place of one tensor, or of a part of it, in a bucket."""

    hf: HFTensor
    span: Span
    offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """One transfer of one rank."""

    index: int  # counts up per rank
    rules: tuple[Rule, ...]
    slots: tuple[Slot, ...]  # the `hf` tensors of all rules, in order
    num_bytes: int  # of the buffer, gaps of the alignment included


Spans = Mapping[str, tuple[Span, ...]]
"""By Megatron name: the parts of a rule's HF tensors that a rank sends."""


def plan_buckets(
    rules: Sequence[Rule], dtype: str, bucket_bytes: int, alignment: int = ALIGNMENT, spans: Spans | None = None
) -> tuple[Bucket, ...]:
    """Buckets that hold every HF tensor of `rules` exactly once, in order of their fusion groups' first rules.

    `dtype`: the engine's, a key of DTYPE_BYTES. `spans`: None: whole tensors. `alignment`: bytes of which each tensor
    begins at a multiple; 1: no gaps between tensors of one type, each of which is still aligned to its own numbers. A
    fusion group that is larger than `bucket_bytes` gets a bucket of its own, of its own size (see `oversized`). Raises
    ValueError for an unknown type or a size that is not positive.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"weights cannot be sent as {dtype!r}; use one of {', '.join(DTYPE_BYTES)}.")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket size is {bucket_bytes} bytes; it must be positive.")
    groups: dict[str, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(rule.fusion_group, []).append(rule)
    packed: list[list[Rule]] = []
    used = 0
    for group in groups.values():
        size = sum(_aligned(size, alignment) for rule in group for _, _, size in _parts(rule, dtype, spans))
        if not packed or used + size > bucket_bytes:
            packed.append([])
            used = 0
        packed[-1] += group
        used += size
    return tuple(_bucket(index, members, dtype, alignment, spans) for index, members in enumerate(packed))


def oversized(buckets: Sequence[Bucket], bucket_bytes: int) -> str | None:
    """A notice about buckets over the limit (one fusion group alone is larger), or None."""
    large = [bucket for bucket in buckets if bucket.num_bytes > bucket_bytes]
    if not large:
        return None
    worst = max(large, key=lambda bucket: bucket.num_bytes)
    return (
        f"{len(large)} weight buckets are over {bucket_bytes} bytes, up to {worst.num_bytes}"
        f" ({worst.rules[0].fusion_group} must stay whole); the buffers grow to that."
        " Raise rollout.update_weights_bucket_megabytes to plan for it."
    )


def fingerprint(buckets: Sequence[Bucket]) -> int:
    """Equal on ranks that made the same plan; in [0, 2^48)."""
    text = repr(
        [(bucket.num_bytes, [(slot.hf.name, slot.span, slot.offset) for slot in bucket.slots]) for bucket in buckets]
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


@dataclass(frozen=True)
class StageTraffic:
    """Bytes that one pipeline stage moves in a weight sync."""

    stage: int
    num_buckets: int
    gathered: int  # from the other ranks of its copy to the sender
    sent: int  # from the sender to the transfer directory, once; every engine reads as much
    peak_buffer: int  # the sender's two buckets in flight and what it gathers of the next


def stage_traffic(table: Sequence[Rule], layout: Layout, dtype: str, bucket_bytes: int) -> tuple[StageTraffic, ...]:
    """Traffic of every stage under a layout. Raises ValueError when the layers do not divide."""
    stages = []
    for stage in range(layout.pp):
        rules = rules_of_stage(table, stage, layout)
        buckets = plan_buckets(rules, dtype, bucket_bytes)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        received = [_received_bytes(bucket.rules, layout, dtype) for bucket in buckets]
        stages.append(
            StageTraffic(
                stage=stage,
                num_buckets=len(buckets),
                gathered=sum(received),
                sent=sum(slot.num_bytes for bucket in buckets for slot in bucket.slots),
                peak_buffer=min(2, len(buckets)) * largest + max(received, default=0),
            )
        )
    return tuple(stages)


def _bucket(index: int, rules: list[Rule], dtype: str, alignment: int, spans: Spans | None) -> Bucket:
    slots, offset = [], 0
    for rule in rules:
        for hf, span, num_bytes in _parts(rule, dtype, spans):
            offset = _aligned(offset, DTYPE_BYTES[rule.type_of(hf, dtype)])  # behind half precision without gaps
            slots.append(Slot(hf, span, offset, num_bytes))
            offset += _aligned(num_bytes, alignment)
    return Bucket(index, tuple(rules), tuple(slots), offset)


def _parts(rule: Rule, dtype: str, spans: Spans | None) -> Iterator[tuple[HFTensor, Span, int]]:
    """Yield the parts of a rule's tensors that are sent, with their bytes."""
    own = tuple(map(Span.whole, rule.hf)) if spans is None else spans[rule.megatron_name]
    for hf, span in zip(rule.hf, own, strict=True):
        yield hf, span, prod(span.shape_in(hf.shape)) * DTYPE_BYTES[rule.type_of(hf, dtype)]


def sent_by(rules: Sequence[Rule], layout: Layout) -> list[list[tuple[Rule, tuple[int, ...]]]]:
    """Return, by place in a copy (`Layout.copy_size`), the rules whose shard the rank there gives to the sender, which
    is the first rank, and the shard's shape. The sender gives itself nothing.
    """
    sent: list[list[tuple[Rule, tuple[int, ...]]]] = [[] for _ in range(layout.copy_size)]
    for rule in rules:
        places = holders(rule, layout)
        for number, place in enumerate(places):
            if place:
                sent[place].append((rule, shard_shape(rule, len(places), number)))
    return sent


def _received_bytes(rules: Sequence[Rule], layout: Layout, dtype: str) -> int:
    """Count the bytes of shards that stand on other ranks than the sender."""
    return sum(prod(shape) for shards in sent_by(rules, layout) for _, shape in shards) * DTYPE_BYTES[dtype]


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
