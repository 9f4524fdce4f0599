"""Qwen2 dense (model_type "qwen2"; Qwen2.5 is one): grouped-query attention with biased q, k and v, gated MLP."""

from __future__ import annotations

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import FAMILIES, HFConfig


def _read(hf_config: HFConfig) -> dense.DenseModel:
    return dense.read_dense_model(hf_config, head_dim=None, max_positions=32768, has_qkv_bias=True)


FAMILIES.register("qwen2")(dense.family("qwen2", _read, qkv_bias=True))
