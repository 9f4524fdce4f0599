"""TransformerConfig of a model in a world: the family's arguments and the settings that this project depends on."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlhf_megatron.parallel.world import World

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


def make_transformer_config(arguments: dict[str, Any], world: World, dtype: torch.dtype) -> TransformerConfig:
    """`arguments`: a family's `transformer_arguments`. Raises ValueError when layers or heads do not divide."""
    _check_divisible(arguments, world)
    plain = dict(arguments)
    plain["activation_func"] = ACTIVATIONS[plain["activation_func"]]
    return TransformerConfig(**plain, **_layout_settings(world, dtype), **_forced_settings(world))


def finalize_without_division(
    model: list[Any], num_tokens: Any = None, pg_collection: Any = None, **options: Any
) -> None:
    """megatron's gradient reductions after the last micro-batch, without its division by a count of tokens.

    The loss arrives divided by the global denominator; megatron's count is an integer and 1 at least.
    """
    finalize_model_grads(model, None, pg_collection=pg_collection, **options)


def _layout_settings(world: World, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": world.layout.tp,
        "pipeline_model_parallel_size": world.layout.pp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def _forced_settings(world: World) -> dict[str, Any]:
    is_cpu = world.device.type == "cpu"
    return {
        # Weights are loaded afterwards: nothing is spent on initial values. The initialisation itself must stay on,
        # since it marks what tp shards; unmarked shards are left out of the gradient norm on all ranks but tp 0.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _leave_as_is,
        "output_layer_init_method": _leave_as_is,
        "embedding_init_method": _leave_as_is,
        # Need Apex or Transformer Engine.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        # Compiled by torch on CUDA; uncompiled on the CPU, where the plain form is as fast.
        "bias_activation_fusion": not is_cpu,
        "bias_dropout_fusion": not is_cpu,
        # With True, gradients over dp are summed, not averaged, and the loss is not divided by the number of
        # micro-batches; the division by tokens that it implies is taken out by finalize_without_division.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_without_division,
        # All micro-batches of a call have one length: no exchange of shapes before each pipeline message.
        "variable_seq_lengths": False,
        # A stage's output is freed once it is sent; safe as long as sends are not overlapped.
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": False,
        # The policy that is trained must be the one that was sampled from.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


def _check_divisible(arguments: dict[str, Any], world: World) -> None:
    problems = []
    for key, axis, parts in (
        ("num_layers", "pipeline_model_parallel_size", world.layout.pp),
        ("num_attention_heads", "tensor_model_parallel_size", world.layout.tp),
        ("num_query_groups", "tensor_model_parallel_size", world.layout.tp),
        ("ffn_hidden_size", "tensor_model_parallel_size", world.layout.tp),
    ):
        if arguments[key] % parts:
            problems.append(f"{key} ({arguments[key]}) must be a multiple of {axis} ({parts})")
    if problems:
        raise ValueError("; ".join(problems) + ". Use smaller parallel sizes.")
