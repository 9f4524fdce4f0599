"""The one place that builds a GPTModel."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlhf_megatron.config.rules.experts import num_experts
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.models.attention import LatentPositions, PackedAttention
from rlhf_megatron.models.backend import expert_layer_spec, layer_spec, resolve_impl
from rlhf_megatron.models.families.base import family_for, padded_vocab_size
from rlhf_megatron.models.flash import flash_kernel
from rlhf_megatron.models.fused import Choice
from rlhf_megatron.models.head import expose_hidden_states, put_value_head
from rlhf_megatron.models.norm import norm_of
from rlhf_megatron.models.table import Head, Impl
from rlhf_megatron.models.transformer_config import gradient_fusion, make_transformer_config
from rlhf_megatron.parallel.mcore_fixes import mark_experts, mark_whole
from rlhf_megatron.parallel.prepare import prepare_megatron
from rlhf_megatron.parallel.world import World

logger = logging.getLogger(__name__)


@dataclass
class MegatronModel:
    """This rank's part of a model. `chunks` may be replaced by their wrapped forms (DDP)."""

    chunks: list[torch.nn.Module]  # one a virtual stage of this rank, in the order of their layers
    transformer_config: TransformerConfig
    hf_config: Mapping[str, Any]
    impl: Impl  # whose names the modules have; the weight table is to be made for it
    vocab_size: int  # of the tokenizer's model: tokens that can be sampled
    padded_vocab_size: int  # rows of embedding and head over all tp ranks
    vocab_start: int  # token id of the first row that this tp rank has


def build_model(
    hf_config: Mapping[str, Any],
    world: World,
    dtype: torch.dtype,
    megatron: MegatronConfig | None = None,
    head: Head = "vocabulary",
) -> MegatronModel:
    """A model on `world.device`, its parameters not initialised: load weights next. Called on all ranks of a replica.

    `world.layout` has the parallel sizes; of `megatron` recompute_*, transformer_impl, moe_* and
    gradient_accumulation_fusion are read. Rank 0 logs which kernels it takes, and why no faster ones.

    Every chunk takes packed documents:
    `chunk(token_ids [1, T], position_ids [1, T], None, packed_seq_params=packed_documents(...))`. The last one of the
    last stage returns hidden states [1, T, h], of which `head_weight` makes log-probs; or `value_head` values, where
    `head` is "value": then there is no output layer.

    Raises ValueError for an architecture, layout or setting that is not supported.
    """
    prepare_megatron()
    megatron = megatron or MegatronConfig()
    impl = resolve_impl(megatron.transformer_impl, world.device, num_experts(hf_config) > 0)
    family = family_for(hf_config)
    gpt_arguments = family.gpt_arguments(hf_config)
    if head == "value":
        gpt_arguments["share_embeddings_and_output_weights"] = False  # there is no output layer to share them with
    arguments = family.transformer_arguments(hf_config)
    has_mlp_bias = arguments["add_bias_linear"] and gpt_arguments["unbiased"] != "mlp"
    config = make_transformer_config(arguments, world, dtype, megatron, impl, has_mlp_bias)
    if world.rank == 0:
        logger.info("%s layers; %s", impl, paths_taken(config, megatron, impl, world.device))
    vocab_size = int(hf_config["vocab_size"])
    padded = padded_vocab_size(vocab_size, world.layout.tp)
    chunks = range(world.layout.vpp)
    return MegatronModel(
        chunks=[
            _build_chunk(config, impl, world, padded, gpt_arguments, head, index, megatron.moe_grouped_gemm)
            for index in chunks
        ],
        transformer_config=config,
        hf_config=hf_config,
        impl=impl,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        vocab_start=world.coordinates.tp * (padded // world.layout.tp),
    )


def paths_taken(config: TransformerConfig, megatron: MegatronConfig, impl: Impl, device: torch.device) -> str:
    """ "attention: torch; norm: plain (fused norms run on CUDA only); ..." """
    dtype = config.params_dtype
    taken: dict[str, Choice] = {
        "attention": flash_kernel(device, dtype, config.kv_channels, config.softmax_type == "learnable").choice,
        "norm": norm_of(impl, device),
        "weight gradients added by": gradient_fusion(megatron.gradient_accumulation_fusion, impl, dtype, device),
    }
    notes = {path: f" ({choice.why_not})" if choice.why_not else "" for path, choice in taken.items()}
    return "; ".join(f"{path}: {choice.name}{notes[path]}" for path, choice in taken.items())


def _build_chunk(
    config: TransformerConfig,
    impl: Impl,
    world: World,
    padded_vocab: int,
    gpt_arguments: Mapping[str, Any],
    head: Head,
    index: int,
    has_grouped_experts: bool,
) -> torch.nn.Module:
    """The `index`-th chunk of this rank: virtual stage index x pp + the rank's own stage."""
    arguments = dict(gpt_arguments)
    rotary, unbiased = arguments.pop("rotary"), arguments.pop("unbiased")
    vp_stage = index if world.layout.vpp > 1 else None
    has_head = world.is_last_stage and index == world.layout.vpp - 1
    num_layers = get_num_layers_to_build(config, vp_stage, world.coordinates.pp)
    first = get_transformer_layer_offset(config, vp_stage, world.coordinates.pp)
    dense, final_norm = layer_spec(impl, config, world.device, unbiased)
    layers = [dense] * num_layers
    if config.num_moe_experts:
        with_experts = expert_layer_spec(impl, config, world.device, has_grouped_experts)
        has_experts = config.moe_layer_freq[first : first + num_layers]
        layers = [with_experts if has else dense for has in has_experts]
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm),
        vocab_size=padded_vocab,
        pre_process=world.is_first_stage and index == 0,
        post_process=has_head,
        position_embedding_type="none",  # PackedAttention turns queries and keys
        pg_collection=world.pg_collection,
        vp_stage=vp_stage,
        **arguments,
    )
    mark_experts(model)
    mark_whole(model)
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.rotary = rotary
        elif isinstance(module, MultiLatentAttention):
            module.rotary_pos_emb = LatentPositions(module.rotary_pos_emb, config)
    if has_head and head == "value":
        put_value_head(model, world.tp_group)
    elif has_head:
        expose_hidden_states(model)
    return model.to(world.device)
