"""A tiny model of the same family and kind as a large one: what a layout can get wrong in it stays. Pure.

Kept: everything in config.json that is no size (tied or not, biases, rotary embeddings and their scaling, norm
epsilon), the kind of grouped-query attention, whether hidden_size is heads x head_dim, whether the vocabulary divides
by the tensor-parallel size, several layers a model chunk where recomputation groups them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.models.families.base import family_for

HEAD_DIM = 8
MIN_VOCAB_SIZE = 32  # holds the tokens of the character tokenizer
MAX_QUERIES_PER_GROUP = 3
SETTINGS: dict[str, Any] = {
    "initializer_range": 0.06,  # wide enough for the probabilities of tokens to differ
    "torch_dtype": "float32",
    "dtype": None,
    "bos_token_id": None,  # these three are of the character tokenizer
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def fold_model(
    hf_config: Mapping[str, Any], trues: Sequence[MegatronConfig], folded: Sequence[MegatronConfig]
) -> dict[str, Any]:
    """The config.json of a tiny model that fits all layouts `folded`. `trues`: the run's own layouts, one a pool.

    Raises ValueError for a model that has no family here.
    """
    sizes = family_for(hf_config).transformer_arguments(hf_config)
    true_tp = trues[0].tensor_model_parallel_size
    tp = math.lcm(*(megatron.tensor_model_parallel_size for megatron in folded))
    chunks = math.lcm(*map(num_chunks, folded))
    groups = tp * (2 if sizes["num_query_groups"] > true_tp else 1)
    heads = groups * _queries_per_group(sizes["num_attention_heads"] // sizes["num_query_groups"])
    is_square = sizes["hidden_size"] == sizes["num_attention_heads"] * sizes["kv_channels"]
    hidden = heads * HEAD_DIM + (0 if is_square else 2 * HEAD_DIM)
    num_layers = chunks * max(layers_per_chunk(true, sizes["num_layers"], chunks) for true in trues)
    small: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": hidden,
        "intermediate_size": _up_to_multiple(3 * hidden // 2, 4 * tp),
        "vocab_size": _vocab_size(int(hf_config["vocab_size"]) % true_tp == 0, tp),
    }
    if hf_config.get("head_dim") is not None or not is_square:
        small["head_dim"] = HEAD_DIM
    if hf_config.get("layer_types"):
        small["layer_types"] = list(hf_config["layer_types"])[:num_layers]
    kept = {key: value for key, value in hf_config.items() if not key.startswith("_")}
    return {key: value for key, value in {**kept, **small, **SETTINGS}.items() if value is not None}


def fold_recompute(folded: MegatronConfig, true: MegatronConfig, num_layers: int) -> MegatronConfig:
    """`folded` with a recompute_num_layers that fits the tiny model. `num_layers`: of the true model."""
    count = true.recompute_num_layers
    if true.recompute_granularity != "full" or count is None:
        return folded
    is_every_layer = count * num_chunks(true) >= num_layers
    few = 1 if true.recompute_method == "block" and not is_every_layer else min(count, 2)
    return replace(folded, recompute_num_layers=min(few, layers_per_chunk(true, num_layers, num_chunks(folded))))


def num_chunks(megatron: MegatronConfig) -> int:
    """Model chunks of all stages: stages x virtual stages."""
    return megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)


def layers_per_chunk(true: MegatronConfig, num_layers: int, small_chunks: int) -> int:
    """Of the tiny model. Two where the large one has several and they make a difference, or cost little."""
    are_grouped = true.recompute_granularity == "full" and (true.recompute_num_layers or 1) > 1
    are_cut = true.recompute_granularity == "full" and true.recompute_method == "block"
    return 2 if num_layers > num_chunks(true) and (are_grouped or are_cut or small_chunks <= 2) else 1


def _queries_per_group(true: int) -> int:
    """The same where it is small; else 2, or 3 for an odd number."""
    return true if true <= MAX_QUERIES_PER_GROUP else 2 + true % 2


def _vocab_size(divides: bool, tp: int) -> int:
    """At least MIN_VOCAB_SIZE; a multiple of `tp`, or not (where tp is not 1)."""
    if divides or tp == 1:
        return _up_to_multiple(MIN_VOCAB_SIZE, tp)
    return _up_to_multiple(MIN_VOCAB_SIZE, tp) + 1


def _up_to_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
