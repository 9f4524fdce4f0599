"""Latent attention and the families that have it: published sizes by hand, what is refused,
work and memory.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from table_samples import DEEPSEEK_V3
from table_samples import DEEPSEEK_YARN as YARN

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.config.rope import YarnScaling, read_rotary_config
from rlhf_megatron.config.rules.model_rules import find_policy_model_problems
from rlhf_megatron.config.schema import (
    ActorConfig,
    DataConfig,
    MegatronConfig,
    RolloutConfig,
    RunConfig,
)
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    FORWARD_PASSES,
    count_model_flops,
)
from rlhf_megatron.ranks.parallel.mcore_fixes import unmark_replicated_parameters
from rlhf_megatron.ranks.workers.peak_memory import ModelElementCounts, TrainedModelSpec
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout

KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
}
TINY = EXPERT_FAMILIES["deepseek_v3"]

# A layer of DeepSeek-V3: q_a, q_b, kv_a, kv_b, o; then the two norms inside.
ATTENTION = 1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 128 * 256 * 512 + 7168 * 128 * 128
NORMS = 1536 + 512 + 2 * 7168
EXPERT = 3 * 7168 * 2048


def test_deepseek_v3_has_671_billion_weights() -> None:
    table = make_weight_table(DEEPSEEK_V3)
    of_layers = (
        61 * (ATTENTION + NORMS) + 3 * 3 * 7168 * 18432 + 58 * (257 * EXPERT + 256 * 7168 + 256)
    )
    assert (
        sum(math.prod(rule.megatron_shape) for rule in table)
        == of_layers + 2 * 129280 * 7168 + 7168
    )
    assert of_layers + 2 * 129280 * 7168 + 7168 == 671_026_419_200
    assert sum(
        math.prod(rule.megatron_shape) for rule in make_weight_table(KIMI_K2)
    ) == pytest.approx(1026.4e9, rel=1e-3)


def test_a_down_projection_that_transformer_engine_marks_as_split_counts_once() -> None:
    layer = torch.nn.ModuleDict(
        {name: torch.nn.Linear(2, 2) for name in ("linear_kv_down_proj", "linear_kv_up_proj")}
    )
    for parameter in layer.parameters():
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    unmark_replicated_parameters(torch.nn.ModuleDict({"self_attention": layer}))
    assert not layer["linear_kv_down_proj"].weight.tensor_model_parallel
    assert layer["linear_kv_up_proj"].weight.tensor_model_parallel


def test_weights_of_a_rank_of_deepseek_v3() -> None:
    """pp4 with 13 layers in the last stage, tp8, ep32 etp1 on 256 ranks: the second stage
    has 16 layers.
    """
    layout = ParallelLayout(
        256, tp=8, pp=4, sequence_parallel=True, ep=32, etp=1, num_last_stage_layers=13
    )
    of_experts, others = ModelElementCounts.from_model(
        TrainedModelSpec(DEEPSEEK_V3, torch.bfloat16, 4096)
    ).count_stage_elements(layout, 1)
    whole = 1536 * 7168 + 576 * 7168 + NORMS + 256 * 7168 + 256  # on each tp rank
    split = (128 * 192 * 1536 + 128 * 256 * 512 + 7168 * 128 * 128 + EXPERT) // 8
    assert (of_experts, others) == (16 * 256 // 32 * EXPERT, 16 * (whole + split))


def test_flops_are_those_of_the_weights_that_a_token_meets() -> None:
    active = 61 * ATTENTION + 3 * 3 * 7168 * 18432 + 58 * (9 * EXPERT + 256 * 7168)
    assert active + 129280 * 7168 == pytest.approx(37e9, rel=0.02)  # as published: 37B
    lengths = torch.tensor([1000, 24])
    scores = 2 * 61 * 128 * (192 + 128) * (1000**2 + 24**2) / 2
    expected = 2.0 * active * 1024 + scores + 2.0 * 7168 * 129280 * 900
    assert count_model_flops(DEEPSEEK_V3, lengths, 900, FORWARD_PASSES) == expected


def test_down_projections_are_whole_and_go_together() -> None:
    rules = {
        rule.megatron_name.partition("self_attention.")[2]: rule
        for rule in make_weight_table(TINY)
        if rule.layer == 1
    }
    down = [rules[f"linear_{name}_down_proj.weight"] for name in ("q", "kv")]
    assert [rule.hf_tensors[0].name.rpartition("self_attn.")[2] for rule in down] == [
        "q_a_proj.weight",
        "kv_a_proj_with_mqa.weight",
    ]
    assert {rule.split for rule in down} == {"replicated"}
    assert {rule.fusion_group for rule in down} == {"model.layers.1.self_attn.qkv_a"}
    plain = {
        rule.megatron_name
        for rule in make_weight_table(EXPERT_FAMILIES["moonlight"])
        if rule.layer == 1
    }
    assert "decoder.layers.1.self_attention.linear_q_proj.weight" in plain
    assert not any("q_down" in name or "q_layernorm" in name for name in plain)


def test_transformer_engine_has_the_norms_of_narrow_vectors_in_the_matrices_behind_them() -> None:
    """Those in front of attention and of experts stay apart: several matrices read them."""
    for layer, of_mlp in ((0, "mlp.linear_fc1.layer_norm_weight"), (1, "pre_mlp_layernorm.weight")):
        found = {
            rule.hf_tensors[0].name.partition(f"layers.{layer}.")[2]: rule.megatron_name.partition(
                f"layers.{layer}."
            )[2]
            for rule in make_weight_table(TINY, impl="transformer_engine")
            if rule.layer == layer and "norm" in rule.hf_tensors[0].name
        }
        assert found == {
            "input_layernorm.weight": "input_layernorm.weight",
            "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
            "post_attention_layernorm.weight": of_mlp,
        }
    plain = {
        rule.megatron_name
        for rule in make_weight_table(EXPERT_FAMILIES["qwen3_moe"], impl="transformer_engine")
    }
    attention = "decoder.layers.1.self_attention"
    assert {f"{attention}.linear_qkv.layer_norm_weight", f"{attention}.q_layernorm.weight"} <= plain
    assert {
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    } <= plain


def test_rope_of_latent_attention() -> None:
    """mscale 1, mscale_all_dim 0.5 and factor e^10: m(1) = 2, m(0.5) = 1.5."""
    scaling = read_rotary_config(
        {"rope_scaling": {**YARN, "factor": math.exp(10), "mscale_all_dim": 0.5}}, is_latent=True
    ).scaling
    assert isinstance(scaling, YarnScaling) and scaling.attention_factor == pytest.approx(2 / 1.5)
    arguments = find_model_family(KIMI_K2).make_transformer_arguments(KIMI_K2)
    assert (
        arguments["rope_type"],
        arguments["rotary_base"],
        arguments["rotary_scaling_factor"],
    ) == ("yarn", 5e4, 32.0)
    assert (arguments["beta_fast"], arguments["beta_slow"], arguments["kv_channels"]) == (
        1.0,
        1.0,
        192,
    )
    plain = find_model_family(TINY).make_transformer_arguments(EXPERT_FAMILIES["moonlight"])
    # The scale of the softmax has these, with positions that are not stretched as well.
    assert (plain["rope_type"], plain["rotary_scaling_factor"], plain["mscale_all_dim"]) == (
        "rope",
        1.0,
        1.0,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"topk_method": "group_limited_greedy"},
            r"topk_method \('group_limited_greedy'\) is not supported",
        ),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok / topk_group \(6 / 2\) must be 2"),
        ({"n_group": 3}, r"n_group \(3\) must divide n_routed_experts \(16\)"),
        ({"n_group": None}, "n_group must be in the file"),
        ({"norm_topk_prob": False}, r"norm_topk_prob \(False\) is not supported"),
        ({"rope_interleave": False}, r"rope_interleave \(False\) is not supported"),
        ({"attention_bias": True}, r"attention_bias \(True\) is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config .* is not supported",
        ),
        (
            {"num_key_value_heads": 2},
            r"num_key_value_heads \(2\) must be num_attention_heads \(4\)",
        ),
        ({"head_dim": 16}, r"head_dim \(16\) must be qk_rope_head_dim \(8\)"),
        ({"index_topk": 64}, "index_topk: this family does not know"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None; it must be a positive integer"),
        ({"vocab_size": None}, "vocab_size is None; it must be a positive integer"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace is None; it must be the number"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be the number"),
        ({"rope_parameters": {**YARN, "mscale": None}}, "mscale_all_dim without the other"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "must be of type default, yarn",
        ),
        (
            {"rope_parameters": {**YARN, "truncate": False}},
            "have the settings truncate, which are not supported",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_weight_table({**TINY, **change})


def test_settings_that_go_with_latent_attention_only() -> None:
    selective = {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)}
    run = RunConfig(
        actor=ActorConfig(megatron=MegatronConfig(**selective)),
        data=DataConfig(max_prompt_length=8, max_response_length=8),
        rollout=RolloutConfig(engine="local"),
    )
    assert not list(find_policy_model_problems(run, TINY))
    (problem,) = find_policy_model_problems(run, EXPERT_FAMILIES["mixtral"])
    assert "has mla_up_proj, which is of latent attention, and the model has none" in problem.text
