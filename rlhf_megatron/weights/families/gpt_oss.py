"""GPT-OSS (model_type "gpt_oss"): sinks in the softmax of attention, a window in every other layer,
biases everywhere.

The router's weights are a softmax over the logits of the picked experts. An expert's MLP is
(up + 1) * gate * sigmoid(1.702 * gate), with gate and up held within `swiglu_limit`. In files the
experts of a layer are one tensor a matrix, the input first and gate and up by turns; here an expert
has an entry of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.expert_layers import (
    ExpertLayers,
    find_unknown_keys,
    make_expert_name,
    read_expert_layers,
)
from rlhf_megatron.weights.families.family_lookup import refuse_unsupported_settings
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig, read_positive_int
from rlhf_megatron.weights.weight_table import HFTensor, StackedEntry, WeightRule, make_plain_rule

_NEEDED = (
    "head_dim layer_types num_experts_per_tok num_key_value_heads num_local_experts"
    " rms_norm_eps sliding_window"
)
"""Programs have different defaults for these, or would guess: a file must have them."""
_LIMIT = 7.0  # transformers has no other
_SLIDING = "sliding_attention"
_FULL = "full_attention"


def _read_gpt_oss_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a GPT-OSS config.json. Raise ValueError for unsupported settings."""
    refuse_unsupported_settings(hf_config)
    is_sliding = tuple(kind == _SLIDING for kind in hf_config["layer_types"])
    return decoder_family.read_decoder_dimensions(
        hf_config,
        head_dim=None,
        max_positions=131072,
        has_qkv_bias=True,
        has_proj_bias=True,
        has_mlp_bias=True,
        experts=_read_gpt_oss_experts(hf_config),
        window=decoder_family.AttentionWindow(
            read_positive_int(hf_config, "sliding_window"), is_sliding
        ),
        has_sinks=True,
    )


def _read_gpt_oss_experts(hf_config: HFConfig) -> ExpertLayers:
    """Return the experts of a GPT-OSS config.json, which every layer has."""
    return read_expert_layers(
        hf_config,
        "num_local_experts",
        "intermediate_size",
        (True,) * read_positive_int(hf_config, "num_hidden_layers"),
        gate="mlp.router",
        has_linear_bias=True,
        rules=_make_gpt_oss_expert_rules,
        arguments={
            "moe_router_pre_softmax": False,
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": _LIMIT,
            "glu_linear_offset": 1.0,
        },
    )


def _make_gpt_oss_expert_rules(
    experts: ExpertLayers, hidden_size: int, layer: int, expert_index: int
) -> tuple[WeightRule, ...]:
    """Return the four rules of one expert: gate and up, their bias, down, its bias."""
    name = make_expert_name(layer, expert_index)
    width = experts.ffn_hidden_size
    group = f"model.layers.{layer}.{experts.prefix}"

    def make_stacked_entry_rule(megatron_name: str, hf_name: str, *shape: int) -> WeightRule:
        """Return the rule of one expert's entry of a stacked tensor; the entry's own name has the
        number of the expert.
        """
        entry = StackedEntry(f"{group}.{hf_name}", expert_index, experts.num_experts)
        tensor = HFTensor(f"{group}.{expert_index}.{hf_name}", shape, entry)
        rule = make_plain_rule(f"{name}.{megatron_name}", tensor, "replicated", layer)
        return replace(rule, fusion_group=f"{group}.{expert_index}")

    gate_up = make_stacked_entry_rule("linear_fc1.weight", "gate_up_proj", hidden_size, 2 * width)
    gate_up_bias = make_stacked_entry_rule("linear_fc1.bias", "gate_up_proj_bias", 2 * width)
    down = make_stacked_entry_rule("linear_fc2.weight", "down_proj", width, hidden_size)
    by_turns = {
        "to_megatron": _separate_gate_and_up,
        "to_hf": _interleave_gate_and_up,
        "split": "gated_rows",
    }
    turned = {"to_megatron": _transpose_tensor, "to_hf": _transpose_tensor_back, "split": "columns"}
    return (
        replace(
            gate_up,
            megatron_shape=(2 * width, hidden_size),
            is_transposed=True,
            **by_turns,  # type: ignore[arg-type]
        ),
        replace(gate_up_bias, **by_turns),  # type: ignore[arg-type]
        replace(
            down,
            megatron_shape=(hidden_size, width),
            is_transposed=True,
            **turned,  # type: ignore[arg-type]
        ),
        make_stacked_entry_rule("linear_fc2.bias", "down_proj_bias", hidden_size),
    )


