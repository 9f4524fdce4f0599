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
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlhf_megatron.config.rules.expert_rules import read_num_experts
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.models.flash_attention import choose_flash_kernel
from rlhf_megatron.ranks.models.fused_kernel_choice import KernelChoice
from rlhf_megatron.ranks.models.layer_specs import (
    make_expert_layer_spec,
    make_layer_spec,
    resolve_layer_impl,
)
from rlhf_megatron.ranks.models.output_heads import expose_hidden_states, install_value_head
from rlhf_megatron.ranks.models.packed_attention import LatentRotaryEmbedding, PackedAttention
from rlhf_megatron.ranks.models.rms_norm_layer import resolve_norm_kernel
from rlhf_megatron.ranks.models.transformer_config import (
    make_transformer_config,
    resolve_gradient_fusion,
)
from rlhf_megatron.ranks.parallel.mcore_fixes import (
    mark_expert_parameters,
    unmark_replicated_parameters,
)
from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.families.family_lookup import find_model_family
from rlhf_megatron.weights.families.model_family import pad_vocab_size
from rlhf_megatron.weights.weight_table import VALUE_HEADS, HeadKind, LayerImpl

logger = logging.getLogger(__name__)


@dataclass
class MegatronModel:
    """This rank's part of a model. `chunks` may be replaced by their wrapped forms (DDP)."""

    chunks: list[torch.nn.Module]  # one a virtual stage of this rank, in the order of their layers
    transformer_config: TransformerConfig
    hf_config: Mapping[str, Any]
    impl: LayerImpl  # whose names the modules have; the weight table is to be made for it
    vocab_size: int  # of the tokenizer's model: tokens that can be sampled
    padded_vocab_size: int  # rows of embedding and head over all tp ranks
    vocab_start: int  # token id of the first row that this tp rank has


def build_megatron_model(
    hf_config: Mapping[str, Any],
    world: World,
    dtype: torch.dtype,
    megatron: MegatronConfig | None = None,
    head: HeadKind = "vocabulary",
) -> MegatronModel:
    """Return this rank's part of a model on `world.device`, with parameters that are not
    initialised: load weights next. Call it on all ranks of a replica.

    `world.layout` has the parallel sizes; `megatron` supplies recompute_*, transformer_impl, moe_*
    and gradient_accumulation_fusion. Rank 0 logs the kernels in use, and why no faster ones.

    Every chunk takes packed documents: `chunk(token_ids [1, T], position_ids [1, T], None,
    packed_seq_params=make_packed_documents(...))`. The last chunk of the last stage returns hidden
    states [1, T, h], from which the weight of `get_head_weight` makes log-probs; or, where `head`
    is one of VALUE_HEADS, `get_value_head` makes values: then there is no output layer.

    Raise ValueError for an architecture, layout or setting that is not supported.
    """
    prepare_megatron()
    megatron = megatron or MegatronConfig()
    impl = resolve_layer_impl(
        megatron.transformer_impl, world.device, read_num_experts(hf_config) > 0
    )
    family = find_model_family(hf_config)
    gpt_arguments = family.make_gpt_arguments(hf_config)
    if head in VALUE_HEADS:
        # there is no output layer to share them with
        gpt_arguments["share_embeddings_and_output_weights"] = False
    arguments = family.make_transformer_arguments(hf_config)
    has_mlp_bias = arguments["add_bias_linear"] and gpt_arguments["unbiased"] != "mlp"
    config = make_transformer_config(arguments, world, dtype, megatron, impl, has_mlp_bias)
    if world.rank == 0:
        logger.info(
            "%s layers; %s", impl, describe_kernel_choices(config, megatron, impl, world.device)
        )
    vocab_size = int(hf_config["vocab_size"])
    padded = pad_vocab_size(vocab_size, world.layout.tp)
    chunks = range(world.layout.vpp)
    return MegatronModel(
        chunks=[
            _build_model_chunk(
                config, impl, world, padded, gpt_arguments, head, index, megatron.moe_grouped_gemm
            )
            for index in chunks
        ],
        transformer_config=config,
        hf_config=hf_config,
        impl=impl,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        vocab_start=world.coordinates.tp * (padded // world.layout.tp),
    )


def describe_kernel_choices(
    config: TransformerConfig, megatron: MegatronConfig, impl: LayerImpl, device: torch.device
) -> str:
    """Return a line that names the kernels in use, and why no faster ones, such as "attention:
    torch; norm: plain (fused norms run on CUDA only); ...".
    """
    dtype = config.params_dtype
    taken: dict[str, KernelChoice] = {
        "attention": choose_flash_kernel(
            device, dtype, config.kv_channels, config.softmax_type == "learnable"
        ).choice,
        "norm": resolve_norm_kernel(impl, device),
        "weight gradients added by": resolve_gradient_fusion(
            megatron.gradient_accumulation_fusion, impl, dtype, device
        ),
    }
    notes = {
        path: f" ({choice.why_not})" if choice.why_not else "" for path, choice in taken.items()
    }
    return "; ".join(f"{path}: {choice.name}{notes[path]}" for path, choice in taken.items())


def _build_model_chunk(
    config: TransformerConfig,
    impl: LayerImpl,
    world: World,
    padded_vocab: int,
    gpt_arguments: Mapping[str, Any],
    head: HeadKind,
    chunk_index: int,
    has_grouped_experts: bool,
) -> torch.nn.Module:
    """Build the `chunk_index`-th chunk of this rank: virtual stage index x pp + the rank's own
    stage.
    """
    arguments = dict(gpt_arguments)
    rotary = arguments.pop("rotary")
    unbiased = arguments.pop("unbiased")
    vp_stage = chunk_index if world.layout.vpp > 1 else None
    has_head = world.is_last_stage and chunk_index == world.layout.vpp - 1
    num_layers = get_num_layers_to_build(config, vp_stage, world.coordinates.pp)
    first = get_transformer_layer_offset(config, vp_stage, world.coordinates.pp)
    dense, final_norm = make_layer_spec(impl, config, world.device, unbiased)
    layers = [dense] * num_layers
    if config.num_moe_experts:
        with_experts = make_expert_layer_spec(impl, config, world.device, has_grouped_experts)
        has_experts = config.moe_layer_freq[first : first + num_layers]
        layers = [with_experts if has else dense for has in has_experts]
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm),
        vocab_size=padded_vocab,
        pre_process=world.is_first_stage and chunk_index == 0,
        post_process=has_head,
        position_embedding_type="none",  # PackedAttention turns queries and keys
        pg_collection=world.pg_collection,
        vp_stage=vp_stage,
        **arguments,
    )
    mark_expert_parameters(model)
    unmark_replicated_parameters(model)
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.rotary = rotary
        elif isinstance(module, MultiLatentAttention):
            module.rotary_pos_emb = LatentRotaryEmbedding(module.rotary_pos_emb, config)
    if has_head and head in VALUE_HEADS:
        install_value_head(model, world.tp_group, has_bias=head == "value")
    elif has_head:
        expose_hidden_states(model)
    return model.to(world.device)
