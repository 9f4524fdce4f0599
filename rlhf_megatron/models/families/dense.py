"""Decoders with grouped-query attention, RMSNorm and gated MLP, or experts in its place, share dimensions, arguments
and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rlhf_megatron.config.rope import Rotary, read_rotary
from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.models.families.base import Family, HFConfig, refuse_unsupported, require_int
from rlhf_megatron.models.families.experts import Experts, expert_arguments, expert_rules
from rlhf_megatron.models.families.latent import LatentAttention, latent_arguments, latent_rules
from rlhf_megatron.models.table import HFTensor, Owner, Part, Rule, Split, concatenate, halves, plain_rule

Kind = Literal["weight", "bias"]


@dataclass(frozen=True)
class DenseModel:
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
    rotary: Rotary
    is_tied: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_proj_bias: bool  # of the matrix behind attention
    has_mlp_bias: bool
    experts: Experts | None  # None: all layers have a dense MLP
    latent: LatentAttention | None  # None: grouped-query attention
    window: Window | None = None  # None: every token sees all before it
    has_sinks: bool = False  # each head has a logit of its own in the softmax, for no key


@dataclass(frozen=True)
class Window:
    """Layers whose tokens see themselves and those right before them only."""

    size: int  # tokens
    in_layer: tuple[bool, ...]


def read_dense_model(
    hf_config: HFConfig,
    *,
    head_dim: int | None,
    max_positions: int,
    has_qk_norm: bool = False,
    has_qkv_bias: bool = False,
    has_proj_bias: bool = False,
    has_mlp_bias: bool = False,
    experts: Experts | None = None,
    latent: LatentAttention | None = None,
    is_partly_turned: bool = False,
    window: Window | None = None,
    has_sinks: bool = False,
) -> DenseModel:
    """Dimensions from config.json. `head_dim` and `max_positions` are the family's defaults for keys that are missing
    or null; head_dim None means hidden_size / heads. Raises ValueError for what its family does not implement."""
    refuse_unsupported(hf_config)
    num_heads = require_int(hf_config, "num_attention_heads")
    hidden_size = require_int(hf_config, "hidden_size")
    groups = require_int(hf_config, "num_key_value_heads", num_heads)
    if num_heads % groups != 0:
        raise ValueError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({groups})."
        )
    return DenseModel(
        num_layers=require_int(hf_config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=require_int(hf_config, "intermediate_size"),
        num_heads=num_heads,
        num_groups=groups,
        head_dim=require_int(hf_config, "head_dim", head_dim or hidden_size // num_heads),
        vocab_size=require_int(hf_config, "vocab_size"),
        max_positions=require_int(hf_config, "max_position_embeddings", max_positions),
        norm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        rotary=read_rotary(hf_config, is_partly_turned, latent is not None),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
        has_qk_norm=has_qk_norm,
        has_qkv_bias=has_qkv_bias,
        has_proj_bias=has_proj_bias,
        has_mlp_bias=has_mlp_bias,
        experts=experts,
        latent=latent,
        window=window,
        has_sinks=has_sinks,
    )


ONLY = {"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False, "quantization_config": None}
"""Settings of config.json that all dense families implement in one way; a missing one has that value."""


def family(
    name: str,
    read: Callable[[HFConfig], DenseModel],
    unsupported: Callable[[HFConfig], Iterator[str]] | None = None,
    is_partly_turned: bool = False,
    is_latent: bool = False,
    has_windows: bool = False,
    **only: Any,
) -> Family:
    """The family of a model_type whose config.json `read` understands. `only`: as in ONLY, of this family;
    `unsupported`: more of what it does not implement; `has_windows`: it reads layer_types itself."""

    def problems(hf_config: HFConfig) -> Iterator[str]:
        yield from _unsupported({**ONLY, **only}, hf_config)
        yield from () if has_windows else _other_layers(hf_config)
        try:
            read_rotary(hf_config, is_partly_turned, is_latent)
        except ValueError as error:
            yield str(error)
        yield from unsupported(hf_config) if unsupported is not None else ()

    return Family(
        name=name,
        unsupported=problems,
        transformer_arguments=lambda hf_config: _transformer_arguments(read(hf_config)),
        gpt_arguments=lambda hf_config: _gpt_arguments(read(hf_config)),
        table=lambda hf_config, padded_vocab_size: _table(read(hf_config), padded_vocab_size),
    )


def _unsupported(only: Mapping[str, Any], hf_config: HFConfig) -> Iterator[str]:
    for key, implemented in only.items():
        value = hf_config.get(key, implemented)
        if value != implemented and value is not None:
            yield f"{key} ({value!r}) is not supported; it must be {implemented!r}: choose another model."
    epsilon = hf_config.get("rms_norm_eps", 1e-6)
    if not (isinstance(epsilon, float) and 0 < epsilon < 1):
        yield f"rms_norm_eps ({epsilon!r}) must be a number above 0 and below 1; mend the file."


def _other_layers(hf_config: HFConfig) -> Iterator[str]:
    layers = hf_config.get("layer_types") or ()
    kinds = sorted({str(kind) for kind in layers} - {"full_attention"}) if isinstance(layers, list | tuple) else layers
    if kinds:
        yield f"layer_types {kinds} are not supported; only full_attention is: choose another model."


def _transformer_arguments(model: DenseModel) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_groups,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "qk_layernorm": model.has_qk_norm,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": model.has_proj_bias or model.has_mlp_bias,
        "add_qkv_bias": model.has_qkv_bias,
        **(expert_arguments(model.experts) if model.experts else {}),
        **(latent_arguments(model.latent, model.rotary) if model.latent else {}),
        **(_window_arguments(model.window) if model.window else {}),
        **({"softmax_type": "learnable"} if model.has_sinks else {}),
    }


def _window_arguments(window: Window) -> dict[str, Any]:
    """megatron-core counts the tokens before a token, and knows of each layer whether it has the window."""
    return {"window_size": (window.size - 1, 0), "window_attn_skip_freq": [int(is_in) for is_in in window.in_layer]}


def _gpt_arguments(model: DenseModel) -> dict[str, Any]:
    """Keyword arguments of GPTModel, and what models.build reads itself."""
    unbiased: Part | None = None
    if model.has_proj_bias != model.has_mlp_bias:
        unbiased = "mlp" if model.has_proj_bias else "self_attention"
    return {
        "max_sequence_length": model.max_positions,
        "rotary": None if model.latent else model.rotary,
        "unbiased": unbiased,
        "share_embeddings_and_output_weights": model.is_tied,
    }


def _table(model: DenseModel, padded_vocab_size: int) -> tuple[Rule, ...]:
    """The rules of the whole model. Raises ValueError when the padded vocabulary is smaller than the vocabulary."""
    if padded_vocab_size < model.vocab_size:
        raise ValueError(f"padded vocabulary ({padded_vocab_size}) is smaller than vocab_size ({model.vocab_size}).")
    hidden, padded = model.hidden_size, padded_vocab_size
    vocab_shape = (model.vocab_size, hidden)
    embedding = HFTensor("model.embed_tokens.weight", vocab_shape)
    rules = [_vocab_rule("embedding.word_embeddings.weight", embedding, padded, "embedding")]
    for layer in range(model.num_layers):
        rules += _layer_rules(model, layer)
    final_norm = HFTensor("model.norm.weight", (hidden,))
    rules.append(plain_rule("decoder.final_layernorm.weight", final_norm, "replicated", None))
    if not model.is_tied:
        rules.append(_vocab_rule("output_layer.weight", HFTensor("lm_head.weight", vocab_shape), padded, "head"))
    return tuple(rules)


def _layer_rules(model: DenseModel, layer: int) -> list[Rule]:
    hidden, prefixes = model.hidden_size, (f"decoder.layers.{layer}", f"model.layers.{layer}")

    def norm(name: str, hf_name: str) -> Rule:
        tensor = HFTensor(f"{prefixes[1]}.{hf_name}.weight", (hidden,))
        return plain_rule(f"{prefixes[0]}.{name}.weight", tensor, "replicated", layer)

    experts = model.experts if model.experts and model.experts.in_layer[layer] else None
    return [
        norm("input_layernorm", "input_layernorm"),
        *(latent_rules(model.latent, model.num_heads, hidden, layer) if model.latent else _attention(model, layer)),
        norm("pre_mlp_layernorm", "post_attention_layernorm"),
        *(expert_rules(experts, hidden, layer) if experts else _mlp(model, layer)),
    ]


def _attention(model: DenseModel, layer: int) -> list[Rule]:
    hidden, heads, groups, dim = model.hidden_size, model.num_heads, model.num_groups, model.head_dim
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"

    def plain(megatron_name: str, hf_name: str, shape: tuple[int, ...], split: Split, num_blocks: int | None) -> Rule:
        tensor = HFTensor(f"{theirs}.{hf_name}", shape)
        return plain_rule(f"{ours}.{megatron_name}", tensor, split, layer, num_blocks)

    qk_norms, qkv_bias, proj_bias = [], [], []
    if model.has_qk_norm:
        qk_norms = [
            plain("q_layernorm.weight", "q_norm.weight", (dim,), "replicated", None),
            plain("k_layernorm.weight", "k_norm.weight", (dim,), "replicated", None),
        ]
    if model.has_qkv_bias:
        qkv_bias = [_qkv_rule(model, layer, "bias")]
    if model.has_proj_bias:
        # Of matrices that tp splits by columns: every rank has the whole bias, added after the sum over ranks.
        proj_bias = [plain("linear_proj.bias", "o_proj.bias", (hidden,), "replicated", None)]
    if model.has_sinks:
        proj_bias.append(plain("core_attention.softmax_offset", "sinks", (heads,), "rows", groups))
    proj = (hidden, heads * dim)
    return [
        _qkv_rule(model, layer, "weight"),
        *qkv_bias,
        *qk_norms,
        plain("linear_proj.weight", "o_proj.weight", proj, "columns", groups),
        *proj_bias,
    ]


def _mlp(model: DenseModel, layer: int) -> list[Rule]:
    ours, theirs = f"decoder.layers.{layer}.mlp.linear_fc2", f"model.layers.{layer}.mlp.down_proj"
    down = HFTensor(f"{theirs}.weight", (model.hidden_size, model.ffn_hidden_size))
    bias = HFTensor(f"{theirs}.bias", (model.hidden_size,))
    return [
        _gate_up_rule(model, layer, "weight"),
        *([_gate_up_rule(model, layer, "bias")] if model.has_mlp_bias else []),
        plain_rule(f"{ours}.weight", down, "columns", layer),
        *([plain_rule(f"{ours}.bias", bias, "replicated", layer)] if model.has_mlp_bias else []),
    ]


def _vocab_rule(name: str, tensor: HFTensor, padded_vocab_size: int, owner: Owner) -> Rule:
    return Rule(
        megatron_name=name,
        megatron_shape=(padded_vocab_size, tensor.shape[1]),
        hf=(tensor,),
        to_megatron=partial(_pad_rows, padded_vocab_size),
        to_hf=partial(_drop_rows, tensor.shape[0]),
        split="rows",
        owner=owner,
        layer=None,
        fusion_group=tensor.name,
    )


def _qkv_rule(model: DenseModel, layer: int, kind: Kind) -> Rule:
    dim, theirs = model.head_dim, f"model.layers.{layer}.self_attn"
    columns = (model.hidden_size,) if kind == "weight" else ()
    rows = {"q": model.num_heads * dim, "k": model.num_groups * dim, "v": model.num_groups * dim}
    return Rule(
        megatron_name=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
        megatron_shape=(sum(rows.values()), *columns),
        hf=tuple(HFTensor(f"{theirs}.{part}_proj.{kind}", (size, *columns)) for part, size in rows.items()),
        to_megatron=partial(_interleave_qkv, model.num_groups),
        to_hf=partial(_separate_qkv, model.num_heads // model.num_groups, dim),
        split="rows",
        owner="layer",
        layer=layer,
        fusion_group=f"{theirs}.qkv",
        num_blocks=model.num_groups,
    )


def _gate_up_rule(model: DenseModel, layer: int, kind: Kind) -> Rule:
    ffn, theirs = model.ffn_hidden_size, f"model.layers.{layer}.mlp"
    columns = (model.hidden_size,) if kind == "weight" else ()
    return Rule(
        megatron_name=f"decoder.layers.{layer}.mlp.linear_fc1.{kind}",
        megatron_shape=(2 * ffn, *columns),
        hf=tuple(HFTensor(f"{theirs}.{part}_proj.{kind}", (ffn, *columns)) for part in ("gate", "up")),
        to_megatron=concatenate,
        to_hf=halves,
        split="gated_rows",
        owner="layer",
        layer=layer,
        fusion_group=f"{theirs}.gate_up",
    )


def _pad_rows(padded_vocab_size: int, tensor: Tensor) -> Tensor:
    """Zero rows are added; they are never a label and the output layer masks them."""
    missing = padded_vocab_size - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor


def _drop_rows(vocab_size: int, tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor[:vocab_size],)


def _interleave_qkv(num_groups: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron keeps a key-value group together: its queries, its key, its value; then the next group."""
    return torch.cat([part.unflatten(0, (num_groups, -1)) for part in (q, k, v)], 1).flatten(0, 1)


def _separate_qkv(queries_per_group: int, head_dim: int, qkv: Tensor) -> tuple[Tensor, ...]:
    """Split q, k and v, of all groups or of those of one shard."""
    sizes = [queries_per_group * head_dim, head_dim, head_dim]
    return tuple(part.flatten(0, 1) for part in qkv.unflatten(0, (-1, sum(sizes))).split(sizes, 1))
