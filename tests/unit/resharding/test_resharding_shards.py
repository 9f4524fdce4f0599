"""Who sends what shard to shard: every entry once, from a rank that holds it, to each rank that takes it."""

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
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import HFTensor, Rule, Span, hf_spans, rules_of_stage, split
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.messages import message_of
from rlhf_megatron.resharding.plan import plan_buckets
from rlhf_megatron.resharding.shard_sender import plan_rounds
from rlhf_megatron.resharding.shards import (
    EngineLayout,
    Share,
    Transfer,
    is_whole,
    num_copies,
    num_elements,
    overlap,
    shares_of,
    stage_links,
    taken_by,
    transfers,
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
def table_of(name: str, tp: int) -> tuple[Rule, ...]:
    return table_for(MODELS[name], tp)


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("model", [*MODELS, *FAMILIES])
def test_a_shard_converts_to_the_parts_that_are_said(model: str, ways: int) -> None:
    """Of each shard `to_hf` makes just these parts of the tensors that the whole was made of."""
    hf_config = MODELS.get(model) or tied(FAMILIES[model])
    for rule in table_for(hf_config, ways):
        hf = tuple(torch.randn(tensor.shape) for tensor in rule.hf)
        for number, shard in enumerate(split(rule.split, rule.to_megatron(*hf), ways)):
            spans = hf_spans(rule, ways, number)
            for whole, part, span in zip(hf, rule.to_hf(shard), spans, strict=True):
                expected = whole.narrow(span.axis, span.start, span.count)
                assert torch.equal(part.narrow(span.axis, 0, span.count), expected), (rule.megatron_name, number)
        for index, tensor in enumerate(rule.hf):
            found = [hf_spans(rule, ways, number)[index] for number in range(ways)]
            assert is_whole(found if rule.split != "replicated" else found[:1], tensor.shape)


def random_case(draw: random.Random) -> tuple[str, Layout, EngineLayout]:
    model = draw.choice(tuple(MODELS))
    has_experts = model in ("experts", "latent")
    tp, pp, cp = draw.choice((1, 2, 4)), draw.choice((1, 2)), draw.choice((1, 1, 2))
    ep = draw.choice((1, 2, 4, 8)) if has_experts else 1
    etp = draw.choice((1, 2, 4)) if has_experts else tp
    dp = draw.choice((1, 2, 3, 4, 6, 8))
    while tp * cp * dp % (ep * etp):
        dp += 1
    layout = Layout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    engine_tp = draw.choice((1, 2, 4, 8))
    fitting = [n for n in (1, 2, 4, 8) if engine_tp % n == 0]
    return model, layout, EngineLayout(engine_tp, draw.choice(fitting) if has_experts else 1)


def test_the_ranks_of_a_copy_share_the_bytes_of_a_bucket() -> None:
    """Each has half of 3,001 bytes, rounded up; a part of a buffer is a whole number of pages."""
    rules = rules_of_stage(table_of("dense", 2), 0, Layout(2, tp=2))
    rounds = plan_rounds(rules, Layout(2, tp=2), "bfloat16", 3_001)
    alone = [
        plan_buckets(share.rules, "bfloat16", 1_501, spans=share.spans) for share in shares_of(rules, Layout(2, tp=2))
    ]
    assert rounds.buckets == tuple(map(tuple, alone)) and rounds.count == max(map(len, alone)) > 1
    largest = [max(bucket.num_bytes for bucket in mine) for mine in rounds.buckets]
    assert rounds.sizes == [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in largest]
    assert rounds.starts == [0, rounds.sizes[0], sum(rounds.sizes)]


def expected_entries(rule: Rule, hf: HFTensor, engine: EngineLayout, rank: int) -> dict[int, range]:
    """By axis the entries that rank `rank` of SGLang has, counted one by one; {}: nothing."""
    ways, number = engine.tp, rank
    if rule.expert is not None:
        ways, number = engine.tp // engine.ep, rank % (engine.tp // engine.ep)
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
    if any(part in hf.name for part in ("k_proj", "v_proj")):  # a head is whole, and several ranks may have the same
        heads, dim = 4, hf.shape[0] // 4
        first = number * heads // ways
        return {0: range(first * dim, (first + max(heads // ways, 1)) * dim)}
    each = hf.shape[0] // ways
    return {0: range(number * each, (number + 1) * each)}


def held_by(rule: Rule, hf: HFTensor, layout: Layout, place: int) -> Span:
    """What the ranks at a place have of a tensor, the same in the first copy and in the last one."""
    if rule.split == "replicated":
        return Span.whole(hf)
    found = set()
    for copy in {0, num_copies(layout) - 1}:
        rank = copy * layout.copy_size + place
        number, ways = layout.coordinates(rank).tp, layout.tp
        if rule.expert is not None:
            assert layout.ep_rank(rank) == rule.expert * layout.ep // rule.num_experts, (rule.megatron_name, rank)
            number, ways = layout.etp_rank(rank), layout.etp
        found.add(hf_spans(rule, ways, number)[rule.hf.index(hf)])
    assert len(found) == 1
    return found.pop()


def check(
    rules: tuple[Rule, ...], layout: Layout, engine: EngineLayout, shares: tuple[Share, ...], moved: list[Transfer]
) -> None:
    """Raises AssertionError where something is sent twice or never, by a rank that has not got it, or to one that does
    not take it; a fusion group is cut; a buffer is too large."""
    for rule in rules:
        for index, hf in enumerate(rule.hf):
            sent = [share.spans[rule.megatron_name][index] for share in shares if rule.megatron_name in share.spans]
            assert is_whole(sent, hf.shape), (hf.name, sent)
    by_name = {hf.name: (rule, hf) for rule in rules for hf in rule.hf}
    arrived: dict[tuple[str, int], list[Span]] = {}
    spans_held: dict[tuple[str, int], Span] = {}
    for one in moved:
        arrived.setdefault((one.hf.name, one.target), []).append(one.span)
        rule, _ = by_name[one.hf.name]
        assert rule.megatron_name in shares[one.source].spans
        held = spans_held.get((one.hf.name, one.source))
        if held is None:
            held = spans_held[one.hf.name, one.source] = held_by(rule, one.hf, layout, one.source)
        assert overlap(held, one.span, one.hf.shape) == one.span, (one, held)
        assert one.num_bytes == 2 * prod(one.span.shape_in(one.hf.shape)) * (1 + (rule.dtype == "float32"))
    for name, (rule, hf) in by_name.items():
        for rank in range(engine.tp):
            entries = expected_entries(rule, hf, engine, rank)
            spans = arrived.pop((name, rank), [])
            if spans == [Span.whole(hf)]:
                assert all(len(wanted) == hf.shape[axis] for axis, wanted in entries.items()) and entries
                continue
            spans.sort(key=lambda span: span.start)
            for axis, wanted in entries.items():
                reached = wanted.start
                for span in spans:
                    assert (span.axis, span.start) == (axis, reached), (name, rank, spans)
                    reached += span.count
                assert reached == wanted.stop, (name, rank, spans)
            assert entries or not spans, (name, rank, spans)
    assert not arrived
    for share in shares:
        buckets = plan_buckets(share.rules, "bfloat16", 1024, spans=share.spans)
        check_groups(share, buckets)


def check_groups(share: Share, buckets: Any) -> None:
    for group in {rule.fusion_group for rule in share.rules}:
        assert sum(any(rule.fusion_group == group for rule in bucket.rules) for bucket in buckets) == 1
    for bucket in buckets:
        assert bucket.num_bytes <= 1024 or len({rule.fusion_group for rule in bucket.rules}) == 1


def check_random(seeds: range) -> int:
    num_transfers = 0
    for seed in seeds:
        model, layout, engine = random_case(draw := random.Random(seed))
        rules = rules_of_stage(table_of(model, layout.tp), draw.randrange(layout.pp), layout)
        shares = shares_of(rules, layout)
        moved = list(transfers(shares, engine, "bfloat16"))
        check(rules, layout, engine, shares, moved)
        num_transfers += len(moved)
    return num_transfers


def test_random_layouts_send_every_entry_once() -> None:
    assert check_random(range(200)) > 5_000


@pytest.mark.long
def test_five_thousand_random_layouts() -> None:
    assert check_random(range(1000, 6000)) > 200_000


def _doubled(shares: tuple[Share, ...], moved: list[Transfer]) -> None:
    moved.append(moved[0])


def _lost(shares: tuple[Share, ...], moved: list[Transfer]) -> None:
    moved.pop()


def _of_another_rank(shares: tuple[Share, ...], moved: list[Transfer]) -> None:
    index = next(i for i, one in enumerate(moved) if "experts" in one.hf.name)
    moved[index] = replace(moved[index], source=1 - moved[index].source)


def _moved_on(shares: tuple[Share, ...], moved: list[Transfer]) -> None:
    index = next(i for i, one in enumerate(moved) if "o_proj" in one.hf.name)
    span = moved[index].span
    moved[index] = replace(moved[index], span=replace(span, start=span.start - 1 if span.start else 1))


def _not_shared(shares: tuple[Share, ...], moved: list[Transfer]) -> None:
    shares[0].spans.popitem()


def _too_short(shares: tuple[Share, ...], moved: list[Transfer]) -> None:
    moved[3] = replace(moved[3], num_bytes=moved[3].num_bytes - 2)


@pytest.mark.parametrize("plant", [_doubled, _lost, _of_another_rank, _moved_on, _not_shared, _too_short])
def test_the_check_finds_planted_errors(plant: Callable[..., None]) -> None:
    layout, engine = Layout(4, tp=2, ep=2, etp=1), EngineLayout(2, 2)
    rules = table_of("experts", 2)
    shares = shares_of(rules, layout)
    moved = list(transfers(shares, engine, "bfloat16"))
    check(rules, layout, engine, shares, moved)
    plant(shares, moved)
    with pytest.raises((AssertionError, KeyError)):
        check(rules, layout, engine, shares, moved)


def test_what_several_hold_is_shared_out() -> None:
    """tp2 ep4 etp1: four ranks, of which two pairs hold the same halves of the attention; ep4: all hold all of it."""
    for name, layout in (
        ("experts", Layout(4, tp=2, ep=4, etp=1)),
        *((n, Layout(4, ep=4)) for n in ("experts", "latent")),
    ):
        rules = table_of(name, layout.tp)
        loads = [
            sum(num_elements(r, share.spans[r.megatron_name]) for r in share.rules)
            for share in shares_of(rules, layout)
        ]
        total = sum(prod(hf.shape) for rule in rules for hf in rule.hf)
        assert sum(loads) == total and max(loads) < 1.1 * total / 4, loads
    joined = [rule.megatron_name for rule in table_of("latent", 2) if rule.fusion_group.endswith("0.self_attn.qkv_a")]
    senders = [
        [
            i
            for i, share in enumerate(shares_of(table_of("latent", 2), Layout(4, tp=2, ep=4, etp=1)))
            if name in share.spans
        ]
        for name in joined
    ]
    assert len(joined) == 2 and senders[0] == senders[1] and len(senders[0]) == 1


def test_links_by_hand() -> None:
    """One q, k, v of 8, 4 and 4 heads of 4 by 16 in bfloat16: tp2 to tp4, each engine rank takes from one rank."""
    rules = [r for r in table_of("dense", 2) if r.megatron_name == "decoder.layers.0.self_attention.linear_qkv.weight"]
    moved = list(transfers(shares_of(rules, Layout(2, tp=2)), EngineLayout(4), "bfloat16"))
    by_link: dict[tuple[int, int], int] = {}
    for one in moved:
        by_link[one.source, one.target] = by_link.get((one.source, one.target), 0) + one.num_bytes
    each = 2 * 16 * 4 * (2 + 1 + 1)
    assert by_link == {(0, 0): each, (0, 1): each, (1, 2): each, (1, 3): each}
    (stage,) = stage_links(table_of("dense", 2), Layout(2, tp=2), EngineLayout(1), "bfloat16")
    assert sum(stage.by_link.values()) == sum(2 * prod(hf.shape) for rule in table_of("dense", 2) for hf in rule.hf)


def test_parts_that_overlap_are_not_a_whole() -> None:
    assert is_whole([Span(0, 3, 1), Span(0, 0, 3)], (4, 2))
    assert not is_whole([Span(0, 0, 3), Span(0, 2, 1)], (4, 2)), "entry 2 twice, entry 3 never"
    assert not is_whole([Span(0, 0, 2), Span(0, 3, 1)], (4, 2))


@pytest.mark.parametrize(("tp", "ep"), [(2, 3), (3, 2)])
def test_copies_that_are_not_alike_are_one(tp: int, ep: int) -> None:
    """Of six ranks the first three have all tensors, as have the last three, each in other places."""
    assert Layout(6, tp=tp, ep=ep, etp=1).copy_size == 3 and num_copies(Layout(6, tp=tp, ep=ep, etp=1)) == 1
    assert num_copies(Layout(8, tp=2, ep=4, etp=1)) == 2


def test_one_of_the_ranks_that_share_an_expert_has_its_last_bias() -> None:
    """They add up what they make."""
    rules = [rule for rule in table_for(EXPERT_FAMILIES["gpt_oss"], 1) if rule.hf[0].name.endswith(".down_proj_bias")]
    for engine in (EngineLayout(2), EngineLayout(4, 2), EngineLayout(2, 2)):
        for rule in rules:
            taken = [taken_by(rule, rule.hf[0], engine, rank) for rank in range(engine.tp)]
            assert [span for span in taken if span is not None] == [Span.whole(rule.hf[0])]
    assert rules


def test_a_message_is_aligned_and_takes_one_part_of_a_tensor() -> None:
    """Three numbers of two bytes, then a buffer of four a number; of a third tensor the engine's rank has two parts."""
    rules = [make_rule("a", "g", (3,)), replace(make_rule("b", "g", (2,)), dtype="float32"), make_rule("c", "g", (5,))]
    (bucket,) = plan_buckets(rules, "bfloat16", 256, alignment=1)
    held = {"a.0": [Span(0, 0, 3)], "b.0": [Span(0, 0, 2)]}
    message = message_of(0, bucket, "bfloat16", held)
    assert [piece.offset for piece in message.pieces] == [0, 8] and message.num_bytes == 16
    with pytest.raises(ValueError, match=r"holds several parts of c\.0, .*; send it whole"):
        message_of(0, bucket, "bfloat16", {**held, "c.0": [Span(0, 0, 1), Span(0, 3, 2)]})


def test_two_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="cut a tensor of \\(4, 4\\) along two axes; it must be sent whole"):
        overlap(Span(0, 0, 2), Span(1, 0, 2), (4, 4))
    with pytest.raises(ValueError, match=r"tp size \(2\) must be a multiple of its ep size \(4\)"):
        EngineLayout(2, 4)


def test_whole_tensors_are_planned_as_ever() -> None:
    rules = list(table_of("dense", 1))
    (share,) = shares_of(rules, Layout(1))
    check_buckets(share.rules, plan_buckets(share.rules, "bfloat16", 4096, spans=share.spans), 2, 4096)
