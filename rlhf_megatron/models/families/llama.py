"""Llama dense (model_type "llama"; SmolLM2 is one): grouped-query attention, gated MLP, no norm on queries and keys."""

from __future__ import annotations

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import Family, HFConfig, families, refuse


def _read(hf_config: HFConfig) -> dense.DenseModel:
    refuse(hf_config, hidden_act="silu", attention_bias=False, mlp_bias=False, attention_dropout=0.0)
    return dense.read_dense_model(hf_config, has_qk_norm=False, head_dim=None, max_positions=2048)


families.register("llama")(
    Family(
        name="llama",
        transformer_arguments=lambda hf_config: dense.transformer_arguments(_read(hf_config)),
        gpt_arguments=lambda hf_config: dense.gpt_arguments(_read(hf_config)),
        table=lambda hf_config, padded_vocab_size: dense.table(_read(hf_config), padded_vocab_size),
    )
)
