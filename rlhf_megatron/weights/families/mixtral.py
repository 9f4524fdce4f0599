"""Mixtral (model_type "mixtral"): attention as in Llama, experts in every layer, a softmax over
the picked ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.expert_layers import find_unknown_keys, read_expert_layers
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig, read_positive_int


def _read_mixtral_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a Mixtral config.json; its default rope_theta is 1e6. Raise
    ValueError for unsupported settings.
    """
    experts = read_expert_layers(
        hf_config,
        "num_local_experts",
        "intermediate_size",
        (True,) * read_positive_int(hf_config, "num_hidden_layers"),
        gate="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts",
        matrices=("w1", "w3", "w2"),
        arguments={"moe_router_pre_softmax": False},
    )
    has_base = "rope_theta" in hf_config or "rope_parameters" in hf_config
    with_base = hf_config if has_base else {**hf_config, "rope_theta": 1e6}
    return decoder_family.read_decoder_dimensions(
        with_base, head_dim=None, max_positions=131072, experts=experts
    )


def _find_unsupported_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence that lists keys that this family does not know."""
    yield from find_unknown_keys(hf_config, "num_local_experts router_jitter_noise")


FAMILIES.register("mixtral")(
    decoder_family.make_decoder_family(
        "mixtral",
        _read_mixtral_dimensions,
        _find_unsupported_settings,
        attention_bias=False,
        sliding_window=None,
        router_jitter_noise=0.0,
    )
)
