"""Qwen3 dense (model_type "qwen3"): grouped-query attention with normed queries and
keys, gated MLP.
"""

from __future__ import annotations

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig


def _read_qwen3_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a Qwen3 config.json. Raise ValueError for unsupported settings."""
    return decoder_family.read_decoder_dimensions(
        hf_config, head_dim=128, max_positions=32768, has_qk_norm=True
    )


FAMILIES.register("qwen3")(
    decoder_family.make_decoder_family(
        "qwen3", _read_qwen3_dimensions, attention_bias=False, mlp_bias=False
    )
)
