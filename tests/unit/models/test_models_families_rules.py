"""Rules between a run's layout and config.json, for every family: what is accepted, and each
refusal in words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from table_samples import (
    BIASED_LLAMA,
    FAMILIES,
    LLAMA3_ROPE,
    SMALL_LLAMA,
    SMALL_QWEN2,
    SMALL_QWEN3,
    THREE_KV_HEADS,
    tied,
)

from rlhf_megatron.config.rules.model_rules import find_policy_model_problems
from rlhf_megatron.config.schema import DataConfig, MegatronConfig, ModelConfig, RunConfig

VPP = "virtual_pipeline_model_parallel_size"


def problems(hf_config: dict[str, Any], **layout: Any) -> list[str]:
    """Texts without the file's name."""
    run = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(max_prompt_length=8, max_response_length=8)
    )
    megatron = MegatronConfig(**layout)
    run = replace(run, actor=replace(run.actor, megatron=megatron))
    return [
        problem.text.removeprefix("m/config.json: ")
        for problem in find_policy_model_problems(run, hf_config)
    ]


@pytest.mark.parametrize(
    "rope", [{}, {"rope_scaling": LLAMA3_ROPE}, {"rope_parameters": LLAMA3_ROPE}]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_accepted(name: str, rope: dict[str, Any]) -> None:
    for hf_config in (FAMILIES[name], tied(FAMILIES[name])):
        assert (
            problems(
                {**hf_config, **rope}, tensor_model_parallel_size=4, pipeline_model_parallel_size=2
            )
            == []
        )
        three = {**hf_config, **rope, **THREE_KV_HEADS}
        assert problems(three, tensor_model_parallel_size=3) == []


def test_key_value_heads_must_divide() -> None:
    three = {**SMALL_QWEN2, **THREE_KV_HEADS}
    assert problems(three, tensor_model_parallel_size=2) == [
        "num_key_value_heads (3) must be a multiple of actor.megatron.tensor_model_parallel_size"
        " (2); use 1."
    ]


def test_layers_must_divide_by_stages_and_chunks() -> None:
    stages = {"pipeline_model_parallel_size": 2}
    twelve = {**SMALL_LLAMA, "num_hidden_layers": 12}
    assert problems(twelve, **stages, virtual_pipeline_model_parallel_size=3) == []
    assert problems(twelve, **stages, virtual_pipeline_model_parallel_size=4) == [
        "num_hidden_layers (12) must be a multiple of actor.megatron.pipeline_model_parallel_size x"
        f" {VPP} (2 x 4 = 8); set the second to 2 or 3 or 6 or null."
    ]
    two = {**SMALL_LLAMA, "num_hidden_layers": 2}
    assert problems(two, **stages, virtual_pipeline_model_parallel_size=2) == [
        "num_hidden_layers (2) must be a multiple of actor.megatron.pipeline_model_parallel_size x"
        f" {VPP} (2 x 2 = 4); set the second to null."
    ]
    five = {**SMALL_LLAMA, "num_hidden_layers": 5}
    assert problems(five, **stages, virtual_pipeline_model_parallel_size=2) == [
        "num_hidden_layers (5) must be a multiple of actor.megatron.pipeline_model_parallel_size"
        " (2); use 1."
    ]


def test_an_mlp_with_biases_is_not_recomputed() -> None:
    selective: dict[str, Any] = {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "mlp"),
    }
    assert problems(BIASED_LLAMA, **selective) == [
        "mlp_bias (True) and actor.megatron.recompute_modules (['layernorm', 'mlp']) do not go"
        " together: megatron-core's backward pass through a recomputed MLP with biases does not"
        " end; remove mlp or use actor.megatron.recompute_granularity: full."
    ]
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert problems(BIASED_LLAMA, **full) == []
    assert problems(SMALL_QWEN2, **selective) == []
    assert problems({**BIASED_LLAMA, "mlp_bias": False}, **selective) == []
    assert (
        problems(BIASED_LLAMA, **selective | {"recompute_modules": ("layernorm", "core_attn")})
        == []
    )


@pytest.mark.parametrize(
    ("hf_config", "expected"),
    [
        (
            {**SMALL_QWEN3, "attention_bias": True},
            "attention_bias (True) is not supported; it must be False: choose another model.",
        ),
        (
            {**SMALL_QWEN2, "qkv_bias": False},
            "qkv_bias (False) is not supported; it must be True: choose another model.",
        ),
        (
            {**SMALL_QWEN2, "use_sliding_window": True},
            "use_sliding_window (True) is not supported; it must be False: choose another model.",
        ),
        (
            {**SMALL_QWEN2, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            (
                "layer_types ['sliding_attention'] are not supported; only full_attention is:"
                " choose another model."
            ),
        ),
        (
            {**SMALL_QWEN2, "quantization_config": {"bits": 4}},
            (
                "quantization_config ({'bits': 4}) is not supported; it must be None: choose"
                " another model."
            ),
        ),
        (
            {**SMALL_LLAMA, "rope_scaling": {**LLAMA3_ROPE, "factor": 0}},
            (
                "factor of rotary embeddings of type 'llama3' (0) must be a number of at least 1;"
                " mend the file."
            ),
        ),
        (
            {**SMALL_LLAMA, "model_type": "qwen2_moe"},
            (
                "model_type ('qwen2_moe') must be one of deepseek_v3, glm4_moe, gpt_oss, kimi_k2,"
                " llama, mistral, mixtral, qwen2, qwen3, qwen3_moe; choose such a model, or"
                " actor.backend fsdp, or name the file that registers a family of your own in"
                " plugins:."
            ),
        ),
    ],
)
def test_what_is_refused(hf_config: dict[str, Any], expected: str) -> None:
    assert problems(hf_config) == [expected]


def test_a_sliding_window_that_is_switched_off_is_no_window() -> None:
    """As Qwen2.5 ships it, and as transformers 5 writes it."""
    off = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}
    assert problems({**SMALL_QWEN2, **off}) == []
    assert (
        problems(
            {**SMALL_QWEN2, **off, "sliding_window": None, "layer_types": ["full_attention"] * 4}
        )
        == []
    )
