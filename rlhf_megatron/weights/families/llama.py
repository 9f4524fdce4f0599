"""Llama dense (model_type "llama"; SmolLM2 is one): grouped-query attention, gated MLP, no norm on
queries and keys.

`attention_bias` puts biases on q, k, v and o, `mlp_bias` on the three matrices of the MLP.
"""

from __future__ import annotations

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig


def _read_llama_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a Llama config.json. Raise ValueError for unsupported settings."""
    has_attention_bias = bool(hf_config.get("attention_bias"))
    return decoder_family.read_decoder_dimensions(
        hf_config,
        head_dim=None,
        max_positions=2048,
        has_qkv_bias=has_attention_bias,
        has_proj_bias=has_attention_bias,
        has_mlp_bias=bool(hf_config.get("mlp_bias")),
    )


FAMILIES.register("llama")(decoder_family.make_decoder_family("llama", _read_llama_dimensions))
