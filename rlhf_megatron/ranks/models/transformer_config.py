"""TransformerConfig of a model in a world: the family's arguments and the settings that this
project depends on.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from rlhf_megatron.config.rules.expert_rules import (
    find_expert_bias_problems,
    find_expert_layout_problems,
    find_ignored_expert_settings,
    find_shared_expert_problems,
)
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.models.fused_kernel_choice import (
    DeviceType,
    KernelChoice,
    choose_compiled_activation,
    choose_gradient_fusion,
)
from rlhf_megatron.ranks.models.grouped_experts import ALIGNMENT
from rlhf_megatron.ranks.parallel.optional_packages import (
    DEEP_EP,
    INSTALL,
    TRANSFORMER_ENGINE,
    explain_missing_compiler,
    explain_missing_deep_ep,
    explain_missing_fused_permutation,
    has_gradient_extension,
)
from rlhf_megatron.ranks.parallel.weight_grad import has_float32_accumulating_product
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import LayerImpl

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "quick_gelu": quick_gelu,
}


def make_transformer_config(
    arguments: dict[str, Any],
    world: World,
    dtype: torch.dtype,
    megatron: MegatronConfig,
    impl: LayerImpl,
    has_mlp_bias: bool,
) -> TransformerConfig:
    """Return megatron's config of a model in a world, of the class for latent attention where the
    model has it. `arguments` come from a family's `make_transformer_arguments`. The parallel sizes
    come from `world`, not from `megatron`.

    Raise ValueError when layers or heads do not divide, for recomputation that `impl` would ignore,
    for a fusion or kernel that cannot run here, and for unfit expert settings.
    """
    _check_layout_divides_model(arguments, world.layout)
    _check_recompute_settings(arguments["num_layers"], world.layout, megatron, impl, has_mlp_bias)
    experts = arguments.get("num_moe_experts", 0)
    _check_expert_settings(arguments, world.layout, megatron)
    is_grouped = bool(experts and megatron.moe_grouped_gemm)
    if is_grouped and (impl == "local" or world.device.type != "cuda"):
        _check_grouped_gemm_alignment(arguments, world.layout, dtype)
    _check_required_packages(megatron, dtype, world.device)
    plain = dict(arguments)
    plain["activation_func"] = ACTIVATIONS[plain["activation_func"]]
    kind = MLATransformerConfig if plain.get("multi_latent_attention") else TransformerConfig
    return kind(
        **plain,
        **_make_layout_settings(world.layout, dtype),
        **(_make_expert_settings(world.layout, megatron) if experts else {}),
        **_make_pipeline_settings(world.layout),
        **_make_recompute_settings(megatron),
        **_make_forced_settings(),
        **_make_fusion_settings(
            megatron, impl, dtype, world.device, is_grouped and arguments["add_bias_linear"]
        ),
    )


def finalize_gradients_without_division(
    model: list[Any], num_tokens: Any = None, pg_collection: Any = None, **options: Any
) -> None:
    """Run megatron's gradient reductions after the last micro-batch, without its division by a
    count of tokens: `num_tokens` has no effect.

    The loss arrives divided by the global denominator; megatron's count is an integer and at least
    1.
    """
    finalize_model_grads(model, None, pg_collection=pg_collection, **options)


def _make_layout_settings(layout: ParallelLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config's arguments for parallel sizes and types."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.num_first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": layout.num_last_stage_layers or None,
        "pipeline_model_parallel_layout": format_pipeline_layout(layout)
        if layout.layers_of_chunks
        else None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def format_pipeline_layout(layout: ParallelLayout) -> str:
    """Return the chunks of a layout in megatron-core's notation, such as "Ett|tttL"."""
    return f"E{'|'.join('t' * depth for depth in layout.layers_of_chunks)}L"


def _make_expert_settings(layout: ParallelLayout, megatron: MegatronConfig) -> dict[str, Any]:
    """Return the config's arguments for expert parallelism and token dispatch."""
    return {
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_permute_fusion": megatron.moe_permute_fusion,
        "moe_shared_expert_overlap": megatron.moe_shared_expert_overlap,
    }


def _make_pipeline_settings(layout: ParallelLayout) -> dict[str, Any]:
    """Return the config's arguments for messages between pipeline stages."""
    is_interleaved = layout.vpp > 1
    return {
        # All micro-batches of a call have one length: no exchange of shapes before each
        # pipeline message.
        "variable_seq_lengths": False,
        # Interleaved stages: with batched messages and pp 2, where the previous and the next rank
        # are the same, sends and receives pair up wrongly; nothing fails and the
        # results are garbage.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # would wait for the whole device after each message: a workaround for old torch
        "batch_p2p_sync": False,
        # A stage's output is freed once it is sent. Without overlap megatron has waited for the
        # send by then. With overlap it has not: gloo would send what came to stand there since,
        # silently; and with NCCL only the allocator's notes about streams, which torch may leave
        # out, would keep the memory from being used again.
        "deallocate_pipeline_outputs": not is_interleaved,
    }


