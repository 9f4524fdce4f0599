"""Who sends what shard to shard: every entry once, from a rank that holds it, to each rank
that takes it.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from table_samples import FAMILIES, tied
from test_resharding_plan import check as check_buckets
from test_resharding_plan import make_rule

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.ranks.resharding.shard_sender import plan_send_rounds
from rlhf_megatron.weights.bucket_messages import plan_bucket_message
from rlhf_megatron.weights.bucket_plan import plan_buckets
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.shard_plan import (
    EngineLayout,
    SendShare,
    ShardTransfer,
    compute_stage_link_bytes,
    count_serving_copies,
    count_span_elements,
    find_engine_span,
    intersect_spans,
    iterate_transfers,
    plan_send_shares,
    spans_cover_tensor,
)
from rlhf_megatron.weights.weight_table import (
    HFTensor,
    TensorSpan,
    WeightRule,
    find_hf_spans,
    select_stage_rules,
    split_tensor,
)

DENSE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 16,
}
MODELS = {
    "dense": {**DENSE, "model_type": "qwen3"},
    "biased, tied": {**DENSE, "model_type": "qwen2", "tie_word_embeddings": True},
    "experts": {
        **DENSE,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "latent": {**DENSE, "model_type": "deepseek_v3", **LATENT},
}


@cache
def table_of(name: str, tp: int) -> tuple[WeightRule, ...]:
    return make_weight_table(MODELS[name], tp)


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("model", [*MODELS, *FAMILIES])
def test_a_shard_converts_to_the_parts_that_are_said(model: str, ways: int) -> None:
    """Of each shard `to_hf` makes just these parts of the tensors that the whole was made of."""
    hf_config = MODELS.get(model) or tied(FAMILIES[model])
    for rule in make_weight_table(hf_config, ways):
        hf = tuple(torch.randn(tensor.shape) for tensor in rule.hf_tensors)
        for number, shard in enumerate(split_tensor(rule.split, rule.to_megatron(*hf), ways)):
            spans = find_hf_spans(rule, ways, number)
            for whole, part, span in zip(hf, rule.to_hf(shard), spans, strict=True):
                expected = whole.narrow(span.dim, span.start, span.num_entries)
                assert torch.equal(part.narrow(span.dim, 0, span.num_entries), expected), (
                    rule.megatron_name,
                    number,
                )
        for index, tensor in enumerate(rule.hf_tensors):
            found = [find_hf_spans(rule, ways, number)[index] for number in range(ways)]
            assert spans_cover_tensor(
                found if rule.split != "replicated" else found[:1], tensor.shape
            )


def random_case(draw: random.Random) -> tuple[str, ParallelLayout, EngineLayout]:
    model = draw.choice(tuple(MODELS))
    has_experts = model in ("experts", "latent")
    tp = draw.choice((1, 2, 4))
    pp = draw.choice((1, 2))
    cp = draw.choice((1, 1, 2))
    ep = draw.choice((1, 2, 4, 8)) if has_experts else 1
    etp = draw.choice((1, 2, 4)) if has_experts else tp
    dp = draw.choice((1, 2, 3, 4, 6, 8))
    while tp * cp * dp % (ep * etp):
        dp += 1
    layout = ParallelLayout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    engine_tp = draw.choice((1, 2, 4, 8))
    fitting = [n for n in (1, 2, 4, 8) if engine_tp % n == 0]
    return model, layout, EngineLayout(engine_tp, draw.choice(fitting) if has_experts else 1)


def test_the_ranks_of_a_copy_share_the_bytes_of_a_bucket() -> None:
    """Each has half of 3,001 bytes, rounded up; a part of a buffer is a whole number of pages."""
    rules = select_stage_rules(table_of("dense", 2), 0, ParallelLayout(2, tp=2))
    rounds = plan_send_rounds(rules, ParallelLayout(2, tp=2), "bfloat16", 3_001)
    alone = [
        plan_buckets(share.rules, "bfloat16", 1_501, spans_by_name=share.spans_by_name)
        for share in plan_send_shares(rules, ParallelLayout(2, tp=2))
    ]
    assert (
        rounds.buckets_by_rank == tuple(map(tuple, alone))
        and rounds.num_rounds == max(map(len, alone)) > 1
    )
    largest = [max(bucket.num_bytes for bucket in mine) for mine in rounds.buckets_by_rank]
    assert rounds.part_bytes == [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in largest]
    assert rounds.part_offsets == [0, rounds.part_bytes[0], sum(rounds.part_bytes)]


def expected_entries(
    rule: WeightRule, hf: HFTensor, engine: EngineLayout, rank: int
) -> dict[int, range]:
    """By axis the entries that rank `rank` of SGLang has, counted one by one; {}: nothing."""
    ways = engine.tp
    number = rank
    if rule.expert is not None:
        ways = engine.tp // engine.ep
        number = rank % (engine.tp // engine.ep)
        if rank // ways != rule.expert * engine.ep // rule.num_experts:
            return {}
    if rule.split == "replicated":
        return {0: range(hf.shape[0])}
    if rule.split == "columns":
        each = hf.shape[1] // ways
        return {1: range(number * each, (number + 1) * each)}
    if "embed" in hf.name or "lm_head" in hf.name:
        each = (hf.shape[0] + 63) // 64 * 64 // ways
        return {0: range(min(number * each, hf.shape[0]), min((number + 1) * each, hf.shape[0]))}
    # a head is whole, and several ranks may have the same
    if any(part in hf.name for part in ("k_proj", "v_proj")):
        heads = 4
        dim = hf.shape[0] // 4
        first = number * heads // ways
        return {0: range(first * dim, (first + max(heads // ways, 1)) * dim)}
    each = hf.shape[0] // ways
    return {0: range(number * each, (number + 1) * each)}


def held_by(rule: WeightRule, hf: HFTensor, layout: ParallelLayout, place: int) -> TensorSpan:
    """What the ranks at a place have of a tensor,
    the same in the first copy and in the last one.
    """
    if rule.split == "replicated":
        return TensorSpan.cover_whole_tensor(hf)
    found = set()
    for copy in {0, count_serving_copies(layout) - 1}:
        rank = copy * layout.copy_size + place
        number = layout.locate_rank(rank).tp
        ways = layout.tp
        if rule.expert is not None:
            assert layout.compute_ep_rank(rank) == rule.expert * layout.ep // rule.num_experts, (
                rule.megatron_name,
                rank,
            )
            number = layout.compute_etp_rank(rank)
            ways = layout.etp
        found.add(find_hf_spans(rule, ways, number)[rule.hf_tensors.index(hf)])
    assert len(found) == 1
    return found.pop()


def check(
    rules: tuple[WeightRule, ...],
    layout: ParallelLayout,
    engine: EngineLayout,
    shares: tuple[SendShare, ...],
    moved: list[ShardTransfer],
) -> None:
    """Raises AssertionError where something is sent twice or never, by a rank that has not got it,
    or to one that does not take it; a fusion group is cut; a buffer is too large.
    """
    for rule in rules:
        for index, hf in enumerate(rule.hf_tensors):
            sent = [
                share.spans_by_name[rule.megatron_name][index]
                for share in shares
                if rule.megatron_name in share.spans_by_name
            ]
            assert spans_cover_tensor(sent, hf.shape), (hf.name, sent)
    by_name = {hf.name: (rule, hf) for rule in rules for hf in rule.hf_tensors}
    arrived: dict[tuple[str, int], list[TensorSpan]] = {}
    spans_held: dict[tuple[str, int], TensorSpan] = {}
    for one in moved:
        arrived.setdefault((one.hf_tensor.name, one.engine_rank), []).append(one.span)
        rule, _ = by_name[one.hf_tensor.name]
        assert rule.megatron_name in shares[one.sender_rank].spans_by_name
        held = spans_held.get((one.hf_tensor.name, one.sender_rank))
        if held is None:
            held = spans_held[one.hf_tensor.name, one.sender_rank] = held_by(
                rule, one.hf_tensor, layout, one.sender_rank
            )
        assert intersect_spans(held, one.span, one.hf_tensor.shape) == one.span, (one, held)
        assert one.num_bytes == 2 * prod(one.span.shape_within(one.hf_tensor.shape)) * (
            1 + (rule.dtype == "float32")
        )
    for name, (rule, hf) in by_name.items():
        for rank in range(engine.tp):
            entries = expected_entries(rule, hf, engine, rank)
            spans = arrived.pop((name, rank), [])
            if spans == [TensorSpan.cover_whole_tensor(hf)]:
                assert (
                    all(len(wanted) == hf.shape[axis] for axis, wanted in entries.items())
                    and entries
                )
                continue
            spans.sort(key=lambda span: span.start)
            for axis, wanted in entries.items():
                reached = wanted.start
                for span in spans:
                    assert (span.dim, span.start) == (axis, reached), (name, rank, spans)
                    reached += span.num_entries
                assert reached == wanted.stop, (name, rank, spans)
            assert entries or not spans, (name, rank, spans)
    assert not arrived
    for share in shares:
        buckets = plan_buckets(share.rules, "bfloat16", 1024, spans_by_name=share.spans_by_name)
        check_groups(share, buckets)


def check_groups(share: SendShare, buckets: Any) -> None:
    for group in {rule.fusion_group for rule in share.rules}:
        assert (
            sum(any(rule.fusion_group == group for rule in bucket.rules) for bucket in buckets) == 1
        )
    for bucket in buckets:
        assert bucket.num_bytes <= 1024 or len({rule.fusion_group for rule in bucket.rules}) == 1


def check_random(seeds: range) -> int:
    num_transfers = 0
    for seed in seeds:
        model, layout, engine = random_case(draw := random.Random(seed))
        rules = select_stage_rules(table_of(model, layout.tp), draw.randrange(layout.pp), layout)
        shares = plan_send_shares(rules, layout)
        moved = list(iterate_transfers(shares, engine, "bfloat16"))
        check(rules, layout, engine, shares, moved)
        num_transfers += len(moved)
    return num_transfers


def test_random_layouts_send_every_entry_once() -> None:
    assert check_random(range(200)) > 5_000


@pytest.mark.long
def test_five_thousand_random_layouts() -> None:
    assert check_random(range(1000, 6000)) > 200_000


def _doubled(shares: tuple[SendShare, ...], moved: list[ShardTransfer]) -> None:
    moved.append(moved[0])


def _lost(shares: tuple[SendShare, ...], moved: list[ShardTransfer]) -> None:
    moved.pop()


def _of_another_rank(shares: tuple[SendShare, ...], moved: list[ShardTransfer]) -> None:
    index = next(i for i, one in enumerate(moved) if "experts" in one.hf_tensor.name)
    moved[index] = replace(moved[index], sender_rank=1 - moved[index].sender_rank)


def _moved_on(shares: tuple[SendShare, ...], moved: list[ShardTransfer]) -> None:
    index = next(i for i, one in enumerate(moved) if "o_proj" in one.hf_tensor.name)
    span = moved[index].span
    moved[index] = replace(
        moved[index], span=replace(span, start=span.start - 1 if span.start else 1)
    )


def _not_shared(shares: tuple[SendShare, ...], moved: list[ShardTransfer]) -> None:
    shares[0].spans_by_name.popitem()


def _too_short(shares: tuple[SendShare, ...], moved: list[ShardTransfer]) -> None:
    moved[3] = replace(moved[3], num_bytes=moved[3].num_bytes - 2)


@pytest.mark.parametrize(
    "plant", [_doubled, _lost, _of_another_rank, _moved_on, _not_shared, _too_short]
)
def test_the_check_finds_planted_errors(plant: Callable[..., None]) -> None:
    layout = ParallelLayout(4, tp=2, ep=2, etp=1)
    engine = EngineLayout(2, 2)
    rules = table_of("experts", 2)
    shares = plan_send_shares(rules, layout)
    moved = list(iterate_transfers(shares, engine, "bfloat16"))
    check(rules, layout, engine, shares, moved)
    plant(shares, moved)
    with pytest.raises((AssertionError, KeyError)):
        check(rules, layout, engine, shares, moved)


def test_what_several_hold_is_shared_out() -> None:
    """tp2 ep4 etp1: four ranks, of which two pairs hold the same halves of the attention; ep4: all
    hold all of it.
    """
    for name, layout in (
        ("experts", ParallelLayout(4, tp=2, ep=4, etp=1)),
        *((n, ParallelLayout(4, ep=4)) for n in ("experts", "latent")),
    ):
        rules = table_of(name, layout.tp)
        loads = [
            sum(count_span_elements(r, share.spans_by_name[r.megatron_name]) for r in share.rules)
            for share in plan_send_shares(rules, layout)
        ]
        total = sum(prod(hf.shape) for rule in rules for hf in rule.hf_tensors)
        assert sum(loads) == total and max(loads) < 1.1 * total / 4, loads
    joined = [
        rule.megatron_name
        for rule in table_of("latent", 2)
        if rule.fusion_group.endswith("0.self_attn.qkv_a")
    ]
    senders = [
        [
            i
            for i, share in enumerate(
                plan_send_shares(table_of("latent", 2), ParallelLayout(4, tp=2, ep=4, etp=1))
            )
            if name in share.spans_by_name
        ]
        for name in joined
    ]
    assert len(joined) == 2 and senders[0] == senders[1] and len(senders[0]) == 1


def test_links_by_hand() -> None:
    """One q, k, v of 8, 4 and 4 heads of 4 by 16 in bfloat16: tp2 to tp4, each engine rank takes
    from one rank.
    """
    rules = [
        r
        for r in table_of("dense", 2)
        if r.megatron_name == "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    moved = list(
        iterate_transfers(
            plan_send_shares(rules, ParallelLayout(2, tp=2)), EngineLayout(4), "bfloat16"
        )
    )
    by_link: dict[tuple[int, int], int] = {}
    for one in moved:
        by_link[one.sender_rank, one.engine_rank] = (
            by_link.get((one.sender_rank, one.engine_rank), 0) + one.num_bytes
        )
    each = 2 * 16 * 4 * (2 + 1 + 1)
    assert by_link == {(0, 0): each, (0, 1): each, (1, 2): each, (1, 3): each}
    (stage,) = compute_stage_link_bytes(
        table_of("dense", 2), ParallelLayout(2, tp=2), EngineLayout(1), "bfloat16"
    )
    assert sum(stage.bytes_by_link.values()) == sum(
        2 * prod(hf.shape) for rule in table_of("dense", 2) for hf in rule.hf_tensors
    )


def test_parts_that_overlap_are_not_a_whole() -> None:
    assert spans_cover_tensor([TensorSpan(0, 3, 1), TensorSpan(0, 0, 3)], (4, 2))
    assert not spans_cover_tensor([TensorSpan(0, 0, 3), TensorSpan(0, 2, 1)], (4, 2)), (
        "entry 2 twice, entry 3 never"
    )
    assert not spans_cover_tensor([TensorSpan(0, 0, 2), TensorSpan(0, 3, 1)], (4, 2))


@pytest.mark.parametrize(("tp", "ep"), [(2, 3), (3, 2)])
def test_copies_that_are_not_alike_are_one(tp: int, ep: int) -> None:
    """Of six ranks the first three have all tensors, as have the last three,
    each in other places.
    """
    assert (
        ParallelLayout(6, tp=tp, ep=ep, etp=1).copy_size == 3
        and count_serving_copies(ParallelLayout(6, tp=tp, ep=ep, etp=1)) == 1
    )
    assert count_serving_copies(ParallelLayout(8, tp=2, ep=4, etp=1)) == 2


def test_one_of_the_ranks_that_share_an_expert_has_its_last_bias() -> None:
    """They add up what they make."""
    rules = [
        rule
        for rule in make_weight_table(EXPERT_FAMILIES["gpt_oss"], 1)
        if rule.hf_tensors[0].name.endswith(".down_proj_bias")
    ]
    for engine in (EngineLayout(2), EngineLayout(4, 2), EngineLayout(2, 2)):
        for rule in rules:
            taken = [
                find_engine_span(rule, rule.hf_tensors[0], engine, rank)
                for rank in range(engine.tp)
            ]
            assert [span for span in taken if span is not None] == [
                TensorSpan.cover_whole_tensor(rule.hf_tensors[0])
            ]
    assert rules


def test_a_message_is_aligned_and_takes_one_part_of_a_tensor() -> None:
    """Three numbers of two bytes, then a buffer of four a number; of a third tensor the engine's
    rank has two parts.
    """
    rules = [
        make_rule("a", "g", (3,)),
        replace(make_rule("b", "g", (2,)), dtype="float32"),
        make_rule("c", "g", (5,)),
    ]
    (bucket,) = plan_buckets(rules, "bfloat16", 256, alignment=1)
    held = {"a.0": [TensorSpan(0, 0, 3)], "b.0": [TensorSpan(0, 0, 2)]}
    message = plan_bucket_message(0, bucket, "bfloat16", held)
    assert [piece.offset for piece in message.pieces] == [0, 8] and message.num_bytes == 16
    with pytest.raises(ValueError, match=r"holds several parts of c\.0, .*; send it whole"):
        plan_bucket_message(
            0, bucket, "bfloat16", {**held, "c.0": [TensorSpan(0, 0, 1), TensorSpan(0, 3, 2)]}
        )


def test_two_axes_are_refused() -> None:
    with pytest.raises(
        ValueError, match="cut a tensor of \\(4, 4\\) along two axes; it must be sent whole"
    ):
        intersect_spans(TensorSpan(0, 0, 2), TensorSpan(1, 0, 2), (4, 4))
    with pytest.raises(ValueError, match=r"tp size \(2\) must be a multiple of its ep size \(4\)"):
        EngineLayout(2, 4)


def test_whole_tensors_are_planned_as_ever() -> None:
    rules = list(table_of("dense", 1))
    (share,) = plan_send_shares(rules, ParallelLayout(1))
    check_buckets(
        share.rules,
        plan_buckets(share.rules, "bfloat16", 4096, spans_by_name=share.spans_by_name),
        2,
        4096,
    )
