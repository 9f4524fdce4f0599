"""Multi-latent attention (DeepSeek-V2, 2405.04434): its dimensions, arguments and rules.

Keys and values come out of a narrow vector a token, queries too where `q_rank` is not None. A part
of each key has the position and is the same for all heads. The matrices into the narrow vectors are
whole on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config.rope import RotaryConfig, YarnScaling
from rlhf_megatron.weights.families.model_family import HFConfig, read_positive_int
from rlhf_megatron.weights.weight_table import HFTensor, TensorSplit, WeightRule, make_plain_rule

LATENT_KEYS = (
    "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave"
    " v_head_dim original_max_position_embeddings"
)
"""Keys of config.json, besides those that all families know."""


@dataclass(frozen=True)
class LatentAttentionDimensions:
    """The latent attention of a model. Queries and keys of a head are nope_dim +
    rope_dim wide.
    """

    q_rank: int | None  # None: queries are made of the hidden states
    kv_rank: int
    nope_dim: int  # without a position
    rope_dim: int  # with one
    value_dim: int


def read_latent_dimensions(hf_config: HFConfig) -> LatentAttentionDimensions:
    """Return the dimensions that config.json gives. Raise ValueError where one is missing."""
    return LatentAttentionDimensions(
        q_rank=None
        if hf_config.get("q_lora_rank") is None
        else read_positive_int(hf_config, "q_lora_rank"),
        kv_rank=read_positive_int(hf_config, "kv_lora_rank"),
        nope_dim=read_positive_int(hf_config, "qk_nope_head_dim"),
        rope_dim=read_positive_int(hf_config, "qk_rope_head_dim"),
        value_dim=read_positive_int(hf_config, "v_head_dim"),
    )


def find_unsupported_latent_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence for each attention setting that megatron-core would silently compute
    differently from the model.
    """
    heads = hf_config.get("num_attention_heads")
    turned = hf_config.get("qk_rope_head_dim")
    plain = hf_config.get("qk_nope_head_dim")
    if hf_config.get("num_key_value_heads", heads) not in (None, heads):
        yield (
            f"num_key_value_heads ({hf_config['num_key_value_heads']}) must be num_attention_heads"
            f" ({heads}): latent attention has keys and values for every head; mend the file."
        )
    if hf_config.get("head_dim", turned) not in (None, turned):
        yield (
            f"head_dim ({hf_config['head_dim']}) must be qk_rope_head_dim ({turned}), or absent;"
            " mend the file."
        )
    if (
        isinstance(plain, int)
        and isinstance(turned, int)
        and hf_config.get("qk_head_dim") not in (None, plain + turned)
    ):
        yield (
            f"qk_head_dim ({hf_config['qk_head_dim']}) must be qk_nope_head_dim + qk_rope_head_dim"
            f" ({plain} + {turned}), or absent; mend the file."
        )
    if isinstance(turned, int) and turned % 2:
        yield f"qk_rope_head_dim ({turned}) must be even: pairs of dimensions turn; mend the file."


def make_latent_arguments(
    latent_attention: LatentAttentionDimensions, rotary: RotaryConfig
) -> dict[str, Any]:
    """Return the keyword arguments of MLATransformerConfig, which rotates queries and keys
    itself.
    """
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
        "q_lora_rank": latent_attention.q_rank,
        "kv_lora_rank": latent_attention.kv_rank,
        "qk_head_dim": latent_attention.nope_dim,
        "qk_pos_emb_head_dim": latent_attention.rope_dim,
        "v_head_dim": latent_attention.value_dim,
        "kv_channels": latent_attention.nope_dim + latent_attention.rope_dim,
        "qk_layernorm": True,
        "rotary_base": rotary.base,
        **of_rope,
    }


def make_latent_rules(
    latent_attention: LatentAttentionDimensions, num_heads: int, hidden_size: int, layer: int
) -> list[WeightRule]:
    """Return the rules of a layer's attention. Engines join the two matrices into the narrow
    vectors, so that these are one fusion group.
    """
    ours = f"decoder.layers.{layer}.self_attention"
    theirs = f"model.layers.{layer}.self_attn"

    def make_projection_rule(
        megatron_name: str, hf_name: str, shape: tuple[int, ...], split: TensorSplit = "replicated"
    ) -> WeightRule:
        """Return the rule of one attention tensor that is the same in both layouts."""
        tensor = HFTensor(f"{theirs}.{hf_name}.weight", shape)
        blocks = None if split == "replicated" else num_heads
        return make_plain_rule(f"{ours}.{megatron_name}.weight", tensor, split, layer, blocks)

    def make_fused_projection_rule(
        megatron_name: str, hf_name: str, shape: tuple[int, ...]
    ) -> WeightRule:
        """Return the rule of a matrix into a narrow vector, in the fusion group of both."""
        return replace(
            make_projection_rule(megatron_name, hf_name, shape), fusion_group=f"{theirs}.qkv_a"
        )

    queries = num_heads * (latent_attention.nope_dim + latent_attention.rope_dim)
    keys_values = num_heads * (latent_attention.nope_dim + latent_attention.value_dim)
    narrow_queries = []
    if latent_attention.q_rank is None:
        first = make_projection_rule("linear_q_proj", "q_proj", (queries, hidden_size), "rows")
    else:
        first = make_fused_projection_rule(
            "linear_q_down_proj", "q_a_proj", (latent_attention.q_rank, hidden_size)
        )
        narrow_queries = [
            make_projection_rule("q_layernorm", "q_a_layernorm", (latent_attention.q_rank,)),
            make_projection_rule(
                "linear_q_up_proj", "q_b_proj", (queries, latent_attention.q_rank), "rows"
            ),
        ]
    return [
        first,
        make_fused_projection_rule(
            "linear_kv_down_proj",
            "kv_a_proj_with_mqa",
            (latent_attention.kv_rank + latent_attention.rope_dim, hidden_size),
        ),
        *narrow_queries,
        make_projection_rule("kv_layernorm", "kv_a_layernorm", (latent_attention.kv_rank,)),
        make_projection_rule(
            "linear_kv_up_proj", "kv_b_proj", (keys_values, latent_attention.kv_rank), "rows"
        ),
        make_projection_rule(
            "linear_proj",
            "o_proj",
            (hidden_size, num_heads * latent_attention.value_dim),
            "columns",
        ),
    ]
