"""GLM-4.5 (model_type "glm4_moe"): biased q, k and v, a part of each head turned, sigmoid routers,
shared experts.

Layers for the prediction of further tokens (`num_nextn_predict_layers`) are not read, and
so not exported.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.expert_layers import (
    ExpertLayers,
    find_unknown_keys,
    find_unsupported_sigmoid_settings,
    make_sigmoid_router_arguments,
    read_expert_layers,
)
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig, read_positive_int


def _read_glm4_moe_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a GLM-4.5 config.json. Raise ValueError for unsupported settings."""
    return decoder_family.read_decoder_dimensions(
        hf_config,
        head_dim=None,
        max_positions=131072,
        has_qk_norm=bool(hf_config.get("use_qk_norm", False)),
        has_qkv_bias=bool(hf_config.get("attention_bias", False)),
        experts=_read_glm4_moe_experts(hf_config),
        is_partly_rotated=True,
    )


def _read_glm4_moe_experts(hf_config: HFConfig) -> ExpertLayers:
    """Return the experts of a GLM-4.5 config.json: the first `first_k_dense_replace` layers (1 by
    default) have none.
    """
    num_dense = int(hf_config.get("first_k_dense_replace", 1))
    width = read_positive_int(hf_config, "moe_intermediate_size")
    return read_expert_layers(
        hf_config,
        "n_routed_experts",
        "moe_intermediate_size",
        tuple(
            layer >= num_dense for layer in range(read_positive_int(hf_config, "num_hidden_layers"))
        ),
        shared_ffn_hidden_size=width * read_positive_int(hf_config, "n_shared_experts", 1),
        has_bias=True,
        arguments=make_sigmoid_router_arguments(hf_config),
    )


def _find_unsupported_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence for each setting that this family does not implement, besides those of all
    decoders.
    """
    yield from find_unsupported_sigmoid_settings(hf_config)
    yield from find_unknown_keys(
        hf_config,
        (
            "first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts"
            " norm_topk_prob num_nextn_predict_layers partial_rotary_factor routed_scaling_factor"
            " topk_group use_qk_norm"
        ),
    )


FAMILIES.register("glm4_moe")(
    decoder_family.make_decoder_family(
        "glm4_moe", _read_glm4_moe_dimensions, _find_unsupported_settings, is_partly_rotated=True
    )
)