def _make_recompute_settings(megatron: MegatronConfig) -> dict[str, Any]:
    """Return the config's arguments for recomputation; {} for none."""
    if megatron.recompute_granularity in (None, "none"):
        return {}
    if megatron.recompute_granularity == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(megatron.recompute_modules),
        }
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
        # Would split a checkpointed input over tp and gather it again; megatron refuses it with
        # sequence parallelism.
        "distribute_saved_activations": False,
    }


def resolve_gradient_fusion(
    setting: bool | None, impl: LayerImpl, dtype: torch.dtype, device: torch.device
) -> KernelChoice:
    """Return who adds weight gradients to the float32 buffers here, by `choose_gradient_fusion`."""
    name = str(dtype).removeprefix("torch.")
    kind: DeviceType = "cuda" if device.type == "cuda" else "cpu"
    return choose_gradient_fusion(
        setting, kind, impl, name, has_gradient_extension(), has_float32_accumulating_product()
    )


def _make_fusion_settings(
    megatron: MegatronConfig,
    impl: LayerImpl,
    dtype: torch.dtype,
    device: torch.device,
    has_grouped_biases: bool,
) -> dict[str, Any]:
    """Return the config's arguments for fused kernels. `has_grouped_biases` says that grouped
    experts have biases, which megatron-core does not support with fused dropout.
    """
    activation = choose_compiled_activation(
        "cuda" if device.type == "cuda" else "cpu", explain_missing_compiler()
    )
    return {
        "gradient_accumulation_fusion": (
            resolve_gradient_fusion(megatron.gradient_accumulation_fusion, impl, dtype, device).name
            != "off"
        ),
        "bias_activation_fusion": activation.name == "compiled",
        "bias_dropout_fusion": activation.name == "compiled" and not has_grouped_biases,
        # Ours takes the place of what these are for: attention, positions, norms.
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def _make_forced_settings() -> dict[str, Any]:
    """Return the config's arguments that this project depends on and no setting changes."""
    return {
        # Weights are loaded afterwards: nothing is spent on initial values. The initialisation
        # itself must stay on, since it marks what tp shards; unmarked shards are left out of the
        # gradient norm on all ranks but tp 0.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _leave_weight_unchanged,
        "output_layer_init_method": _leave_weight_unchanged,
        "embedding_init_method": _leave_weight_unchanged,
        # With True, gradients over dp are summed, not averaged, and the loss is not divided by the
        # number of micro-batches; the division by tokens that it implies is taken out
        # by finalize_gradients_without_division.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_gradients_without_division,
        # The policy that is trained must be the one that was sampled from.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _leave_weight_unchanged(weight: Tensor) -> Tensor:
    """Return the weight as it is, in place of an initialisation."""
    return weight


def _check_expert_settings(
    arguments: dict[str, Any], layout: ParallelLayout, megatron: MegatronConfig
) -> None:
    """Raise ValueError where the rules on expert settings find problems with the layout that the
    world really has.
    """
    num_experts = arguments.get("num_moe_experts", 0)
    width = arguments.get("moe_ffn_hidden_size", 0)
    settings = replace(
        megatron,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp if num_experts or layout.etp != layout.tp else None,
    )
    found = (
        find_expert_layout_problems(num_experts, width, layout.stage_size, settings)
        if num_experts
        else find_ignored_expert_settings(settings)
    )
    if num_experts and arguments["add_bias_linear"]:
        found = chain(found, find_expert_bias_problems(settings))
    if num_experts:
        found = chain(
            found,
            find_shared_expert_problems(
                settings, "moe_shared_expert_intermediate_size" in arguments
            ),
        )
    if problems := [text for text, _ in found]:
        raise ValueError(" ".join(problems))


def _check_required_packages(
    megatron: MegatronConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError for configured kernels that are not installed or do not run on the device,
    and for a type that they do not accept.
    """
    of_flex = (
        "moe_token_dispatcher_type (flex)",
        "DeepEP",
        explain_missing_deep_ep,
        INSTALL[DEEP_EP],
        "use alltoall",
    )
    of_permutation = (
        "moe_permute_fusion (true)",
        "Transformer Engine 2.1 or newer",
        explain_missing_fused_permutation,
        INSTALL[TRANSFORMER_ENGINE],
        "set it to false",
    )
    is_flex = megatron.moe_token_dispatcher_type == "flex"
    asked = [of_flex] * is_flex + [of_permutation] * megatron.moe_permute_fusion
    for key, package, why_not, install, other in asked:
        if device.type != "cuda":
            raise ValueError(
                f"{key} needs {package}, which runs on CUDA only, and the device is"
                f" {device}; {other}."
            )
        if problem := why_not():
            raise ValueError(
                f"{key} needs {package}, which cannot be used ({problem}); {install}, or {other}."
            )
    if is_flex and dtype != torch.bfloat16:
        raise ValueError(
            f"moe_token_dispatcher_type (flex) sends bfloat16 only, and the model is {dtype};"
            " use alltoall."
        )


def _check_grouped_gemm_alignment(
    arguments: dict[str, Any], layout: ParallelLayout, dtype: torch.dtype
) -> None:
    """Raise ValueError where a row of an expert's matrices is not a multiple of ALIGNMENT bytes."""
    for name, columns in (
        ("hidden_size", arguments["hidden_size"]),
        ("moe_ffn_hidden_size / etp", arguments["moe_ffn_hidden_size"] // layout.etp),
    ):
        if columns * dtype.itemsize % ALIGNMENT:
            raise ValueError(
                f"moe_grouped_gemm needs rows of a multiple of {ALIGNMENT} bytes, and {name}"
                f" ({columns}) has {columns * dtype.itemsize} in {dtype}; set it to false."
            )


def _check_layout_divides_model(arguments: dict[str, Any], layout: ParallelLayout) -> None:
    """Raise ValueError where the layout does not divide the model's layers, heads or widths."""
    problems = []
    is_uneven = bool(
        layout.num_first_stage_layers or layout.num_last_stage_layers or layout.layers_of_chunks
    )
    if is_uneven:
        layout.split_layers_into_chunks(arguments["num_layers"])
    for key, axis, parts in (
        *((("num_layers", "pipeline_model_parallel_size", layout.pp),) if not is_uneven else ()),
        ("num_attention_heads", "tensor_model_parallel_size", layout.tp),
        ("num_query_groups", "tensor_model_parallel_size", layout.tp),
        ("ffn_hidden_size", "tensor_model_parallel_size", layout.tp),
    ):
        if arguments[key] % parts:
            problems.append(f"{key} ({arguments[key]}) must be a multiple of {axis} ({parts})")
        elif key == "num_layers" and arguments[key] % (parts * layout.vpp):
            problems.append(
                f"num_layers ({arguments[key]}) must be a multiple of {axis} x"
                f" virtual_pipeline_model_parallel_size ({parts} x {layout.vpp})"
            )
    if problems:
        raise ValueError("; ".join(problems) + ". Use smaller parallel sizes.")


def _check_recompute_settings(
    num_layers: int,
    layout: ParallelLayout,
    megatron: MegatronConfig,
    impl: LayerImpl,
    has_mlp_bias: bool,
) -> None:
    """Raise ValueError for recompute settings that megatron would ignore or run wrongly: megatron
    runs past the end of a chunk where uniform groups do not divide it, and ignores the layers that
    block has left over.
    """
    if megatron.recompute_granularity == "selective":
        if impl == "transformer_engine" and "layernorm" in megatron.recompute_modules:
            raise ValueError(
                f"recompute_modules ({', '.join(megatron.recompute_modules)}) must not have"
                " layernorm with transformer_impl transformer_engine, whose norms are part of the"
                " linear layers: megatron-core would ignore it. Leave it out, or use"
                " transformer_impl local."
            )
        if has_mlp_bias and "mlp" in megatron.recompute_modules:
            # MLP returns its bias: checkpoint takes that parameter for a result of its own and
            # recomputes it for ever.
            raise ValueError(
                f"recompute_modules ({', '.join(megatron.recompute_modules)}) must not have mlp"
                " for an MLP with biases: megatron-core's backward pass would not end. Leave it"
                " out, or use full recompute."
            )
        return
    if megatron.recompute_granularity in (None, "none"):
        return
    chunks = layout.split_layers_into_chunks(num_layers)
    in_chunk = math.gcd(*chunks)
    group = megatron.recompute_num_layers
    if not megatron.recompute_method or not group:
        raise ValueError(
            f"full recompute needs recompute_method ({megatron.recompute_method}) and"
            f" recompute_num_layers ({group}); use uniform and 1."
        )
    if megatron.recompute_method == "uniform" and in_chunk % group:
        raise ValueError(
            f"recompute_num_layers ({group}) must divide the layers of a model chunk ({in_chunk} ="
            f" {num_layers} / {layout.pp} stages / {layout.vpp} chunks) under recompute_method"
            " uniform; use 1."
        )
    in_chunk = min(chunks)
    if megatron.recompute_method == "block" and group > in_chunk:
        raise ValueError(
            f"recompute_num_layers ({group}) must be at most the layers of a model chunk"
            f" ({in_chunk} = {num_layers} / {layout.pp} stages / {layout.vpp} chunks) under"
            f" recompute_method block; use {in_chunk}."
        )
