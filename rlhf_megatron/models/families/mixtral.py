"""Mixtral (model_type "mixtral"): attention as in Llama, experts in every layer, a softmax over the picked ones."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import FAMILIES, HFConfig, require_int
from rlhf_megatron.models.families.experts import read_experts, unknown_keys


def _read(hf_config: HFConfig) -> dense.DenseModel:
    experts = read_experts(
        hf_config,
        "num_local_experts",
        "intermediate_size",
        (True,) * require_int(hf_config, "num_hidden_layers"),
        gate="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts",
        matrices=("w1", "w3", "w2"),
        arguments={"moe_router_pre_softmax": False},
    )
    has_base = "rope_theta" in hf_config or "rope_parameters" in hf_config
    with_base = hf_config if has_base else {**hf_config, "rope_theta": 1e6}
    return dense.read_dense_model(with_base, head_dim=None, max_positions=131072, experts=experts)


def _unsupported(hf_config: HFConfig) -> Iterator[str]:
    yield from unknown_keys(hf_config, "num_local_experts router_jitter_noise")


FAMILIES.register("mixtral")(
    dense.family("mixtral", _read, _unsupported, attention_bias=False, sliding_window=None, router_jitter_noise=0.0)
)
