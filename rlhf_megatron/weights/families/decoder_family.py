"""Decoders with grouped-query attention, RMSNorm and gated MLP, or experts in its place, share
dimensions, arguments and rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rlhf_megatron.config.rope import RotaryConfig, read_rotary_config
from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.weights.families.expert_layers import (
    ExpertLayers,
    make_expert_arguments,
    make_expert_rules,
)
from rlhf_megatron.weights.families.family_lookup import refuse_unsupported_settings
from rlhf_megatron.weights.families.latent_attention import (
    LatentAttentionDimensions,
    make_latent_arguments,
    make_latent_rules,
)
from rlhf_megatron.weights.families.model_family import HFConfig, ModelFamily, read_positive_int
from rlhf_megatron.weights.weight_table import (
    HFTensor,
    LayerPart,
    StageOwner,
    TensorSplit,
    WeightRule,
    concatenate_tensors,
    make_plain_rule,
    split_into_halves,
)

ParameterKind = Literal["weight", "bias"]

ONLY = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Settings of config.json that all dense families implement in one way; a missing one
has that value.
"""


@dataclass(frozen=True)
class DecoderDimensions:
    """The dimensions of a decoder."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_groups: int  # key-value heads
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rotary: RotaryConfig
    is_tied: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_proj_bias: bool  # of the matrix behind attention
    has_mlp_bias: bool
    experts: ExpertLayers | None  # None: all layers have a dense MLP
    latent_attention: LatentAttentionDimensions | None  # None: grouped-query attention
    window: AttentionWindow | None = None  # None: every token sees all before it
    has_sinks: bool = False  # each head has a logit of its own in the softmax, for no key


@dataclass(frozen=True)
class AttentionWindow:
    """Layers whose tokens see themselves and those right before them only."""

    num_tokens: int  # tokens
    layer_has_window: tuple[bool, ...]


def read_decoder_dimensions(
    hf_config: HFConfig,
    *,
    head_dim: int | None,
    max_positions: int,
    has_qk_norm: bool = False,
    has_qkv_bias: bool = False,
    has_proj_bias: bool = False,
    has_mlp_bias: bool = False,
    experts: ExpertLayers | None = None,
    latent_attention: LatentAttentionDimensions | None = None,
    is_partly_rotated: bool = False,
    window: AttentionWindow | None = None,
    has_sinks: bool = False,
) -> DecoderDimensions:
    """Return the dimensions that config.json gives. `head_dim` and `max_positions` are the family's
    defaults for keys that are missing or null; head_dim None means hidden_size / heads. Raise
    ValueError for settings that the family does not implement.
    """
    refuse_unsupported_settings(hf_config)
    num_heads = read_positive_int(hf_config, "num_attention_heads")
    hidden_size = read_positive_int(hf_config, "hidden_size")
    groups = read_positive_int(hf_config, "num_key_value_heads", num_heads)
    if num_heads % groups != 0:
        raise ValueError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of"
            f" num_key_value_heads ({groups})."
        )
    return DecoderDimensions(
        num_layers=read_positive_int(hf_config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=read_positive_int(hf_config, "intermediate_size"),
        num_heads=num_heads,
        num_groups=groups,
        head_dim=read_positive_int(hf_config, "head_dim", head_dim or hidden_size // num_heads),
        vocab_size=read_positive_int(hf_config, "vocab_size"),
        max_positions=read_positive_int(hf_config, "max_position_embeddings", max_positions),
        norm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        rotary=read_rotary_config(hf_config, is_partly_rotated, latent_attention is not None),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
        has_qk_norm=has_qk_norm,
        has_qkv_bias=has_qkv_bias,
        has_proj_bias=has_proj_bias,
        has_mlp_bias=has_mlp_bias,
        experts=experts,
        latent_attention=latent_attention,
        window=window,
        has_sinks=has_sinks,
    )


def make_decoder_family(
    model_type: str,
    read_dimensions: Callable[[HFConfig], DecoderDimensions],
    find_unsupported: Callable[[HFConfig], Iterator[str]] | None = None,
    is_partly_rotated: bool = False,
    is_latent: bool = False,
    has_windows: bool = False,
    **required_values: Any,
) -> ModelFamily:
    """Return the family of a model_type whose config.json `read_dimensions` reads.
    `required_values`: further settings as in ONLY, which must have these values; `find_unsupported`
    yields further problems; `has_windows`: the family reads layer_types itself.
    """

    def find_problems(hf_config: HFConfig) -> Iterator[str]:
        """Yield a sentence for each setting of config.json that the family does not implement."""
        yield from _find_unsupported_values({**ONLY, **required_values}, hf_config)
        yield from () if has_windows else _find_unsupported_layer_types(hf_config)
        try:
            read_rotary_config(hf_config, is_partly_rotated, is_latent)
        except ValueError as error:
            yield str(error)
        yield from find_unsupported(hf_config) if find_unsupported is not None else ()

    return ModelFamily(
        name=model_type,
        find_unsupported_settings=find_problems,
        make_transformer_arguments=lambda hf_config: _make_transformer_arguments(
            read_dimensions(hf_config)
        ),
        make_gpt_arguments=lambda hf_config: _make_gpt_arguments(read_dimensions(hf_config)),
        make_table=lambda hf_config, padded_vocab_size: _make_decoder_table(
            read_dimensions(hf_config), padded_vocab_size
        ),
    )


def _find_unsupported_values(
    required_values: Mapping[str, Any], hf_config: HFConfig
) -> Iterator[str]:
    """Yield a sentence for each key whose value is set and differs from `required_values`, and for
    a bad rms_norm_eps.
    """
    for key, implemented in required_values.items():
        value = hf_config.get(key, implemented)
        if value != implemented and value is not None:
            yield (
                f"{key} ({value!r}) is not supported; it must be {implemented!r}: choose"
                " another model."
            )
    epsilon = hf_config.get("rms_norm_eps", 1e-6)
    if not (isinstance(epsilon, float) and 0 < epsilon < 1):
        yield f"rms_norm_eps ({epsilon!r}) must be a number above 0 and below 1; mend the file."


def _find_unsupported_layer_types(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence if a layer has another attention than full_attention."""
    layers = hf_config.get("layer_types") or ()
    kinds = (
        sorted({str(kind) for kind in layers} - {"full_attention"})
        if isinstance(layers, list | tuple)
        else layers
    )
    if kinds:
        yield (
            f"layer_types {kinds} are not supported; only full_attention is: choose another model."
        )


