"""FP8 on the way to engines: shards quantise to the bytes of the whole, and scales go where
their blocks go.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from test_resharding_shards import LATENT

from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import (
    make_engine_table,
    make_fp8_rule,
    require_whole_fp8_blocks,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.quantised_weights import is_stored_in_fp8, quantise_to_fp8
from rlhf_megatron.weights.shard_plan import EngineLayout, iterate_transfers, plan_send_shares
from rlhf_megatron.weights.weight_table import find_hf_spans, split_tensor

DENSE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
OF_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [1],
}
SIZES = {
    "q_lora_rank": 128,
    "kv_lora_rank": 100,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
MODELS = {
    "dense": {**DENSE, "model_type": "qwen3"},
    "experts": {**DENSE, "model_type": "qwen3_moe", **OF_EXPERTS},
    "latent": {
        **DENSE,
        "model_type": "deepseek_v3",
        **LATENT,
        **SIZES,
        "moe_intermediate_size": 256,
        "head_dim": 32,
    },
}
FP8_BLOCKS = "float8_e4m3fn"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_shards_quantise_to_the_bytes_of_the_whole(model: str, ways: int) -> None:
    """Float32 weights, an engine of bfloat16: of each shard the parts of what the whole makes, and
    that is `quantise_to_fp8` of the weight in bfloat16.
    """
    torch.manual_seed(0)
    num_quantised = 0
    for rule in make_weight_table(MODELS[model], ways):
        if rule.dtype is not None:
            continue
        given = tuple(torch.randn(hf.shape) for hf in rule.hf_tensors)
        own = make_fp8_rule(rule, "bfloat16")
        full = rule.to_megatron(*given)
        whole = dict(zip((hf.name for hf in own.hf_tensors), own.to_hf(full), strict=True))
        for hf, weight in zip(rule.hf_tensors, given, strict=True):
            if is_stored_in_fp8(hf.name):
                blocks, scales = quantise_to_fp8(weight.bfloat16())
                assert torch.equal(bits(whole[hf.name]), bits(blocks))
                assert torch.equal(whole[f"{hf.name}_scale_inv"], scales)
                num_quantised += 1
        for number, shard in enumerate(split_tensor(rule.split, full, ways)):
            for hf, part, span in zip(
                own.hf_tensors, own.to_hf(shard), find_hf_spans(own, ways, number), strict=True
            ):
                expected = whole[hf.name].narrow(span.dim, span.start, span.num_entries)
                assert torch.equal(
                    bits(part.narrow(span.dim, 0, span.num_entries)), bits(expected)
                ), (hf.name, number)
    assert num_quantised == {"dense": 14, "experts": 23, "latent": 40}[model]


@pytest.mark.parametrize(
    ("model", "layout", "engine"),
    [
        ("dense", ParallelLayout(2, tp=2), EngineLayout(2)),
        ("dense", ParallelLayout(1), EngineLayout(2)),
        ("experts", ParallelLayout(4, tp=2, ep=2, etp=1), EngineLayout(2, 2)),
        ("experts", ParallelLayout(2, ep=2, etp=1), EngineLayout(2)),
        ("latent", ParallelLayout(2, tp=2, ep=2, etp=1), EngineLayout(2, 2)),
    ],
)
def test_scales_go_where_their_blocks_go(
    model: str, layout: ParallelLayout, engine: EngineLayout
) -> None:
    """Entry by entry: whoever takes a block of a matrix takes its scale, once,
    from the same rank.
    """
    table = make_weight_table(MODELS[model], layout.tp)
    require_whole_fp8_blocks(table, layout, engine)
    rules = make_engine_table(table, "bfloat16", "fp8")
    moved = list(iterate_transfers(plan_send_shares(rules, layout), engine, "bfloat16"))
    found = {
        (one.hf_tensor.name, one.sender_rank, one.engine_rank, one.span.dim, one.span.start)
        for one in moved
    }
    scales = [one for one in moved if one.hf_tensor.name.endswith("_scale_inv")]
    matrices = [one for one in moved if one.hf_tensor.dtype == FP8_BLOCKS]
    assert len(scales) == len(matrices) > 20
    for one in matrices:
        name = f"{one.hf_tensor.name}_scale_inv"
        start = one.span.start // 128
        assert (name, one.sender_rank, one.engine_rank, one.span.dim, start) in found
        assert one.num_bytes == prod(one.span.shape_within(one.hf_tensor.shape))
    assert all(
        one.num_bytes == 4 * prod(one.span.shape_within(one.hf_tensor.shape)) for one in scales
    )
    plain = sum(
        one.num_bytes
        for one in iterate_transfers(plan_send_shares(table, layout), engine, "bfloat16")
    )
    assert sum(one.num_bytes for one in moved) < 0.62 * plain  # embedding and head are bfloat16


def test_cuts_within_a_block_are_refused() -> None:
    table = make_weight_table(MODELS["dense"], 4)
    with pytest.raises(ValueError) as error:
        require_whole_fp8_blocks(table, ParallelLayout(4, tp=4), EngineLayout())
    message = str(error.value)
    words = (
        "actor.megatron.tensor_model_parallel_size cuts 256 rows of"
        " model.layers.0.self_attn.k_proj.weight into 4"
    )
    assert (
        words in message
        and "parts of 64; each must have a multiple of 128: use fewer parts" in message
    )
    with pytest.raises(
        ValueError,
        match=r"the engine's tp_size cuts 512 columns of .*down_proj.* into 8 parts of 64",
    ):
        require_whole_fp8_blocks(
            [rule for rule in table if "down_proj" in rule.hf_tensors[0].name],
            ParallelLayout(1),
            EngineLayout(8),
        )
    of_experts = [
        rule for rule in make_weight_table(MODELS["experts"], 1) if rule.expert is not None
    ]
    require_whole_fp8_blocks(of_experts, ParallelLayout(4, ep=4, etp=1), EngineLayout(4, 4))
    with pytest.raises(
        ValueError,
        match=r"expert_tensor_parallel_size cuts 256 rows of .*experts.0.gate_proj.weight",
    ):
        require_whole_fp8_blocks(of_experts, ParallelLayout(4, ep=1, etp=4), EngineLayout())


def test_a_block_of_zeros_has_a_scale() -> None:
    """A dead expert's weights, for instance: 0 / 0 would be no number."""
    quantised, scales = quantise_to_fp8(torch.zeros(130, 4))
    assert not quantised.float().any() and scales.flatten().tolist() == pytest.approx(
        [1e-12 / 448] * 2
    )
