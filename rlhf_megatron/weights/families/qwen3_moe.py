"""Qwen3 with experts (model_type "qwen3_moe"; Qwen3-30B-A3B and 235B-A22B are such):
attention as in Qwen3.

The router's weights are a softmax over all experts; `norm_topk_prob` scales those of the picked
ones to a sum of 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.expert_layers import (
    ExpertLayers,
    find_unknown_keys,
    read_expert_layers,
)
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig, read_positive_int


def _read_qwen3_moe_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a Qwen3 MoE config.json. Raise ValueError for unsupported
    settings.
    """
    return decoder_family.read_decoder_dimensions(
        hf_config,
        head_dim=128,
        max_positions=32768,
        has_qk_norm=True,
        experts=_read_qwen3_moe_experts(hf_config),
    )


def _read_qwen3_moe_experts(hf_config: HFConfig) -> ExpertLayers:
    """Return the experts of a Qwen3 MoE config.json; `decoder_sparse_step` and `mlp_only_layers`
    say which layers have them.
    """
    step = read_positive_int(hf_config, "decoder_sparse_step", 1)
    dense_layers = hf_config.get("mlp_only_layers") or ()
    layers = range(read_positive_int(hf_config, "num_hidden_layers"))
    # the hub's name; that of transformers 5
    num = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    return read_expert_layers(
        hf_config,
        num,
        "moe_intermediate_size",
        tuple(layer not in dense_layers and (layer + 1) % step == 0 for layer in layers),
        arguments={"moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False)},
    )


def _find_unsupported_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence for unknown keys, for two different numbers of experts, and for a malformed
    `mlp_only_layers`.
    """
    yield from find_unknown_keys(
        hf_config,
        (
            "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob"
            " num_experts num_local_experts"
        ),
    )
    told = [hf_config[key] for key in ("num_experts", "num_local_experts") if key in hf_config]
    if len(told) > 1 and told[0] != told[1]:
        yield f"num_experts and num_local_experts ({told}) mean the same number; remove one."
    dense_layers = hf_config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list | tuple) or any(
        type(layer) is not int for layer in dense_layers
    ):
        yield f"mlp_only_layers ({dense_layers!r}) must be a list of layers; mend the file."


FAMILIES.register("qwen3_moe")(
    decoder_family.make_decoder_family(
        "qwen3_moe",
        _read_qwen3_moe_dimensions,
        _find_unsupported_settings,
        attention_bias=False,
        mlp_bias=False,
    )
)
