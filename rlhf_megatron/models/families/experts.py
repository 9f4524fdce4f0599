"""Layers with experts, for the families that have them: their dimensions, arguments and rules.

A token's router picks `per_token` of the experts; each is a gated MLP. On disk every expert has three matrices of its
own, in megatron-core's model two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_megatron.models.families.base import HFConfig, require_int
from rlhf_megatron.models.table import HFTensor, Rule, concatenate, halves, plain_rule

COMMON_KEYS = """
_name_or_path add_cross_attention architectures attention_bias attention_dropout auto_map bad_words_ids bos_token_id
chunk_size_feed_forward classifier_dropout dtype eos_token_id head_dim hidden_act hidden_size id2label initializer_range
intermediate_size is_decoder is_encoder_decoder label2id layer_types max_position_embeddings max_window_layers
model_type num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads num_labels output_attentions
output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type quantization_config return_dict
rms_norm_eps rope_parameters rope_scaling rope_theta router_aux_loss_coef sliding_window tie_word_embeddings
tokenizer_class torch_dtype transformers_version use_cache use_sliding_window vocab_size
"""
"""Keys of config.json that families with experts understand, or that say nothing about what the model computes."""


@dataclass(frozen=True)
class Experts:
    """Of a model; all layers that have experts are alike."""

    num: int  # of a layer
    per_token: int
    ffn_hidden_size: int  # of an expert
    in_layer: tuple[bool, ...]  # which layers have experts; the others have a dense MLP
    gate: str = "mlp.gate"  # the router's Hugging Face name in a layer
    prefix: str = "mlp.experts"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of TransformerConfig: how the router scores


def read_experts(hf_config: HFConfig, num: str, width: str, in_layer: tuple[bool, ...], **more: Any) -> Experts:
    """`num`, `width`: keys of config.json. Raises ValueError for more experts a token than there are."""
    found = Experts(
        require_int(hf_config, num),
        require_int(hf_config, "num_experts_per_tok"),
        require_int(hf_config, width),
        in_layer,
        **more,
    )
    if found.per_token > found.num:
        raise ValueError(f"config.json: num_experts_per_tok ({found.per_token}) is over {num} ({found.num}).")
    return found


def unknown_keys(hf_config: HFConfig, known: str) -> Iterator[str]:
    """One problem for the keys of config.json that are neither common nor `known`, words."""
    unknown = sorted(set(hf_config) - {*COMMON_KEYS.split(), *known.split()})
    if unknown:
        yield (
            f"{', '.join(unknown)}: this family does not know what that means for the model; remove what is of no"
            " meaning, or choose another model."
        )


def expert_arguments(experts: Experts) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig."""
    return {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # A list always: with a number megatron-core's checkpoints stack the layers, and load under no other form.
        "moe_layer_freq": [int(has_experts) for has_experts in experts.in_layer],
        "moe_grouped_gemm": False,
        # In half precision logits would pick other experts for some tokens than the engine does.
        "moe_router_dtype": "fp32",
        # The loss is the algorithm's.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **experts.arguments,
    }


def expert_rules(experts: Experts, hidden_size: int, layer: int) -> list[Rule]:
    """The router and every matrix of every expert of a layer."""
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}"
    router = HFTensor(f"{theirs}.{experts.gate}.weight", (experts.num, hidden_size))
    rules = [plain_rule(f"{ours}.router.weight", router, "replicated", layer)]
    up, down = (experts.ffn_hidden_size, hidden_size), (hidden_size, experts.ffn_hidden_size)
    both = (2 * experts.ffn_hidden_size, hidden_size)
    for number in range(experts.num):
        name, group = f"{ours}.experts.local_experts.{number}", f"{theirs}.{experts.prefix}.{number}"
        gate_name, up_name, down_name = (f"{group}.{matrix}.weight" for matrix in experts.matrices)
        fc2 = plain_rule(f"{name}.linear_fc2.weight", HFTensor(down_name, down), "columns", layer)
        rules += [
            Rule(
                megatron_name=f"{name}.linear_fc1.weight",
                megatron_shape=both,
                hf=(HFTensor(gate_name, up), HFTensor(up_name, up)),
                to_megatron=concatenate,
                to_hf=halves,
                split="gated_rows",
                owner="layer",
                layer=layer,
                fusion_group=group,
                expert=number,
                num_experts=experts.num,
            ),
            replace(fc2, fusion_group=group, expert=number, num_experts=experts.num),
        ]
    return rules
