"""Which tensors travel together, and where in a bucket each of them lies. Pure integers: provable on any machine.

A bucket is a flat buffer of Hugging Face tensors in the engine's type. Each pipeline stage sends buckets of its own
tensors; a fusion group is never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rlhf_megatron.models.table import HFTensor, Rule, rules_of_stage
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

ALIGNMENT = 64  # bytes; the start of every tensor in a bucket is a multiple of it


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in a bucket."""

    hf: HFTensor
    offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """One transfer of one stage."""

    index: int  # counts up per stage
    rules: tuple[Rule, ...]
    slots: tuple[Slot, ...]  # the `hf` tensors of all rules, in order
    num_bytes: int  # of the buffer, gaps of the alignment included


def plan_buckets(
    rules: Sequence[Rule], dtype: str, bucket_bytes: int, alignment: int = ALIGNMENT
) -> tuple[Bucket, ...]:
    """Buckets that hold every HF tensor of `rules` exactly once, in order of their fusion groups' first rules.

    `dtype`: the engine's, a key of DTYPE_BYTES. `alignment`: bytes of which each tensor begins at a multiple; 1: no
    gaps between tensors, whose type is one and the same, so that each is still aligned to its own numbers. A fusion
    group that is larger than `bucket_bytes` gets a bucket of its own, of its own size (see `oversized`). Raises
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
        size = _padded_bytes(group, dtype, alignment)
        if not packed or used + size > bucket_bytes:
            packed.append([])
            used = 0
        packed[-1] += group
        used += size
    return tuple(_bucket(index, members, dtype, alignment) for index, members in enumerate(packed))


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
    text = repr([(bucket.num_bytes, [(slot.hf.name, slot.offset) for slot in bucket.slots]) for bucket in buckets])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


@dataclass(frozen=True)
class StageTraffic:
    """Bytes that one pipeline stage moves in a weight sync."""

    stage: int
    num_buckets: int
    gathered: int  # from the other tp ranks to the sender
    sent: int  # from the sender to the transfer directory, once; every engine reads as much
    peak_buffer: int  # the sender's two buckets in flight and what it gathers of the next


def stage_traffic(
    table: Sequence[Rule], tp_size: int, pp_size: int, dtype: str, bucket_bytes: int
) -> tuple[StageTraffic, ...]:
    """Traffic of every stage under a layout. Raises ValueError when the layers do not divide."""
    stages = []
    for stage in range(pp_size):
        buckets = plan_buckets(rules_of_stage(table, stage, pp_size), dtype, bucket_bytes)
        sizes = [bucket.num_bytes for bucket in buckets]
        largest = max(sizes, default=0)
        full = [_sharded_bytes(bucket.rules, dtype) if tp_size > 1 else 0 for bucket in buckets]
        stages.append(
            StageTraffic(
                stage=stage,
                num_buckets=len(buckets),
                gathered=sum(size // tp_size * (tp_size - 1) for size in full),
                sent=sum(slot.num_bytes for bucket in buckets for slot in bucket.slots),
                peak_buffer=min(2, len(buckets)) * largest + max(full, default=0),
            )
        )
    return tuple(stages)


def _bucket(index: int, rules: list[Rule], dtype: str, alignment: int) -> Bucket:
    slots, offset = [], 0
    for rule in rules:
        for hf in rule.hf:
            slots.append(Slot(hf, offset, prod(hf.shape) * DTYPE_BYTES[dtype]))
            offset += _aligned(slots[-1].num_bytes, alignment)
    return Bucket(index, tuple(rules), tuple(slots), offset)


def _padded_bytes(rules: Sequence[Rule], dtype: str, alignment: int) -> int:
    return sum(_aligned(prod(hf.shape) * DTYPE_BYTES[dtype], alignment) for rule in rules for hf in rule.hf)


def _sharded_bytes(rules: Sequence[Rule], dtype: str) -> int:
    return sum(prod(rule.megatron_shape) * DTYPE_BYTES[dtype] for rule in rules if rule.split != "replicated")


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
