"""DeepSeek-V3 (model_type "deepseek_v3"; R1 and Moonlight are such) and Kimi-K2 ("kimi_k2"): latent
attention, sigmoid routers with groups and a bias, shared experts.

All norms have `rms_norm_eps`, as in SGLang; transformers gives those inside of attention 1e-6
whatever the file says.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.expert_layers import (
    ExpertLayers,
    find_unknown_keys,
    find_unsupported_sigmoid_settings,
    make_sigmoid_router_arguments,
    read_expert_layers,
)
from rlhf_megatron.weights.families.latent_attention import (
    LATENT_KEYS,
    find_unsupported_latent_settings,
    read_latent_dimensions,
)
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig, read_positive_int

_NEEDED = """
first_k_dense_replace n_group n_shared_experts norm_topk_prob routed_scaling_factor topk_group
"""
"""Programs have different defaults for these: a file must have them."""


def _read_deepseek_v3_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a DeepSeek-V3 config.json. Raise ValueError for unsupported
    settings.
    """
    return decoder_family.read_decoder_dimensions(
        hf_config,
        head_dim=None,
        max_positions=4096,
        experts=_read_deepseek_v3_experts(hf_config),
        latent_attention=read_latent_dimensions(hf_config),
    )


def _read_deepseek_v3_experts(hf_config: HFConfig) -> ExpertLayers:
    """Return the experts of a DeepSeek-V3 config.json: the first `first_k_dense_replace` layers
    have none. Raise ValueError for a missing or negative `first_k_dense_replace`.
    """
    num_dense = hf_config.get("first_k_dense_replace")
    if type(num_dense) is not int or num_dense < 0:
        raise ValueError(
            f"config.json: first_k_dense_replace is {num_dense!r}; it must be the number of leading"
            " layers without experts, 0 or more."
        )
    width = read_positive_int(hf_config, "moe_intermediate_size")
    return read_expert_layers(
        hf_config,
        "n_routed_experts",
        "moe_intermediate_size",
        tuple(
            layer >= num_dense for layer in range(read_positive_int(hf_config, "num_hidden_layers"))
        ),
        shared_ffn_hidden_size=width * read_positive_int(hf_config, "n_shared_experts"),
        has_bias=True,
        arguments=make_sigmoid_router_arguments(hf_config),
    )


def _find_unsupported_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence for each missing or unsupported setting, besides those of all decoders."""
    missing = [key for key in _NEEDED.split() if hf_config.get(key) is None]
    if missing:
        yield (
            f"{', '.join(missing)} must be in the file: programs disagree about what is meant"
            " without; mend the file."
        )
        return
    sizes = [hf_config.get(key) for key in ("n_routed_experts", "n_group", "topk_group")]
    experts, groups, picked = (
        value if isinstance(value, int) and value > 0 else 1 for value in sizes
    )
    if experts % groups or picked > groups:
        yield (
            f"n_group ({groups}) must divide n_routed_experts ({experts}) and be topk_group"
            f" ({picked}) at least; mend the file."
        )
    yield from find_unsupported_latent_settings(hf_config)
    yield from find_unsupported_sigmoid_settings(hf_config)
    yield from find_unknown_keys(
        hf_config,
        (
            f"{LATENT_KEYS} aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size"
            " moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob"
            " num_nextn_predict_layers routed_scaling_factor scoring_func seq_aux"
            " topk_group topk_method"
        ),
    )


for _name in ("deepseek_v3", "kimi_k2"):
    FAMILIES.register(_name)(
        decoder_family.make_decoder_family(
            _name,
            _read_deepseek_v3_dimensions,
            _find_unsupported_settings,
            is_latent=True,
            attention_bias=False,
            rope_interleave=True,
        )
    )