def _make_transformer_arguments(dimensions: DecoderDimensions) -> dict[str, Any]:
    """Return the keyword arguments of megatron-core's TransformerConfig."""
    return {
        "num_layers": dimensions.num_layers,
        "hidden_size": dimensions.hidden_size,
        "ffn_hidden_size": dimensions.ffn_hidden_size,
        "num_attention_heads": dimensions.num_heads,
        "num_query_groups": dimensions.num_groups,
        "kv_channels": dimensions.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": dimensions.norm_epsilon,
        "qk_layernorm": dimensions.has_qk_norm,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": dimensions.has_proj_bias or dimensions.has_mlp_bias,
        "add_qkv_bias": dimensions.has_qkv_bias,
        **(make_expert_arguments(dimensions.experts) if dimensions.experts else {}),
        **(
            make_latent_arguments(dimensions.latent_attention, dimensions.rotary)
            if dimensions.latent_attention
            else {}
        ),
        **(_make_window_arguments(dimensions.window) if dimensions.window else {}),
        **({"softmax_type": "learnable"} if dimensions.has_sinks else {}),
    }


def _make_window_arguments(window: AttentionWindow) -> dict[str, Any]:
    """Return the arguments of a sliding window: megatron-core counts the tokens before a token, and
    takes a flag for each layer.
    """
    return {
        "window_size": (window.num_tokens - 1, 0),
        "window_attn_skip_freq": [int(is_in) for is_in in window.layer_has_window],
    }


def _make_gpt_arguments(dimensions: DecoderDimensions) -> dict[str, Any]:
    """Return the keyword arguments of GPTModel, and the entries that
    ranks.models.megatron_model_builder reads itself.
    """
    unbiased: LayerPart | None = None
    if dimensions.has_proj_bias != dimensions.has_mlp_bias:
        unbiased = "mlp" if dimensions.has_proj_bias else "self_attention"
    return {
        "max_sequence_length": dimensions.max_positions,
        "rotary": None if dimensions.latent_attention else dimensions.rotary,
        "unbiased": unbiased,
        "share_embeddings_and_output_weights": dimensions.is_tied,
    }


