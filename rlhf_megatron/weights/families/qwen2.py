"""Qwen2 dense (model_type "qwen2"; Qwen2.5 is one): grouped-query attention with biased q, k
and v, gated MLP.
"""

from __future__ import annotations

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig


def _read_qwen2_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a Qwen2 config.json. Raise ValueError for unsupported settings."""
    return decoder_family.read_decoder_dimensions(
        hf_config, head_dim=None, max_positions=32768, has_qkv_bias=True
    )


FAMILIES.register("qwen2")(
    decoder_family.make_decoder_family("qwen2", _read_qwen2_dimensions, qkv_bias=True)
)
