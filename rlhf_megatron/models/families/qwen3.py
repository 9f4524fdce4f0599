"""Qwen3 dense (model_type "qwen3"): grouped-query attention with normed queries and keys, gated MLP."""

from __future__ import annotations

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import Family, HFConfig, families, refuse


def _read(hf_config: HFConfig) -> dense.DenseModel:
    refuse(hf_config, hidden_act="silu", attention_bias=False, use_sliding_window=False, attention_dropout=0.0)
    layer_types = set(hf_config.get("layer_types") or ())
    if not layer_types <= {"full_attention"}:
        raise ValueError(f"config.json (qwen3): layer_types {sorted(layer_types)}; only full_attention is supported.")
    return dense.read_dense_model(hf_config, has_qk_norm=True, head_dim=128, max_positions=32768)


families.register("qwen3")(
    Family(
        name="qwen3",
        transformer_arguments=lambda hf_config: dense.transformer_arguments(_read(hf_config)),
        gpt_arguments=lambda hf_config: dense.gpt_arguments(_read(hf_config)),
        table=lambda hf_config, padded_vocab_size: dense.table(_read(hf_config), padded_vocab_size),
    )
)
