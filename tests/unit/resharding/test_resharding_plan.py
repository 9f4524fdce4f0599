"""Bucket plans: every byte once, groups whole, bounded; and what one stage moves."""

import random
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch

from rlhf_megatron.weights.bucket_plan import (
    ALIGNMENT,
    WeightBucket,
    compute_stage_traffic,
    describe_oversized_buckets,
    fingerprint_bucket_plan,
    plan_buckets,
)
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule, select_stage_rules

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def make_rule(name: str, group: str, *shapes: tuple[int, ...]) -> WeightRule:
    hf = tuple(HFTensor(f"{name}.{i}", shape) for i, shape in enumerate(shapes))
    total = sum(prod(shape) for shape in shapes)
    return WeightRule(name, (total,), hf, torch.cat, lambda t: (t,), "rows", "layer", 0, group)


def check(
    rules: list[WeightRule], buckets: tuple[WeightBucket, ...], dtype_bytes: int, bucket_bytes: int
) -> None:
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(s.hf_tensor.name for s in slots) == sorted(
        hf.name for rule in rules for hf in rule.hf_tensors
    )
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        assert [s.hf_tensor for s in bucket.slots] == [
            hf for rule in bucket.rules for hf in rule.hf_tensors
        ]
        written = [0] * bucket.num_bytes
        for slot in bucket.slots:
            assert (
                slot.num_bytes == prod(slot.hf_tensor.shape) * dtype_bytes
                and slot.offset % ALIGNMENT == 0
            )
            for byte in range(slot.offset, slot.offset + slot.num_bytes):
                written[byte] += 1
        assert max(written, default=0) <= 1
        assert (
            bucket.num_bytes <= bucket_bytes
            or len({rule.fusion_group for rule in bucket.rules}) == 1
        )
    for bucket, after in pairwise(buckets):  # which begins because the next group does not fit
        group = after.rules[0].fusion_group
        names = {
            hf.name for rule in after.rules if rule.fusion_group == group for hf in rule.hf_tensors
        }
        size = sum(
            -(-s.num_bytes // ALIGNMENT) * ALIGNMENT
            for s in after.slots
            if s.hf_tensor.name in names
        )
        assert bucket.num_bytes + size > bucket_bytes
    for group in {rule.fusion_group for rule in rules}:
        assert (
            sum(any(rule.fusion_group == group for rule in bucket.rules) for bucket in buckets) == 1
        )
    notice = describe_oversized_buckets(buckets, bucket_bytes)
    assert (notice is not None) == any(bucket.num_bytes > bucket_bytes for bucket in buckets)


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_write_every_byte_once_and_keep_groups_whole(seed: int) -> None:
    draw = random.Random(seed)
    rules = [
        make_rule(
            f"t{i}",
            f"g{draw.randrange(12)}",
            *[(draw.randrange(1, 60),) for _ in range(draw.choice((1, 1, 2, 3)))],
        )
        for i in range(draw.randrange(1, 25))
    ]
    dtype, size = draw.choice((("float32", 4), ("bfloat16", 2)))
    limit = draw.choice((64, 256, 1000, 100_000))
    check(rules, plan_buckets(rules, dtype, limit), size, limit)


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_stages_of_a_model_send_every_tensor_once(pp_size: int) -> None:
    table = make_weight_table(QWEN3, 2)
    names = []
    for stage in range(pp_size):
        rules = list(select_stage_rules(table, stage, ParallelLayout(pp_size, pp=pp_size)))
        buckets = plan_buckets(rules, "bfloat16", 8192)
        check(rules, buckets, 2, 8192)
        names += [slot.hf_tensor.name for bucket in buckets for slot in bucket.slots]
    assert sorted(names) == sorted(hf.name for rule in table for hf in rule.hf_tensors)


def test_a_worked_example() -> None:
    """Sizes 40, 40 + 8 (one group, not adjacent), 400, 4 bytes; 64-byte places;
    at most 256 bytes.
    """
    rules = [
        make_rule("a", "ga", (10,)),
        make_rule("b", "gb", (10,)),
        make_rule("c", "gc", (100,)),
        make_rule("d", "gb", (2,)),
        make_rule("e", "ge", (1,)),
    ]
    buckets = plan_buckets(rules, "float32", 256)
    assert [[(s.hf_tensor.name, s.offset) for s in b.slots] for b in buckets] == [
        [("a.0", 0), ("b.0", 64), ("d.0", 128)],
        [("c.0", 0)],
        [("e.0", 0)],
    ]
    assert [b.num_bytes for b in buckets] == [192, 448, 64]
    notice = describe_oversized_buckets(buckets, 256)
    assert notice is not None and notice.startswith(
        "1 weight buckets are over 256 bytes, up to 448 (gc must stay whole)"
    )


def test_without_gaps_each_tensor_is_aligned_to_its_own_numbers() -> None:
    """Three numbers of two bytes, then a buffer of four a number, then one of two."""
    rules = [
        make_rule("a", "g", (3,)),
        replace(make_rule("b", "g", (2,)), dtype="float32"),
        make_rule("c", "g", (1,)),
    ]
    (bucket,) = plan_buckets(rules, "bfloat16", 256, alignment=1)
    assert [(slot.offset, slot.num_bytes) for slot in bucket.slots] == [(0, 6), (8, 8), (16, 2)]
    assert bucket.num_bytes == 18


def test_fingerprint_tells_plans_apart() -> None:
    rules = [make_rule("a", "ga", (10,)), make_rule("b", "gb", (10,))]
    same = [fingerprint_bucket_plan(plan_buckets(rules, "float32", 256)) for _ in range(2)]
    assert same[0] == same[1] and 0 <= same[0] < 2**48
    # 40 and 20 bytes take the same place
    assert fingerprint_bucket_plan(plan_buckets(rules, "bfloat16", 256)) == same[0]
    assert fingerprint_bucket_plan(plan_buckets(rules, "float32", 64)) != same[0]
    renamed = [rules[0], replace(rules[1], hf_tensors=(HFTensor("c", (10,)),))]
    assert fingerprint_bucket_plan(plan_buckets(renamed, "float32", 256)) != same[0]


def test_traffic_of_a_stage() -> None:
    """tp2: embedding 102 x 32 (padded), qkv 64 x 32, proj 32 x 32, fc1 128 x 32, fc2 32 x 64 per
    layer; bfloat16.
    """
    layer = 64 * 32 + 32 * 32 + 128 * 32 + 32 * 64
    norms = 2 * 32 + 2 * 8
    first, last = compute_stage_traffic(
        make_weight_table(QWEN3, 2), ParallelLayout(4, tp=2, pp=2), "bfloat16", 1 << 30
    )
    assert (first.num_buckets, last.num_buckets) == (1, 1)
    assert first.gathered_bytes == 102 * 32 + 2 * layer  # half of it, two bytes each
    assert first.sent_bytes == 2 * (101 * 32 + 2 * (layer + norms))
    assert last.sent_bytes == 2 * (32 + 101 * 32 + 2 * (layer + norms))
    assert (
        compute_stage_traffic(
            make_weight_table(QWEN3), ParallelLayout(2, pp=2), "bfloat16", 1 << 30
        )[0].gathered_bytes
        == 0
    )
    (whole,) = plan_buckets(
        select_stage_rules(make_weight_table(QWEN3, 2), 0, ParallelLayout(4, tp=2, pp=2)),
        "bfloat16",
        1 << 30,
    )
    assert first.peak_buffer_bytes == whole.num_bytes + first.gathered_bytes, (
        "one bucket has one buffer"
    )


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="weights cannot be sent as 'int8'; use one of float32"):
        plan_buckets([], "int8", 1)
    with pytest.raises(ValueError, match="bucket size is 0 bytes; it must be positive"):
        plan_buckets([], "float32", 0)
