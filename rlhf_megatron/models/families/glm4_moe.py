"""GLM-4.5 (model_type "glm4_moe"): biased q, k and v, a part of each head turned, sigmoid routers, shared experts.

Layers for the prediction of further tokens (`num_nextn_predict_layers`) are not read, and so not exported.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import FAMILIES, HFConfig, require_int
from rlhf_megatron.models.families.experts import (
    Experts,
    read_experts,
    sigmoid_arguments,
    unknown_keys,
    unsupported_sigmoid,
)


def _read(hf_config: HFConfig) -> dense.DenseModel:
    return dense.read_dense_model(
        hf_config,
        head_dim=None,
        max_positions=131072,
        has_qk_norm=bool(hf_config.get("use_qk_norm", False)),
        has_qkv_bias=bool(hf_config.get("attention_bias", False)),
        experts=_experts(hf_config),
        is_partly_turned=True,
    )


def _experts(hf_config: HFConfig) -> Experts:
    num_dense = int(hf_config.get("first_k_dense_replace", 1))
    width = require_int(hf_config, "moe_intermediate_size")
    return read_experts(
        hf_config,
        "n_routed_experts",
        "moe_intermediate_size",
        tuple(layer >= num_dense for layer in range(require_int(hf_config, "num_hidden_layers"))),
        shared_ffn_hidden_size=width * require_int(hf_config, "n_shared_experts", 1),
        has_bias=True,
        arguments=sigmoid_arguments(hf_config),
    )


def _unsupported(hf_config: HFConfig) -> Iterator[str]:
    yield from unsupported_sigmoid(hf_config)
    yield from unknown_keys(
        hf_config,
        "first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob"
        " num_nextn_predict_layers partial_rotary_factor routed_scaling_factor topk_group use_qk_norm",
    )


FAMILIES.register("glm4_moe")(dense.family("glm4_moe", _read, _unsupported, is_partly_turned=True))
