"""Layers with experts, for the families that have them: their dimensions, arguments and rules.

A token's router picks `per_token` of the experts; each is a gated MLP. On disk every expert has
three matrices of its own, in megatron-core's model two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_megatron.weights.families.model_family import HFConfig, read_positive_int
from rlhf_megatron.weights.weight_table import (
    HFTensor,
    WeightRule,
    concatenate_tensors,
    make_plain_rule,
    split_into_halves,
)

COMMON_KEYS = """
_name_or_path add_cross_attention architectures attention_bias attention_dropout auto_map \
bad_words_ids bos_token_id
chunk_size_feed_forward classifier_dropout dtype eos_token_id head_dim hidden_act hidden_size \
id2label initializer_range
intermediate_size is_decoder is_encoder_decoder label2id layer_types max_position_embeddings \
max_window_layers
model_type num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads \
num_labels output_attentions
output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type \
quantization_config return_dict
rms_norm_eps rope_parameters rope_scaling rope_theta router_aux_loss_coef sliding_window \
tie_word_embeddings
tokenizer_class torch_dtype transformers_version use_cache use_sliding_window vocab_size
"""
"""Keys of config.json that families with experts understand, or that say nothing about what the
model computes.
"""


ExpertRuleMaker = Callable[["ExpertLayers", int, int, int], tuple[WeightRule, ...]]
"""(experts, their hidden size, layer, number of one) -> the rules of that one."""


@dataclass(frozen=True)
class ExpertLayers:
    """The experts of a model. All layers that have experts are alike."""

    num_experts: int  # of a layer
    num_experts_per_token: int
    ffn_hidden_size: int  # of an expert
    layer_has_experts: tuple[bool, ...]  # which layers have experts; the others have a dense MLP
    gate: str = "mlp.gate"  # the router's Hugging Face name in a layer
    prefix: str = "mlp.experts"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # of the experts that every token meets, all together; 0: there are none
    shared_ffn_hidden_size: int = 0
    has_bias: bool = False  # the router adds one to the scores by which it picks
    has_linear_bias: bool = False  # of the router's matrix and those of the experts
    rules: ExpertRuleMaker | None = None  # of one expert; None: three matrices of its own on disk
    # of TransformerConfig: how the router scores
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_shared_experts(self) -> bool:
        """Return whether layers have shared experts, which every token passes."""
        return self.shared_ffn_hidden_size > 0


def read_expert_layers(
    hf_config: HFConfig,
    num_experts_key: str,
    width_key: str,
    layer_has_experts: tuple[bool, ...],
    **expert_fields: Any,
) -> ExpertLayers:
    """Return the experts that config.json gives. `num_experts_key` and `width_key`: the keys of the
    number of experts and of their inner size. `expert_fields`: further fields of `ExpertLayers`.
    Raise ValueError for more experts a token than there are.
    """
    found = ExpertLayers(
        read_positive_int(hf_config, num_experts_key),
        read_positive_int(hf_config, "num_experts_per_tok"),
        read_positive_int(hf_config, width_key),
        layer_has_experts,
        **expert_fields,
    )
    if found.num_experts_per_token > found.num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok ({found.num_experts_per_token}) is over"
            f" {num_experts_key} ({found.num_experts})."
        )
    return found


def make_sigmoid_router_arguments(hf_config: HFConfig) -> dict[str, Any]:
    """Return the TransformerConfig arguments of a router as in DeepSeek-V3 (2412.19437): sigmoid
    scores, a bias that only picks, groups of experts.
    """
    groups = read_positive_int(hf_config, "n_group", 1)
    in_groups = {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": read_positive_int(hf_config, "topk_group", 1),
    }
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # megatron-core would count the tokens that only fill a micro-batch
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(hf_config.get("routed_scaling_factor", 1.0)),
        **(in_groups if groups > 1 else {}),
    }


def find_unsupported_sigmoid_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence for each router setting that megatron-core would silently compute
    differently from the model.
    """
    groups = read_positive_int(hf_config, "n_group", 1)
    picked = read_positive_int(hf_config, "topk_group", 1)
    per_token = read_positive_int(hf_config, "num_experts_per_tok")
    if groups > 1 and per_token / picked != 2:
        yield (
            f"num_experts_per_tok / topk_group ({per_token} / {picked}) must be 2: the model"
            " counts the best two experts of a group, megatron-core as many as that; choose"
            " another model."
        )
    if not hf_config.get("norm_topk_prob", True):
        yield (
            "norm_topk_prob (False) is not supported: megatron-core scales the weights of picked"
            " experts to sum 1."
        )
    for key, value in (
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("moe_layer_freq", 1),
    ):
        if hf_config.get(key, value) != value:
            yield (
                f"{key} ({hf_config[key]!r}) is not supported; it must be {value!r}: choose"
                " another model."
            )