def _make_decoder_table(
    dimensions: DecoderDimensions, padded_vocab_size: int
) -> tuple[WeightRule, ...]:
    """Return the rules of the whole model, in the order of a forward pass. Raise ValueError when
    the padded vocabulary is smaller than the vocabulary.
    """
    if padded_vocab_size < dimensions.vocab_size:
        raise ValueError(
            f"padded vocabulary ({padded_vocab_size}) is smaller than"
            f" vocab_size ({dimensions.vocab_size})."
        )
    hidden = dimensions.hidden_size
    padded = padded_vocab_size
    vocab_shape = (dimensions.vocab_size, hidden)
    embedding = HFTensor("model.embed_tokens.weight", vocab_shape)
    rules = [_make_vocab_rule("embedding.word_embeddings.weight", embedding, padded, "embedding")]
    for layer in range(dimensions.num_layers):
        rules += _make_layer_rules(dimensions, layer)
    final_norm = HFTensor("model.norm.weight", (hidden,))
    rules.append(make_plain_rule("decoder.final_layernorm.weight", final_norm, "replicated", None))
    if not dimensions.is_tied:
        rules.append(
            _make_vocab_rule(
                "output_layer.weight", HFTensor("lm_head.weight", vocab_shape), padded, "head"
            )
        )
    return tuple(rules)


def _make_layer_rules(dimensions: DecoderDimensions, layer: int) -> list[WeightRule]:
    """Return the rules of one decoder layer: norms, attention, and its MLP or experts."""
    hidden = dimensions.hidden_size
    prefixes = (f"decoder.layers.{layer}", f"model.layers.{layer}")

    def make_norm_rule(megatron_name: str, hf_name: str) -> WeightRule:
        """Return the rule of a norm of the layer."""
        tensor = HFTensor(f"{prefixes[1]}.{hf_name}.weight", (hidden,))
        return make_plain_rule(f"{prefixes[0]}.{megatron_name}.weight", tensor, "replicated", layer)

    experts = (
        dimensions.experts
        if dimensions.experts and dimensions.experts.layer_has_experts[layer]
        else None
    )
    return [
        make_norm_rule("input_layernorm", "input_layernorm"),
        *(
            make_latent_rules(dimensions.latent_attention, dimensions.num_heads, hidden, layer)
            if dimensions.latent_attention
            else _make_attention_rules(dimensions, layer)
        ),
        make_norm_rule("pre_mlp_layernorm", "post_attention_layernorm"),
        *(
            make_expert_rules(experts, hidden, layer)
            if experts
            else _make_dense_mlp_rules(dimensions, layer)
        ),
    ]


def _make_attention_rules(dimensions: DecoderDimensions, layer: int) -> list[WeightRule]:
    """Return the rules of a layer's grouped-query attention, without the norm in front of it."""
    hidden = dimensions.hidden_size
    heads = dimensions.num_heads
    groups = dimensions.num_groups
    dim = dimensions.head_dim
    ours = f"decoder.layers.{layer}.self_attention"
    theirs = f"model.layers.{layer}.self_attn"

    def make_attention_rule(
        megatron_name: str,
        hf_name: str,
        shape: tuple[int, ...],
        split: TensorSplit,
        num_blocks: int | None,
    ) -> WeightRule:
        """Return the rule of one attention tensor that is the same in both layouts."""
        tensor = HFTensor(f"{theirs}.{hf_name}", shape)
        return make_plain_rule(f"{ours}.{megatron_name}", tensor, split, layer, num_blocks)

    qk_norms = []
    qkv_bias = []
    proj_bias = []
    if dimensions.has_qk_norm:
        qk_norms = [
            make_attention_rule("q_layernorm.weight", "q_norm.weight", (dim,), "replicated", None),
            make_attention_rule("k_layernorm.weight", "k_norm.weight", (dim,), "replicated", None),
        ]
    if dimensions.has_qkv_bias:
        qkv_bias = [_make_qkv_rule(dimensions, layer, "bias")]
    if dimensions.has_proj_bias:
        # Of matrices that tp splits by columns: every rank has the whole bias, added after the
        # sum over ranks.
        proj_bias = [
            make_attention_rule("linear_proj.bias", "o_proj.bias", (hidden,), "replicated", None)
        ]
    if dimensions.has_sinks:
        proj_bias.append(
            make_attention_rule("core_attention.softmax_offset", "sinks", (heads,), "rows", groups)
        )
    proj = (hidden, heads * dim)
    return [
        _make_qkv_rule(dimensions, layer, "weight"),
        *qkv_bias,
        *qk_norms,
        make_attention_rule("linear_proj.weight", "o_proj.weight", proj, "columns", groups),
        *proj_bias,
    ]


