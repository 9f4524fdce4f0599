"""Qwen3 dense (model_type "qwen3"): grouped-query attention with normed queries and keys, gated MLP."""

from __future__ import annotations

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import FAMILIES, HFConfig


def _read(hf_config: HFConfig) -> dense.DenseModel:
    return dense.read_dense_model(hf_config, head_dim=128, max_positions=32768, has_qk_norm=True)


FAMILIES.register("qwen3")(dense.family("qwen3", _read, attention_bias=False, mlp_bias=False))
