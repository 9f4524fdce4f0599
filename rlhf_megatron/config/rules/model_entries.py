"""Rules on the entries of a model's config.json that any family reads: their types, token ids
within the vocabulary, and lists with an entry for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_megatron.config.token_ids import describe_token_id_problem, is_count, shorten_value

FLAGS = (
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "tie_word_embeddings",
    "use_qk_norm",
    "use_sliding_window",
)
COUNTS = (
    "decoder_sparse_step",
    "experts_per_token",
    "first_k_dense_replace",
    "initial_context_length",
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "topk_group",
    "v_head_dim",
)
NUMBERS = (
    "attention_dropout",
    "attn_logit_softcapping",
    "initializer_range",
    "rms_norm_eps",
    "rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
)
TEXTS = ("dtype", "hidden_act", "model_type", "torch_dtype")
OBJECTS = ("quantization_config", "rope_parameters", "rope_scaling")
LISTS = ("architectures", "layer_types", "mlp_only_layers")
LARGEST_NUMBER = 1e30  # float32 has room for it


def find_entry_type_problems(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each entry of a config.json that has a value of a wrong type. A null
    stands for an absent entry.
    """
    kinds = (
        (FLAGS, _is_flag, "true or false"),
        (COUNTS, is_count, "a whole number, 0 or more"),
        (NUMBERS, _is_finite_number, "a finite number"),
        (TEXTS, _is_text, "a text"),
        (OBJECTS, _is_object, "an object"),
        (LISTS, _is_list, "a list"),
    )
    for names, is_right, rule in kinds:
        for name in names:
            value = hf_config.get(name)
            if value is not None and not is_right(value):
                yield f"{name} ({shorten_value(value)}) must be {rule}; mend the file."


def find_token_id_problems(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each end-of-sequence id of a config.json or generation_config.json that
    is no token of the model. vocab_size is the model's; without one only negative ids are wrong.
    """
    vocab_size = hf_config.get("vocab_size")
    value = hf_config.get("eos_token_id")
    for token_id in value if isinstance(value, list) else [value]:
        problem = describe_token_id_problem(token_id, vocab_size)
        if problem is not None:
            yield f"eos_token_id ({shorten_value(value)}) {problem}"


def find_layer_list_problems(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for a list of the kinds of layers that has not one entry a layer."""
    kinds = hf_config.get("layer_types")
    num_layers = hf_config.get("num_hidden_layers")
    if isinstance(kinds, list) and is_count(num_layers) and len(kinds) != num_layers:
        yield (
            f"layer_types has {len(kinds)} entries and must have one for each of the"
            f" num_hidden_layers ({num_layers}); mend the file."
        )


def _is_flag(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    """Return whether a value is a number that a float can be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= LARGEST_NUMBER


def _is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with entries."""
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    """Return whether a value is a list."""
    return isinstance(value, list | tuple)
