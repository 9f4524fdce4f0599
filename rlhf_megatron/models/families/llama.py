"""Llama dense (model_type "llama"; SmolLM2 is one): grouped-query attention, gated MLP, no norm on queries and keys.

With biases on all matrices of a layer, or on none: megatron-core has one switch for those behind attention and MLP.
"""

from __future__ import annotations

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import HFConfig, families


def _read(hf_config: HFConfig) -> dense.DenseModel:
    has_bias = bool(hf_config.get("attention_bias"))  # mlp_bias is the same, or the model is refused
    return dense.read_dense_model(
        hf_config, head_dim=None, max_positions=2048, has_qkv_bias=has_bias, has_linear_bias=has_bias
    )


families.register("llama")(dense.family("llama", _read))