def find_unknown_keys(hf_config: HFConfig, known_keys: str) -> Iterator[str]:
    """Yield one sentence that lists the keys of config.json that are neither common nor in
    `known_keys`, words separated by spaces; nothing where there are none.
    """
    unknown = sorted(set(hf_config) - {*COMMON_KEYS.split(), *known_keys.split()})
    if unknown:
        yield (
            f"{', '.join(unknown)}: this family does not know what that means for the model;"
            " remove what is of no meaning, or choose another model."
        )


def make_expert_arguments(experts: ExpertLayers) -> dict[str, Any]:
    """Return the TransformerConfig arguments of layers with experts."""
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_experts_per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # A list always: with a number megatron-core's checkpoints stack the layers, and load under
        # no other form.
        "moe_layer_freq": [int(has_experts) for has_experts in experts.layer_has_experts],
        "moe_grouped_gemm": False,
        # In half precision logits would pick other experts for some tokens than the engine does.
        "moe_router_dtype": "fp32",
        # The loss is the algorithm's.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **(
            {"moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size}
            if experts.has_shared_experts
            else {}
        ),
        **experts.arguments,
    }


def make_expert_rules(experts: ExpertLayers, hidden_size: int, layer: int) -> list[WeightRule]:
    """Return the rules of a layer's router, of its shared experts, and of every matrix of every
    expert.
    """
    ours = f"decoder.layers.{layer}.mlp"
    theirs = f"model.layers.{layer}"
    router = HFTensor(f"{theirs}.{experts.gate}.weight", (experts.num_experts, hidden_size))
    rules = [make_plain_rule(f"{ours}.router.weight", router, "replicated", layer)]
    if experts.has_linear_bias:
        bias = HFTensor(f"{theirs}.{experts.gate}.bias", (experts.num_experts,))
        rules.append(make_plain_rule(f"{ours}.router.bias", bias, "replicated", layer))
    if experts.has_bias:
        bias = HFTensor(f"{theirs}.{experts.gate}.e_score_correction_bias", (experts.num_experts,))
        rules.append(
            replace(
                make_plain_rule(f"{ours}.router.expert_bias", bias, "replicated", layer),
                dtype="float32",
            )
        )
    if experts.has_shared_experts:
        width = experts.shared_ffn_hidden_size
        group = f"{theirs}.mlp.shared_experts"
        rules += _make_gated_mlp_rules(
            f"{ours}.shared_experts", group, experts.matrices, (width, hidden_size), layer
        )
    one = experts.rules or _make_expert_matrix_rules
    for number in range(experts.num_experts):
        rules += [
            replace(rule, expert=number, num_experts=experts.num_experts)
            for rule in one(experts, hidden_size, layer, number)
        ]
    return rules


def make_expert_name(layer: int, expert_index: int) -> str:
    """Return Megatron's module name of an expert."""
    return f"decoder.layers.{layer}.mlp.experts.local_experts.{expert_index}"


def _make_expert_matrix_rules(
    experts: ExpertLayers, hidden_size: int, layer: int, expert_index: int
) -> tuple[WeightRule, ...]:
    """Return the two rules of an expert with three matrices of its own on disk."""
    group = f"model.layers.{layer}.{experts.prefix}.{expert_index}"
    shape = (experts.ffn_hidden_size, hidden_size)
    return _make_gated_mlp_rules(
        make_expert_name(layer, expert_index), group, experts.matrices, shape, layer
    )


def _make_gated_mlp_rules(
    megatron_name: str,
    hf_name: str,
    matrices: tuple[str, str, str],
    shape: tuple[int, int],
    layer: int,
) -> tuple[WeightRule, WeightRule]:
    """Return the rules of a gated MLP without biases. `hf_name`: its Hugging Face name, which is
    the fusion group. `shape`: the shape of gate and of up.
    """
    gate, up, down = (f"{hf_name}.{matrix}.weight" for matrix in matrices)
    fc1 = WeightRule(
        megatron_name=f"{megatron_name}.linear_fc1.weight",
        megatron_shape=(2 * shape[0], shape[1]),
        hf_tensors=(HFTensor(gate, shape), HFTensor(up, shape)),
        to_megatron=concatenate_tensors,
        to_hf=split_into_halves,
        split="gated_rows",
        owner="layer",
        layer=layer,
        fusion_group=hf_name,
    )
    fc2 = make_plain_rule(
        f"{megatron_name}.linear_fc2.weight", HFTensor(down, shape[::-1]), "columns", layer
    )
    return fc1, replace(fc2, fusion_group=hf_name)
