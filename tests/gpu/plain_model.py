"""A Qwen3 decoder written out in plain torch, one document at a time: what the device is
compared with.

Needs neither megatron nor transformers, and runs in the type of the weights that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1003,  # odd, and no multiple of a chunk
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    # logits of deviation 1: distributions that are neither flat nor certain
    "initializer_range": 0.06,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def token_log_probs(
    weights: Mapping[str, Tensor], token_ids: Tensor, config: Mapping[str, Any] = CONFIG
) -> Tensor:
    """[T] token ids of one document -> [T - 1]: log p(token t + 1 | tokens 0 .. t)."""
    hidden = hidden_states(weights, token_ids, config)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = linear(hidden[:-1], head)
    return logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]


def hidden_states(
    weights: Mapping[str, Tensor], token_ids: Tensor, config: Mapping[str, Any] = CONFIG
) -> Tensor:
    """[T] token ids of one document -> [T, hidden], behind the final norm."""
    hidden = embedding(token_ids, weights["model.embed_tokens.weight"])
    for index in range(config["num_hidden_layers"]):
        hidden = _layer(weights, f"model.layers.{index}", hidden, config)
    return _norm(hidden, weights["model.norm.weight"], config)


def _layer(
    weights: Mapping[str, Tensor], name: str, hidden: Tensor, config: Mapping[str, Any]
) -> Tensor:
    def project(part: str, x: Tensor) -> Tensor:
        return linear(x, weights[f"{name}.{part}.weight"])

    def heads(part: str, x: Tensor) -> Tensor:
        return project(part, x).unflatten(-1, (-1, config["head_dim"])).transpose(0, 1)

    x = _norm(hidden, weights[f"{name}.input_layernorm.weight"], config)
    q = _turn(
        _norm(heads("self_attn.q_proj", x), weights[f"{name}.self_attn.q_norm.weight"], config),
        config,
    )
    k = _turn(
        _norm(heads("self_attn.k_proj", x), weights[f"{name}.self_attn.k_norm.weight"], config),
        config,
    )
    v = heads("self_attn.v_proj", x)
    out = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[
        0
    ]
    hidden = hidden + project("self_attn.o_proj", out.transpose(0, 1).flatten(1))
    x = _norm(hidden, weights[f"{name}.post_attention_layernorm.weight"], config)
    return hidden + project(
        "mlp.down_proj", silu(project("mlp.gate_proj", x)) * project("mlp.up_proj", x)
    )


def _norm(x: Tensor, weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


def _turn(x: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Rotary positions 0, 1, ... for x [heads, T, head_dim]."""
    half = config["head_dim"] // 2
    steps = torch.arange(half, dtype=torch.float64) / half
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] / config["rope_theta"] ** steps
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