def _make_dense_mlp_rules(dimensions: DecoderDimensions, layer: int) -> list[WeightRule]:
    """Return the rules of a layer's dense MLP."""
    ours = f"decoder.layers.{layer}.mlp.linear_fc2"
    theirs = f"model.layers.{layer}.mlp.down_proj"
    down = HFTensor(f"{theirs}.weight", (dimensions.hidden_size, dimensions.ffn_hidden_size))
    bias = HFTensor(f"{theirs}.bias", (dimensions.hidden_size,))
    return [
        _make_gate_up_rule(dimensions, layer, "weight"),
        *([_make_gate_up_rule(dimensions, layer, "bias")] if dimensions.has_mlp_bias else []),
        make_plain_rule(f"{ours}.weight", down, "columns", layer),
        *(
            [make_plain_rule(f"{ours}.bias", bias, "replicated", layer)]
            if dimensions.has_mlp_bias
            else []
        ),
    ]


def _make_vocab_rule(
    megatron_name: str, hf_tensor: HFTensor, padded_vocab_size: int, owner: StageOwner
) -> WeightRule:
    """Return the rule of the embedding or the output layer, whose rows are padded to
    `padded_vocab_size` in Megatron.
    """
    return WeightRule(
        megatron_name=megatron_name,
        megatron_shape=(padded_vocab_size, hf_tensor.shape[1]),
        hf_tensors=(hf_tensor,),
        to_megatron=partial(_pad_vocab_rows, padded_vocab_size),
        to_hf=partial(_drop_padding_rows, hf_tensor.shape[0]),
        split="rows",
        owner=owner,
        layer=None,
        fusion_group=hf_tensor.name,
    )


def _make_qkv_rule(dimensions: DecoderDimensions, layer: int, kind: ParameterKind) -> WeightRule:
    """Return the rule of Megatron's joint query, key and value weight or bias."""
    dim = dimensions.head_dim
    theirs = f"model.layers.{layer}.self_attn"
    columns = (dimensions.hidden_size,) if kind == "weight" else ()
    rows = {
        "q": dimensions.num_heads * dim,
        "k": dimensions.num_groups * dim,
        "v": dimensions.num_groups * dim,
    }
    return WeightRule(
        megatron_name=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
        megatron_shape=(sum(rows.values()), *columns),
        hf_tensors=tuple(
            HFTensor(f"{theirs}.{part}_proj.{kind}", (size, *columns))
            for part, size in rows.items()
        ),
        to_megatron=partial(_interleave_qkv, dimensions.num_groups),
        to_hf=partial(_separate_qkv, dimensions.num_heads // dimensions.num_groups, dim),
        split="rows",
        owner="layer",
        layer=layer,
        fusion_group=f"{theirs}.qkv",
        num_blocks=dimensions.num_groups,
    )


def _make_gate_up_rule(
    dimensions: DecoderDimensions, layer: int, kind: ParameterKind
) -> WeightRule:
    """Return the rule of Megatron's joint gate and up weight or bias of a dense MLP."""
    ffn = dimensions.ffn_hidden_size
    theirs = f"model.layers.{layer}.mlp"
    columns = (dimensions.hidden_size,) if kind == "weight" else ()
    return WeightRule(
        megatron_name=f"decoder.layers.{layer}.mlp.linear_fc1.{kind}",
        megatron_shape=(2 * ffn, *columns),
        hf_tensors=tuple(
            HFTensor(f"{theirs}.{part}_proj.{kind}", (ffn, *columns)) for part in ("gate", "up")
        ),
        to_megatron=concatenate_tensors,
        to_hf=split_into_halves,
        split="gated_rows",
        owner="layer",
        layer=layer,
        fusion_group=f"{theirs}.gate_up",
    )


def _pad_vocab_rows(padded_vocab_size: int, tensor: Tensor) -> Tensor:
    """Return the tensor with zero rows added up to `padded_vocab_size`. These rows are never a
    label, and the output layer masks them.
    """
    missing = padded_vocab_size - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor


def _drop_padding_rows(vocab_size: int, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the first `vocab_size` rows, in a tuple of one."""
    return (tensor[:vocab_size],)


def _interleave_qkv(num_groups: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the joint tensor in Megatron's order, which keeps a key-value group together: its
    queries, its key, its value; then the next group.
    """
    return torch.cat([part.unflatten(0, (num_groups, -1)) for part in (q, k, v)], 1).flatten(0, 1)


def _separate_qkv(queries_per_group: int, head_dim: int, qkv: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v of the joint tensor of all groups, or of the groups of one shard."""
    sizes = [queries_per_group * head_dim, head_dim, head_dim]
    return tuple(part.flatten(0, 1) for part in qkv.unflatten(0, (-1, sum(sizes))).split(sizes, 1))
