"""GPUs by name, and what engines put on them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.shard_plan import EngineLayout, find_engine_span
from rlhf_megatron.weights.weight_table import WeightRule

GPU_MEMORY_GB = {
    "a100-40g": 40,
    "a100-80g": 80,
    "h100-80g": 80,
    "h20-96g": 96,
    "h200": 141,
    "b200": 180,
}
"""Memory in units of 10^9 bytes, as the vendor counts it;
what a driver reports is a little more.
"""
GB = 10**9
GIB = 1 << 30
"""The unit of memory in all that a user reads, as in torch, in drivers and in the run's metrics."""
ENGINE_MEMORY_SHARE = 0.85
"""Of a GPU that an engine takes, where `rollout.sglang.args` has no mem_fraction_static:
weights and cache.
"""


@dataclass(frozen=True)
class EngineGpuMemory:
    """The memory of one GPU of an engine, bytes."""

    weight_bytes: int
    cache_bytes: int  # of keys and values
    bytes_per_token: int  # that a token takes of it, the mean over the engine's groups of ranks

    @property
    def num_cache_tokens(self) -> int:
        """Return the number of tokens that the cache of an engine holds."""
        return max(0, self.cache_bytes) // self.bytes_per_token


def plan_engine_memory(
    weight_table: tuple[WeightRule, ...],
    hf_config: Mapping[str, Any],
    dtype: str,
    rollout: RolloutConfig,
    gpu_bytes: int,
) -> EngineGpuMemory:
    """Divide the memory of an engine's first GPU, which holds most, into weights and cache, as
    `rollout.sglang.args` say. Latent vectors are on all ranks of a group that serves its own
    requests (DP attention); without DP attention there is one group.
    """
    given = {name.replace("-", "_"): value for name, value in rollout.sglang.args.items()}
    engine = EngineLayout.from_rollout_config(rollout)
    weights = 0
    for rule in weight_table:
        for hf in rule.hf_tensors:
            span = find_engine_span(rule, hf, engine, 0)
            if span is not None:
                weights += (
                    prod(span.shape_within(hf.shape)) * DTYPE_BYTES[rule.get_sent_dtype(hf, dtype)]
                )
    share = float(given.get("mem_fraction_static", ENGINE_MEMORY_SHARE))
    in_group = (
        count_cache_elements_per_token(hf_config, engine.tp // engine.dp) * DTYPE_BYTES[dtype]
    )
    return EngineGpuMemory(weights, int(gpu_bytes * share) - weights, in_group // engine.dp)


def count_cache_elements_per_token(hf_config: Mapping[str, Any], num_ranks: int) -> int:
    """Return the number of elements that a token has in the caches of all layers, on one of
    `num_ranks` ranks.
    """
    num_layers = int(hf_config["num_hidden_layers"])
    if hf_config.get("kv_lora_rank"):
        return num_layers * (int(hf_config["kv_lora_rank"]) + int(hf_config["qk_rope_head_dim"]))
    heads = int(hf_config["num_attention_heads"])
    groups = int(hf_config.get("num_key_value_heads") or heads)
    dim = int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads)
    return num_layers * 2 * max(1, groups // num_ranks) * dim
