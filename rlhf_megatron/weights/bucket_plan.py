"""Which tensors travel together, and where in a bucket each of them lies. Pure integers: provable
on any machine.

A bucket is a flat buffer of Hugging Face tensors, or of the parts of them that one rank holds, in
the engine's type. Each rank that sends has buckets of its own; what it has of a fusion
group is never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import (
    HFTensor,
    TensorSpan,
    WeightRule,
    compute_shard_shape,
    find_holder_places,
    select_stage_rules,
)

ALIGNMENT = 64  # bytes; the start of every tensor in a bucket is a multiple of it


@dataclass(frozen=True)
class BucketSlot:
    """The place of one tensor, or of a part of it, in a bucket."""

    hf_tensor: HFTensor
    span: TensorSpan
    offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class WeightBucket:
    """One transfer of one rank."""

    index: int  # counts up per rank
    rules: tuple[WeightRule, ...]
    slots: tuple[BucketSlot, ...]  # the `hf` tensors of all rules, in order
    num_bytes: int  # of the buffer, gaps of the alignment included


SpansByName = Mapping[str, tuple[TensorSpan, ...]]
"""By Megatron name: the parts of a rule's HF tensors that a rank sends."""


def plan_buckets(
    rules: Sequence[WeightRule],
    engine_dtype: str,
    bucket_bytes: int,
    alignment: int = ALIGNMENT,
    spans_by_name: SpansByName | None = None,
) -> tuple[WeightBucket, ...]:
    """Return the buckets of one rank, which hold every Hugging Face tensor of `rules` exactly once,
    in the order of their fusion groups' first rules.

    `engine_dtype`: the engine's weight type, a key of DTYPE_BYTES. `spans_by_name`: the parts that
    the rank sends; None: whole tensors. `alignment`: each tensor begins at a multiple of so many
    bytes; 1: no gaps between tensors of one type, each of which is still aligned to its own
    elements. A fusion group that is larger than `bucket_bytes` gets a bucket of its own, of its own
    size (see `describe_oversized_buckets`). Raise ValueError for an unknown type or a size that is
    not positive.
    """
    if engine_dtype not in DTYPE_BYTES:
        raise ValueError(
            f"weights cannot be sent as {engine_dtype!r}; use one of {', '.join(DTYPE_BYTES)}."
        )
    if bucket_bytes <= 0:
        raise ValueError(f"bucket size is {bucket_bytes} bytes; it must be positive.")
    groups: dict[str, list[WeightRule]] = {}
    for rule in rules:
        groups.setdefault(rule.fusion_group, []).append(rule)
    packed: list[list[WeightRule]] = []
    used = 0
    for group in groups.values():
        size = sum(
            _align_bytes(size, alignment)
            for rule in group
            for _, _, size in _iterate_sent_parts(rule, engine_dtype, spans_by_name)
        )
        if not packed or used + size > bucket_bytes:
            packed.append([])
            used = 0
        packed[-1] += group
        used += size
    return tuple(
        _lay_out_bucket(index, members, engine_dtype, alignment, spans_by_name)
        for index, members in enumerate(packed)
    )


def describe_oversized_buckets(buckets: Sequence[WeightBucket], bucket_bytes: int) -> str | None:
    """Return a notice about buckets over `bucket_bytes`, each of which holds one large fusion
    group; None where there are none.
    """
    large = [bucket for bucket in buckets if bucket.num_bytes > bucket_bytes]
    if not large:
        return None
    worst = max(large, key=lambda bucket: bucket.num_bytes)
    return (
        f"{len(large)} weight buckets are over {bucket_bytes} bytes, up to {worst.num_bytes}"
        f" ({worst.rules[0].fusion_group} must stay whole); the buffers grow to that."
        " Raise rollout.update_weights_bucket_megabytes to plan for it."
    )


