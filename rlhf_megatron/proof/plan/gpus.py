"""GPUs by name, and what engines put on them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rlhf_megatron.models.table import Rule
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

GPUS = {
    "a100-40g": 40,
    "a100-80g": 80,
    "h100-80g": 80,
    "h20-96g": 96,
    "h200": 141,
    "b200": 180,
}
"""Memory in units of 10^9 bytes, as the vendor counts it; what a driver reports is a little more."""
GB = 10**9
ENGINE_SHARE = 0.85
"""Of a GPU that an engine takes, where `rollout.sglang.args` has no mem_fraction_static: weights and cache."""


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one GPU of an engine, bytes."""

    weights: int
    cache: int  # of keys and values
    token_bytes: int  # that a token takes of it

    @property
    def num_tokens(self) -> int:
        """The tokens that the cache of an engine holds."""
        return max(0, self.cache) // self.token_bytes


def engine_memory(
    table: tuple[Rule, ...], hf_config: Mapping[str, Any], dtype: str, arguments: Mapping[str, Any], gpu_bytes: int
) -> EngineMemory:
    """Split a GPU's memory as SGLang's arguments do. Weights are cut evenly over tp; latent vectors are on every
    rank.
    """
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    ranks = int(given.get("tp_size", given.get("tensor_parallel_size", 1)))
    weights = sum(
        prod(hf.shape) * DTYPE_BYTES[rule.type_of(hf, dtype)] // (1 if rule.split == "replicated" else ranks)
        for rule in table
        for hf in rule.hf
    )
    share = float(given.get("mem_fraction_static", ENGINE_SHARE))
    token_bytes = cache_elements(hf_config, ranks) * DTYPE_BYTES[dtype]
    return EngineMemory(weights, int(gpu_bytes * share) - weights, token_bytes)


def cache_elements(hf_config: Mapping[str, Any], ranks: int) -> int:
    """Elements that a token has in the caches of all layers, on one of so many ranks."""
    num_layers = int(hf_config["num_hidden_layers"])
    if hf_config.get("kv_lora_rank"):
        return num_layers * (int(hf_config["kv_lora_rank"]) + int(hf_config["qk_rope_head_dim"]))
    heads = int(hf_config["num_attention_heads"])
    groups = int(hf_config.get("num_key_value_heads") or heads)
    dim = int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads)
    return num_layers * 2 * max(1, groups // ranks) * dim
