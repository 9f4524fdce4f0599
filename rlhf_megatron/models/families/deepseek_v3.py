"""DeepSeek-V3 (model_type "deepseek_v3"; R1 and Moonlight are such) and Kimi-K2 ("kimi_k2"): latent attention, sigmoid
routers with groups and a bias, shared experts.

All norms have `rms_norm_eps`, as in SGLang; transformers gives those inside of attention 1e-6 whatever the file says.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import FAMILIES, HFConfig, require_int
from rlhf_megatron.models.families.experts import (
    Experts,
    read_experts,
    sigmoid_arguments,
    unknown_keys,
    unsupported_sigmoid,
)
from rlhf_megatron.models.families.latent import LATENT_KEYS, read_latent, unsupported_latent

_NEEDED = """
first_k_dense_replace n_group n_shared_experts norm_topk_prob routed_scaling_factor topk_group
"""
"""Programs have different defaults for these: a file must have them."""


def _read(hf_config: HFConfig) -> dense.DenseModel:
    return dense.read_dense_model(
        hf_config, head_dim=None, max_positions=4096, experts=_experts(hf_config), latent=read_latent(hf_config)
    )


def _experts(hf_config: HFConfig) -> Experts:
    num_dense = int(hf_config["first_k_dense_replace"])
    width = require_int(hf_config, "moe_intermediate_size")
    return read_experts(
        hf_config,
        "n_routed_experts",
        "moe_intermediate_size",
        tuple(layer >= num_dense for layer in range(require_int(hf_config, "num_hidden_layers"))),
        shared_ffn_hidden_size=width * require_int(hf_config, "n_shared_experts"),
        has_bias=True,
        arguments=sigmoid_arguments(hf_config),
    )


def _unsupported(hf_config: HFConfig) -> Iterator[str]:
    missing = [key for key in _NEEDED.split() if hf_config.get(key) is None]
    if missing:
        yield f"{', '.join(missing)} must be in the file: programs disagree about what is meant without; mend the file."
        return
    sizes = [hf_config.get(key) for key in ("n_routed_experts", "n_group", "topk_group")]
    experts, groups, picked = (value if isinstance(value, int) and value > 0 else 1 for value in sizes)
    if experts % groups or picked > groups:
        yield (
            f"n_group ({groups}) must divide n_routed_experts ({experts}) and be topk_group ({picked}) at least; mend"
            " the file."
        )
    yield from unsupported_latent(hf_config)
    yield from unsupported_sigmoid(hf_config)
    yield from unknown_keys(
        hf_config,
        f"{LATENT_KEYS} aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq n_group"
        " n_routed_experts n_shared_experts norm_topk_prob num_nextn_predict_layers routed_scaling_factor scoring_func"
        " seq_aux topk_group topk_method",
    )


for _name in ("deepseek_v3", "kimi_k2"):
    FAMILIES.register(_name)(
        dense.family(_name, _read, _unsupported, is_latent=True, attention_bias=False, rope_interleave=True)
    )
