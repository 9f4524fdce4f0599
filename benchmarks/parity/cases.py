"""What is trained in every layout: tiny random models, one ragged batch, two ways to cut it, one
set of settings.

A family is a policy, and with a value head in place of the output layer a critic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.parity.rounding import orders
from rlhf_megatron.config.schema import PolicyLossConfig, RolloutCorrectionConfig

VOCAB = 131  # odd: tensor parallelism must pad it
NUM_SAMPLES = 24
NUM_STEPS = 3  # optimizer steps
Role = Literal["actor", "critic"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}
# it has hidden_size / heads
_QWEN2 = {key: value for key, value in _COMMON.items() if key != "head_dim"}
# Within 128 positions all three bands: of the eight waves one is kept, two are blended, five
# are stretched.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DENSE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_tied": {**_COMMON, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_untied": {**_COMMON, "model_type": "qwen3", "tie_word_embeddings": False},
    "llama_tied": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "llama_untied": {**_COMMON, "model_type": "llama", "tie_word_embeddings": False},
    "qwen2_tied": {**_QWEN2, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {**_QWEN2, "model_type": "qwen2", "tie_word_embeddings": False},
    "llama3_scaled": {  # four key-value heads: for tp 4
        **_COMMON,
        "model_type": "llama",
        "tie_word_embeddings": False,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "llama_3kv": {  # three key-value heads: for tp 3
        **_COMMON,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "llama_biased": {
        **_COMMON,
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
_EXPERTS = {**_COMMON, "tie_word_embeddings": False, "num_experts_per_tok": 2}
_QWEN3_MOE = {**_EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}
EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3_moe_plain": {
        **_QWEN3_MOE,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
    },
    "mixtral": {
        **_EXPERTS,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "intermediate_size": 32,
    },
    "glm4_moe": {
        **_EXPERTS,
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
}
_LATENT = {
    **{key: value for key, value in _QWEN2.items() if key != "num_key_value_heads"},
    "model_type": "deepseek_v3",
    "tie_word_embeddings": False,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_LATENT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
EXPERT_FAMILIES |= {
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": _LATENT_ROPE,
    },
    "moonlight": {
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
    },
}
EXPERT_FAMILIES["gpt_oss"] = {
    **_EXPERTS,
    "model_type": "gpt_oss",
    "intermediate_size": 32,
    "num_local_experts": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
FAMILIES = {**DENSE_FAMILIES, **EXPERT_FAMILIES}


@dataclass(frozen=True)
class Recipe:
    """Loss and optimizer. Every term is on, and the gradient norm is over the limit, so that each
    of them counts.

    adam_eps: Adam divides by sqrt(v) + eps. At the usual 1e-8 an element whose gradient is rounding
    noise moves by lr all the same, with a sign that rounding decides; 1e-5 is far above that noise
    and far below the gradients.
    """

    temperature: float = 0.8
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    kl_coef: float = 0.05
    entropy_coef: float = 0.01
    cliprange_value: float = 0.2
    lr: float = 2e-4
    adam_eps: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    balancing: str = "none"  # of routers: moe_router_load_balancing_type
    aux_coef: float = 0.0
    z_coef: float = 0.0
    bias_rate: float = 0.0

    @property
    def router_terms(self) -> dict[str, Any]:
        """The settings of the routers' terms as a user would write them;
        none where there are none.
        """
        found = {
            "moe_router_load_balancing_type": self.balancing,
            "moe_aux_loss_coeff": self.aux_coef,
        }
        found |= {"moe_z_loss_coeff": self.z_coef, "moe_router_bias_update_rate": self.bias_rate}
        return found if self.aux_coef or self.z_coef or self.bias_rate else {}


@dataclass(frozen=True)
class Cut:
    """How the batch becomes optimizer steps and micro-batches."""

    name: str
    mini_batches: tuple[tuple[int, int], ...]  # samples start .. stop - 1 of each optimizer step
    token_budget: int  # tokens of a micro-batch
    loss_agg_mode: str
    policy_loss: PolicyLossConfig | None = None  # None: ppo_clip with the recipe's bounds
    correction: RolloutCorrectionConfig | None = None  # of the rollout; None: no look at the engine


CUTS = (
    # All samples three times, in many small micro-batches.
    Cut("epochs", ((0, NUM_SAMPLES),) * NUM_STEPS, 64, "token-mean"),
    # Unequal mini-batches in few micro-batches; the last has one sample, so that a second replica
    # gets none. A long one: the gradient of a handful of tokens is as uncertain as the log-prob of
    # the one that weighs most.
    Cut("uneven", ((0, 13), (13, 22), (22, 23)), 256, "seq-mean-token-mean"),
)

# What `make test` runs: two epochs, so that moments of the first step count in the second; "uneven"
# has three steps.
QUICK_CUTS = (replace(CUTS[0], mini_batches=CUTS[0].mini_batches[:2]), CUTS[1])


def orders_of(hf_config: dict[str, Any]) -> list[Tensor]:
    """The orders of a model's hidden units in which float32's error is drawn."""
    return orders(hf_config["hidden_size"], "num_experts_per_tok" in hf_config)


def make_state(family: str, role: Role = "actor") -> dict[str, Tensor]:
    """Random float32 weights under Hugging Face names,
    large enough that no two tokens look alike.
    """
    state = _policy_state(FAMILIES[family])
    if role == "actor":
        return state
    state.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(12)
    hidden = FAMILIES[family]["hidden_size"]
    return state | {
        "score.weight": 0.2 * torch.randn(1, hidden, generator=generator),
        "score.bias": torch.randn(1, generator=generator),
    }


def _policy_state(hf_config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = hf_config["hidden_size"]
    dim = hf_config.get("head_dim", hidden // hf_config["num_attention_heads"])

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        return scale * torch.randn(rows, columns, generator=generator)

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    state = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, 0.2),
        "model.norm.weight": norm(hidden),
    }
    for layer in range(hf_config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        state[f"{prefix}.input_layernorm.weight"] = norm(hidden)
        for name, *shape in (
            _latent(hf_config) if "kv_lora_rank" in hf_config else _grouped(hf_config, dim)
        ):
            made = matrix(shape[0], shape[1], 0.1) if len(shape) == 2 else norm(shape[0])
            state[f"{prefix}.self_attn.{name}.weight"] = made
        state[f"{prefix}.post_attention_layernorm.weight"] = norm(hidden)
        if hf_config["model_type"] == "gpt_oss":
            state |= {
                f"{prefix}.{name}": tensor for name, tensor in _of_gpt_oss(hf_config, generator)
            }
        for name, rows, columns, scale in (
            _mlp(hf_config, layer) if hf_config["model_type"] != "gpt_oss" else ()
        ):
            state[f"{prefix}.{name}.weight"] = matrix(rows, columns, scale)
        if "n_routed_experts" in hf_config and layer not in _dense_layers(hf_config):
            bias = 0.1 * torch.randn(hf_config["n_routed_experts"], generator=generator)
            state[f"{prefix}.mlp.gate.e_score_correction_bias"] = bias
        if hf_config["model_type"].startswith("qwen3") or hf_config.get("use_qk_norm"):
            state |= {f"{prefix}.self_attn.{name}_norm.weight": norm(dim) for name in ("q", "k")}
        for name in _biased(hf_config):
            rows = state[f"{prefix}.{name}.weight"].shape[0]
            state[f"{prefix}.{name}.bias"] = 0.2 * torch.randn(rows, generator=generator)
    if not hf_config["tie_word_embeddings"]:
        state["lm_head.weight"] = matrix(VOCAB, hidden, 0.2)
    return state


def _of_gpt_oss(
    hf_config: dict[str, Any], generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """The sinks of a layer's attention, its router, and what each expert has of tensors that
    files have fused.
    """
    hidden, width, num = (
        hf_config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    shapes = {
        "gate_up_proj": (0.1, hidden, 2 * width),
        "gate_up_proj_bias": (0.2, 2 * width),
        "down_proj": (0.1, width, hidden),
        "down_proj_bias": (0.2, hidden),
    }
    yield "self_attn.sinks", torch.randn(hf_config["num_attention_heads"], generator=generator)
    yield "mlp.router.weight", 0.3 * torch.randn(num, hidden, generator=generator)
    yield "mlp.router.bias", 0.1 * torch.randn(num, generator=generator)
    for expert in range(num):
        for name, (scale, *shape) in shapes.items():
            yield f"mlp.experts.{expert}.{name}", scale * torch.randn(*shape, generator=generator)


def _grouped(hf_config: dict[str, Any], dim: int) -> list[tuple[Any, ...]]:
    """Name and shape of the weights of grouped-query attention."""
    hidden = hf_config["hidden_size"]
    keys = hf_config["num_key_value_heads"] * dim
    queries = hf_config["num_attention_heads"] * dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return [*((name, size, hidden) for name, size in rows.items()), ("o_proj", hidden, queries)]


def _latent(hf_config: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Name and shape of the weights of latent attention."""
    hidden, heads, rank = (
        hf_config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, turned, value = (
        hf_config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    queries = heads * (plain + turned)
    q_rank = hf_config["q_lora_rank"]
    narrow = [
        ("q_a_proj", q_rank, hidden),
        ("q_a_layernorm", q_rank),
        ("q_b_proj", queries, q_rank),
    ]
    return [
        *(narrow if q_rank else [("q_proj", queries, hidden)]),
        ("kv_a_proj_with_mqa", rank + turned, hidden),
        ("kv_a_layernorm", rank),
        ("kv_b_proj", heads * (plain + value), rank),
        ("o_proj", hidden, heads * value),
    ]


def _mlp(hf_config: dict[str, Any], layer: int) -> list[tuple[str, int, int, float]]:
    """Name, rows, columns and scale of the matrices of a layer's MLP,
    or of its router and experts.
    """
    hidden = hf_config["hidden_size"]
    ffn = hf_config["intermediate_size"]
    if hf_config["model_type"] == "mixtral":
        block = "block_sparse_moe"
        matrices = ("w1", "w3", "w2")
        num = hf_config["num_local_experts"]
    elif "moe_intermediate_size" in hf_config and layer not in _dense_layers(hf_config):
        block = "mlp"
        matrices = ("gate_proj", "up_proj", "down_proj")
        num = hf_config.get("num_experts") or hf_config["n_routed_experts"]
        ffn = hf_config["moe_intermediate_size"]
    else:
        return [
            ("mlp.gate_proj", ffn, hidden, 0.1),
            ("mlp.up_proj", ffn, hidden, 0.1),
            ("mlp.down_proj", hidden, ffn, 0.1),
        ]
    found = [(f"{block}.gate", num, hidden, 0.3)]
    if "n_shared_experts" in hf_config:
        width = ffn * hf_config["n_shared_experts"]
        shared = (
            ("gate_proj", width, hidden),
            ("up_proj", width, hidden),
            ("down_proj", hidden, width),
        )
        found += [
            (f"mlp.shared_experts.{name}", rows, columns, 0.1) for name, rows, columns in shared
        ]
    for expert in range(num):
        shapes = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
        found += [
            (f"{block}.experts.{expert}.{name}", *shape, 0.1)
            for name, shape in zip(matrices, shapes)
        ]
    return found


def _dense_layers(hf_config: dict[str, Any]) -> list[int]:
    return hf_config.get("mlp_only_layers", [*range(hf_config.get("first_k_dense_replace", 0))])


def _biased(hf_config: dict[str, Any]) -> list[str]:
    """The linear layers of a decoder layer that have a bias."""
    has_attention_bias = hf_config.get("attention_bias", False)
    names = (
        ["q_proj", "k_proj", "v_proj"]
        if has_attention_bias or hf_config["model_type"] == "qwen2"
        else []
    )
    names += ["o_proj"] if has_attention_bias and hf_config["model_type"] != "glm4_moe" else []
    mlp = ["gate_proj", "up_proj", "down_proj"] if hf_config.get("mlp_bias", False) else []
    return [f"self_attn.{name}" for name in names] + [f"mlp.{name}" for name in mlp]


def make_batch() -> dict[str, Tensor]:
    """Samples of 2 to 40 tokens with prompts of 1 to 8, a random advantage a token: offsets and
    token columns.
    """
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 41, (NUM_SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(offsets[-1])
    response_mask = torch.zeros(num_tokens, dtype=torch.bool)
    for i in range(NUM_SAMPLES):
        prompt = 1 + i % min(8, int(lengths[i]) - 1)
        response_mask[int(offsets[i]) + prompt : int(offsets[i + 1])] = True
    return {
        "offsets": offsets,
        "token_ids": torch.randint(0, VOCAB, (num_tokens,), generator=generator),
        "response_mask": response_mask,
        "advantages": torch.randn(num_tokens, generator=generator) * response_mask,
    }


def add_past(batch: dict[str, Tensor], log_probs: Tensor, draw: int = 0) -> dict[str, Tensor]:
    """`batch` with an old policy and a frozen reference: `log_probs` and noise, so that some
    ratios are clipped.

    `draw`: which noise of several.
    """
    generator = torch.Generator().manual_seed(3 + 10 * draw)
    noise = 0.3 * torch.randn(2, log_probs.numel(), generator=generator)
    old, ref = ((log_probs.double() + part) * batch["response_mask"] for part in noise)
    return {**batch, "old_log_probs": old.float(), "ref_log_probs": ref.float()}


def add_values(batch: dict[str, Tensor], values: Tensor, draw: int = 0) -> dict[str, Tensor]:
    """`batch` with the values before the update, `values` and noise so that some have moved too
    far, and returns.

    `draw`: as in `add_past`.
    """
    generator = torch.Generator().manual_seed(4 + 10 * draw)
    noise = torch.randn(2, values.numel(), generator=generator)
    old, returns = (
        (values.double() + scale * part) * batch["response_mask"]
        for scale, part in zip((0.3, 1.0), noise)
    )
    return {**batch, "values": old.float(), "returns": returns.float()}
