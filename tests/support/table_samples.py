"""Small model configurations whose dimensions all differ, for tests of tables and conversions, and
random weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.weight_table import WeightRule

SMALL_QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 21,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SMALL_LLAMA = {**SMALL_QWEN3, "model_type": "llama", "head_dim": 3}
SMALL_QWEN2 = {k: v for k, v in SMALL_QWEN3.items() if k != "head_dim"} | {"model_type": "qwen2"}
BIASED_LLAMA = {**SMALL_LLAMA, "attention_bias": True, "mlp_bias": True}
THREE_KV_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 42}
"""Sizes that tp 3 divides and tp 2 and 4 do not."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SMALL_QWEN3,
    "llama": SMALL_LLAMA,
    "qwen2": SMALL_QWEN2,
    "biased llama": BIASED_LLAMA,
}


def tied(hf_config: dict[str, Any]) -> dict[str, Any]:
    return {**hf_config, "tie_word_embeddings": True}


def random_state(hf_config: dict[str, Any], std: float = 0.15, seed: int = 5) -> dict[str, Tensor]:
    """Float32 weights under Hugging Face names; norms lie around 1, and no bias is zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for rule in make_weight_table(hf_config):
        for hf in rule.hf_tensors:
            values = std * torch.randn(hf.shape, generator=generator)
            state[hf.name] = 1 + values if "norm" in hf.name else values
    return state


@dataclass(frozen=True)
class StateSource:
    """Weights for `load_model.load_hf` out of such a state."""

    state: dict[str, Tensor]

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        return tuple(self.state[tensor.name] for tensor in rule.hf_tensors)

    def get_dtype_name(self, rule: WeightRule) -> str:
        return "float32"


DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK_V3: dict[str, Any] = {  # as on the hub, but for quantization_config
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": DEEPSEEK_YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
