"""Multi-latent attention (DeepSeek-V2, 2405.04434): its dimensions, arguments and rules.

Keys and values come out of a narrow vector a token, queries too where `q_rank` is not None. A part of each key has the
position and is the same for all heads. The matrices into the narrow vectors are whole on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config.rope import Rotary, YarnScaling
from rlhf_megatron.models.families.base import HFConfig, require_int
from rlhf_megatron.models.table import HFTensor, Rule, Split, plain_rule

LATENT_KEYS = (
    "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave v_head_dim"
    " original_max_position_embeddings"
)
"""Keys of config.json, besides those that all families know."""


@dataclass(frozen=True)
class LatentAttention:
    """The latent attention of a model. Queries and keys of a head are plain_dim + turned_dim wide."""

    q_rank: int | None  # None: queries are made of the hidden states
    kv_rank: int
    plain_dim: int  # without a position
    turned_dim: int  # with one
    value_dim: int


def read_latent(hf_config: HFConfig) -> LatentAttention:
    """Dimensions from config.json, each of which must be there. Raises ValueError."""
    return LatentAttention(
        q_rank=None if hf_config.get("q_lora_rank") is None else require_int(hf_config, "q_lora_rank"),
        kv_rank=require_int(hf_config, "kv_lora_rank"),
        plain_dim=require_int(hf_config, "qk_nope_head_dim"),
        turned_dim=require_int(hf_config, "qk_rope_head_dim"),
        value_dim=require_int(hf_config, "v_head_dim"),
    )


def unsupported_latent(hf_config: HFConfig) -> Iterator[str]:
    """Name settings that megatron-core would silently compute differently from the model."""
    heads, turned = hf_config.get("num_attention_heads"), hf_config.get("qk_rope_head_dim")
    plain = hf_config.get("qk_nope_head_dim")
    if hf_config.get("num_key_value_heads", heads) not in (None, heads):
        yield (
            f"num_key_value_heads ({hf_config['num_key_value_heads']}) must be num_attention_heads ({heads}): latent"
            " attention has keys and values for every head; mend the file."
        )
    if hf_config.get("head_dim", turned) not in (None, turned):
        yield f"head_dim ({hf_config['head_dim']}) must be qk_rope_head_dim ({turned}), or absent; mend the file."
    if (
        isinstance(plain, int)
        and isinstance(turned, int)
        and hf_config.get("qk_head_dim") not in (None, plain + turned)
    ):
        yield (
            f"qk_head_dim ({hf_config['qk_head_dim']}) must be qk_nope_head_dim + qk_rope_head_dim ({plain} +"
            f" {turned}), or absent; mend the file."
        )
    if isinstance(turned, int) and turned % 2:
        yield f"qk_rope_head_dim ({turned}) must be even: pairs of dimensions turn; mend the file."


def latent_arguments(latent: LatentAttention, rotary: Rotary) -> dict[str, Any]:
    """Keyword arguments of MLATransformerConfig, which turns queries and keys itself."""
    scaling = rotary.scaling
    of_rope: dict[str, Any] = {
        "rope_type": "rope",
        # They enter the scale of the softmax whatever the type is.
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    if isinstance(scaling, YarnScaling):
        of_rope = {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.turned_dim,
        "v_head_dim": latent.value_dim,
        "kv_channels": latent.plain_dim + latent.turned_dim,
        "qk_layernorm": True,
        "rotary_base": rotary.base,
        **of_rope,
    }


def latent_rules(latent: LatentAttention, num_heads: int, hidden_size: int, layer: int) -> list[Rule]:
    """All of a layer's attention. Engines join the two matrices into the narrow vectors: they are one fusion group."""
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"

    def plain(megatron_name: str, hf_name: str, shape: tuple[int, ...], split: Split = "replicated") -> Rule:
        tensor = HFTensor(f"{theirs}.{hf_name}.weight", shape)
        blocks = None if split == "replicated" else num_heads
        return plain_rule(f"{ours}.{megatron_name}.weight", tensor, split, layer, blocks)

    def joined(megatron_name: str, hf_name: str, shape: tuple[int, ...]) -> Rule:
        return replace(plain(megatron_name, hf_name, shape), fusion_group=f"{theirs}.qkv_a")

    queries = num_heads * (latent.plain_dim + latent.turned_dim)
    keys_values = num_heads * (latent.plain_dim + latent.value_dim)
    narrow_queries = []
    if latent.q_rank is None:
        first = plain("linear_q_proj", "q_proj", (queries, hidden_size), "rows")
    else:
        first = joined("linear_q_down_proj", "q_a_proj", (latent.q_rank, hidden_size))
        narrow_queries = [
            plain("q_layernorm", "q_a_layernorm", (latent.q_rank,)),
            plain("linear_q_up_proj", "q_b_proj", (queries, latent.q_rank), "rows"),
        ]
    return [
        first,
        joined("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent.kv_rank + latent.turned_dim, hidden_size)),
        *narrow_queries,
        plain("kv_layernorm", "kv_a_layernorm", (latent.kv_rank,)),
        plain("linear_kv_up_proj", "kv_b_proj", (keys_values, latent.kv_rank), "rows"),
        plain("linear_proj", "o_proj", (hidden_size, num_heads * latent.value_dim), "columns"),
    ]