def _separate_gate_and_up(gate_up: Tensor) -> Tensor:
    """Return Megatron's tensor, gate first and then up, of one that has them by turns: [hidden, 2
    width] gives [2 width, hidden], and a bias [2 width] keeps its shape.
    """
    rows = gate_up if gate_up.dim() == 1 else gate_up.T
    return torch.cat([rows[0::2], rows[1::2]])


def _interleave_gate_and_up(gate_up: Tensor) -> tuple[Tensor, ...]:
    """Return, in a tuple of one, the inverse of `_separate_gate_and_up`; it also takes a shard. A
    matrix [2 width, hidden] comes back as [hidden, 2 width]; a bias keeps its shape.
    """
    rows = torch.stack(gate_up.chunk(2), 1).flatten(0, 1)
    return (rows if rows.dim() == 1 else rows.T.contiguous(),)


def _transpose_tensor(tensor: Tensor) -> Tensor:
    """Return a contiguous transpose."""
    return tensor.T.contiguous()


def _transpose_tensor_back(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a contiguous transpose, in a tuple of one."""
    return (tensor.T.contiguous(),)


def _find_unsupported_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence for each missing, contradictory or unsupported setting, besides those of all
    decoders.
    """
    missing = [key for key in _NEEDED.split() if hf_config.get(key) is None]
    if not (hf_config.get("rope_scaling") or hf_config.get("rope_parameters")):
        missing.append("rope_scaling")
    if missing:
        yield (
            f"{', '.join(missing)} must be in the file: programs disagree about what is meant"
            " without; mend the file."
        )
        return
    kinds = hf_config["layer_types"]
    layers = hf_config.get("num_hidden_layers")
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != layers
        or set(map(str, kinds)) - {_SLIDING, _FULL}
    ):
        yield (
            f"layer_types ({kinds!r}) must name {_SLIDING} or {_FULL} of each of {layers!r} layers;"
            " mend the file."
        )
    window = hf_config["sliding_window"]
    if type(window) is not int or window < 1:
        yield f"sliding_window ({window!r}) must be a positive number of tokens; mend the file."
    per_token = hf_config["num_experts_per_tok"]
    rope = hf_config.get("rope_scaling") or hf_config["rope_parameters"]
    if hf_config.get("experts_per_token", per_token) != per_token:
        yield (
            f"experts_per_token ({hf_config['experts_per_token']!r}) and num_experts_per_tok"
            f" ({per_token!r}) mean the same number; mend the file."
        )
    original = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    if original is not None and hf_config.get("initial_context_length", original) != original:
        yield (
            f"initial_context_length ({hf_config['initial_context_length']!r}) and"
            f" original_max_position_embeddings ({original!r}) of the rotary embeddings mean the"
            " same length; mend the file."
        )
    yield from find_unknown_keys(
        hf_config,
        (
            "experts_per_token initial_context_length num_local_experts router_aux_loss_coef"
            " swiglu_limit"
        ),
    )


FAMILIES.register("gpt_oss")(
    decoder_family.make_decoder_family(
        "gpt_oss",
        _read_gpt_oss_dimensions,
        _find_unsupported_settings,
        has_windows=True,
        attention_bias=True,
        swiglu_limit=_LIMIT,
    )
)