def fingerprint_bucket_plan(buckets: Sequence[WeightBucket]) -> int:
    """Return a number in [0, 2^48) that is equal on ranks that made the same plan."""
    text = repr(
        [
            (
                bucket.num_bytes,
                [(slot.hf_tensor.name, slot.span, slot.offset) for slot in bucket.slots],
            )
            for bucket in buckets
        ]
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


@dataclass(frozen=True)
class StageTraffic:
    """Bytes that one pipeline stage moves in a weight sync."""

    stage: int
    num_buckets: int
    gathered_bytes: int  # from the other ranks of its copy to the sender
    sent_bytes: int  # from the sender to the transfer directory, once; every engine reads as much
    peak_buffer_bytes: int  # the sender's two buckets in flight and what it gathers of the next


def compute_stage_traffic(
    table: Sequence[WeightRule], layout: ParallelLayout, engine_dtype: str, bucket_bytes: int
) -> tuple[StageTraffic, ...]:
    """Return the traffic of a weight sync for each pipeline stage. Raise ValueError when the layers
    do not divide.
    """
    stages = []
    for stage in range(layout.pp):
        rules = select_stage_rules(table, stage, layout)
        buckets = plan_buckets(rules, engine_dtype, bucket_bytes)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        received = [_count_gathered_bytes(bucket.rules, layout, engine_dtype) for bucket in buckets]
        stages.append(
            StageTraffic(
                stage=stage,
                num_buckets=len(buckets),
                gathered_bytes=sum(received),
                sent_bytes=sum(slot.num_bytes for bucket in buckets for slot in bucket.slots),
                peak_buffer_bytes=min(2, len(buckets)) * largest + max(received, default=0),
            )
        )
    return tuple(stages)


def _lay_out_bucket(
    index: int,
    rules: list[WeightRule],
    engine_dtype: str,
    alignment: int,
    spans_by_name: SpansByName | None,
) -> WeightBucket:
    """Return the bucket of these rules, with the offset of each tensor."""
    slots = []
    offset = 0
    for rule in rules:
        for hf, span, num_bytes in _iterate_sent_parts(rule, engine_dtype, spans_by_name):
            # behind half precision without gaps
            offset = _align_bytes(offset, DTYPE_BYTES[rule.get_sent_dtype(hf, engine_dtype)])
            slots.append(BucketSlot(hf, span, offset, num_bytes))
            offset += _align_bytes(num_bytes, alignment)
    return WeightBucket(index, tuple(rules), tuple(slots), offset)


def _iterate_sent_parts(
    rule: WeightRule, engine_dtype: str, spans_by_name: SpansByName | None
) -> Iterator[tuple[HFTensor, TensorSpan, int]]:
    """Yield (tensor, span, bytes) of each part of a rule's tensors that the rank sends."""
    own = (
        tuple(map(TensorSpan.cover_whole_tensor, rule.hf_tensors))
        if spans_by_name is None
        else spans_by_name[rule.megatron_name]
    )
    for hf, span in zip(rule.hf_tensors, own, strict=True):
        yield (
            hf,
            span,
            prod(span.shape_within(hf.shape)) * DTYPE_BYTES[rule.get_sent_dtype(hf, engine_dtype)],
        )


def list_gathered_shards(
    rules: Sequence[WeightRule], layout: ParallelLayout
) -> list[list[tuple[WeightRule, tuple[int, ...]]]]:
    """Return, for each place in a copy (`ParallelLayout.copy_size`), the (rule, shard shape) pairs
    that the rank there gives to the sender. The sender is the first rank, and its own list is
    empty.
    """
    sent: list[list[tuple[WeightRule, tuple[int, ...]]]] = [[] for _ in range(layout.copy_size)]
    for rule in rules:
        places = find_holder_places(rule, layout)
        for number, place in enumerate(places):
            if place:
                sent[place].append((rule, compute_shard_shape(rule, len(places), number)))
    return sent


def _count_gathered_bytes(
    rules: Sequence[WeightRule], layout: ParallelLayout, engine_dtype: str
) -> int:
    """Return the bytes of the shards that the sender gathers from other ranks."""
    return (
        sum(prod(shape) for shards in list_gathered_shards(rules, layout) for _, shape in shards)
        * DTYPE_BYTES[engine_dtype]
    )


def _align_bytes(num_bytes: int, alignment: int) -> int:
    """Return `num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment
