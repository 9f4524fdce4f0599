"""Defects of megatron-core without Transformer Engine and Apex, mended on any device. `PATCHES` is
the whole list.

Each looks first whether the installed version still has the defect. What is wrong with the
optimizer's own checkpoints is not mended: ranks/workers/optimizer_state.py takes their place.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_megatron.mcore_patch import (
    MegatronPatch,
    apply_needed_patches,
    replace_symbol,
)
from rlhf_megatron.ranks.parallel.optional_packages import GRADIENT_EXTENSION


def _define_router_gemm() -> None:
    """Define the name te_general_gemm in megatron's MoE module, as None."""
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = None


def _lacks_router_gemm() -> bool:
    """Return whether megatron's MoE module leaves te_general_gemm undefined."""
    return not hasattr(
        importlib.import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm"
    )


def _recomputes_with_fp8_by_default() -> bool:
    """Return whether `CheckpointWithoutOutput` takes its default fp8=False for fp8 on."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    return bool(random.CheckpointWithoutOutput().fp8)


def _disable_fp8_in_recompute() -> None:
    """Make `CheckpointWithoutOutput` treat fp8=False as no fp8."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    init = random.CheckpointWithoutOutput.__init__

    def __init__(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, fp8 or None, *args, **kwargs)

    random.CheckpointWithoutOutput.__init__ = __init__


def _lacks_gradient_extension() -> bool:
    """Return whether megatron's layers found no extension for fused weight gradients."""
    return not importlib.import_module(
        "megatron.core.tensor_parallel.layers"
    )._grad_accum_fusion_available


def _accumulate_gradients_with_torch() -> None:
    """Put the torch functions of `weight_grad` in the place of Apex's extension in megatron's
    layers.
    """
    # imports torch, which those that only read the list do without
    from rlhf_megatron.ranks.parallel import weight_grad

    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    setattr(layers, GRADIENT_EXTENSION, weight_grad)
    layers._grad_accum_fusion_available = True


def _computes_gradient_norm_in_loop() -> bool:
    """Return whether gradient clipping uses megatron's local norm function, which loops over the
    tensors.
    """
    utils: Any = importlib.import_module("megatron.core.utils")
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    return clip.l2_norm_impl is utils.local_multi_tensor_l2_norm


def _replace_gradient_norm() -> None:
    """Make gradient clipping compute its norm without waiting for the device at each tensor."""
    import torch

    def compute_l2_norm(
        chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool
    ) -> tuple[Any, None]:
        """Return (the L2 norm of all tensors together, [1] float32, None); the other arguments have
        no effect.
        """
        norms = torch.stack([torch.norm(tensor) for tensors in tensor_lists for tensor in tensors])
        return torch.norm(norms).float().reshape(1), None

    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    clip.l2_norm_impl = compute_l2_norm


def _has_mocked_transformer_engine() -> bool:
    """Return whether latent attention believes in a Transformer Engine that is only a mock."""
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    return bool(attention.HAVE_TE) and not isinstance(attention.TELinear, type)


def _disable_transformer_engine_in_latent_attention() -> None:
    """Set HAVE_TE of megatron's latent attention to False."""
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    attention.HAVE_TE = False


def _replicate_down_projections() -> None:
    """Make latent attention use `ReplicatedLinear` for its down projections."""
    from rlhf_megatron.ranks.parallel.replicated_linear import ReplicatedLinear  # imports torch

    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    replace_symbol(attention, "Linear", ReplicatedLinear)


def _rotate_latent_attention_by_tables() -> None:
    """Make latent attention rotate queries and keys by tables of cosines and sines, one row a
    token.
    """
    import torch

    def rotate_by_tables(x: Any, tables: Any, mscale: float = 1.0, **unused: Any) -> Any:
        """Return x [T, heads, d] rotated, with the halves of the pairs side by side instead of
        interleaved as in x. `tables` [T, 2, 1, d] holds cosines and sines; the other arguments have
        no effect.
        """
        cos, sin = tables.to(x.dtype).unbind(1)
        first = x[..., 0::2]
        second = x[..., 1::2]
        return torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin

    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    replace_symbol(attention, "apply_rotary_pos_emb", rotate_by_tables)


def _resolves_fused_query_norms() -> bool:
    """Return whether megatron's latent attention picks its own norm layers, unpatched."""
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    resolve = getattr(attention.MLASelfAttention, "_resolve_qk_norm_config", None)
    return resolve is not None and resolve.__name__ != _keep_norms_of_spec.__name__


def _keep_norms_of_spec() -> None:
    """Make latent attention take its projections and norms from the layer spec as they are."""
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    names = (
        "linear_q_proj",
        "linear_q_up_proj",
        "linear_kv_up_proj",
        "q_layernorm",
        "kv_layernorm",
    )

    def resolve_from_spec(self: Any, submodules: Any) -> dict[str, Any]:
        """Return the projections and norms of the layer spec by name."""
        return {name: getattr(submodules, name) for name in names}

    resolve_from_spec.__name__ = _keep_norms_of_spec.__name__
    attention.MLASelfAttention._resolve_qk_norm_config = resolve_from_spec


def _drop_probabilities_after_combine() -> None:
    """Make megatron's two token dispatchers release the routing probabilities after each forward
    pass.
    """
    module: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for dispatcher in (module.MoEAlltoAllTokenDispatcher, module.MoEAllGatherTokenDispatcher):
        dispatcher.combine_postprocess = _wrap_combine_postprocess(dispatcher.combine_postprocess)


def _wrap_combine_postprocess(combine: Any) -> Any:
    """Return `combine` followed by the removal of the dispatcher's stored probabilities."""

    def combine_and_drop_probabilities(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped `combine` and release the dispatcher's stored probabilities."""
        combined = combine(self, *args, **kwargs)
        self.probs = self.local_probs = None
        return combined

    return combine_and_drop_probabilities


def mark_expert_parameters(model: Any) -> None:
    """Mark the parameters of experts for the code that reduces, sums and counts gradients. Call it
    before DDP wraps `model`.

    `allreduce`: megatron-core 0.16 reduces experts over the replicas of the dense layers where ep
    is 1, though etp may differ from tp: the gradient would lack tokens, or sum gradients of
    different shards. `sequence_parallel`: the bias of a RowParallelLinear would be summed over tp,
    whose ranks have other experts. `tensor_model_parallel`: such a bias, and with Transformer
    Engine's layers every weight at etp 1 (NVIDIA/Megatron-LM#5916), would count in the gradient
    norm on tp rank 0 only. All three errors are silent: the forward pass is right.
    """
    for name, parameter in model.named_parameters():
        if is_expert_parameter(name):
            parameter.allreduce = False
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True


def unmark_replicated_parameters(model: Any) -> None:
    """Mark latent attention's down projections as not split, because each tensor-parallel rank has
    them whole: Transformer Engine marks every weight as split, and the gradient norm would count
    these once a rank. That error is silent, too.
    """
    for name, parameter in model.named_parameters():
        if ".linear_q_down_proj." in name or ".linear_kv_down_proj." in name:
            parameter.tensor_model_parallel = False


def is_expert_parameter(name: str) -> bool:
    """Return whether the parameter of this name belongs to a routed expert. Shared experts are
    dense layers.
    """
    return ".experts." in name


def _shrink_single_rank_groups() -> None:
    """Make megatron create NCCL groups of one rank with one channel, to save GPU memory."""
    import torch.distributed as dist

    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    make = parallel_state.create_group

    def create_small_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        **others: Any,
    ) -> Any:
        """Create a process group; an NCCL group of one rank without options gets one channel."""
        if (
            pg_options is None
            and len(ranks) == 1
            and "nccl" in (backend or dist.get_backend_config())
        ):
            pg_options = dist.ProcessGroupNCCL.Options()
            pg_options.config.max_ctas = 1
            if timeout is not None:
                pg_options._timeout = timeout
        return make(ranks, timeout, backend, pg_options, **others)

    parallel_state.create_group = create_small_group


PATCHES = (
    MegatronPatch(
        "transformer.moe.moe_utils.te_general_gemm",
        (
            "undefined without Transformer Engine: every forward pass of an MoE router ends"
            " in NameError"
        ),
        _define_router_gemm,
        "0.16.1",
        _lacks_router_gemm,
    ),
    MegatronPatch(
        "tensor_parallel.random.CheckpointWithoutOutput.__init__",
        (
            "`self.fp8 = fp8 is not None` with the default fp8=False: selective recompute asks for"
            " Transformer Engine"
        ),
        _disable_fp8_in_recompute,
        is_needed=_recomputes_with_fp8_by_default,
    ),
    MegatronPatch(
        "transformer.multi_latent_attention.HAVE_TE",
        (
            "True without Transformer Engine, whose TELinear is a mock then: building latent"
            " attention ends in TypeError"
        ),
        _disable_transformer_engine_in_latent_attention,
        "0.16.1",
        _has_mocked_transformer_engine,
    ),
    MegatronPatch(
        "transformer.multi_latent_attention.Linear",
        (
            "its layers take down projections of latent attention that tp splits, and then never"
            " add up over tp what the position part of the keys has of the gradient"
            " (NVIDIA/Megatron-LM#1699): silent, the forward pass is right. It knows whole ones"
            " under this name, which is None in 0.19"
        ),
        _replicate_down_projections,
    ),
    MegatronPatch(
        "transformer.multi_latent_attention.apply_rotary_pos_emb",
        (
            "cuts packed documents apart in a loop of Python in each layer, and waits for the"
            " device for their lengths; latent attention gets cosines and sines token by token"
        ),
        _rotate_latent_attention_by_tables,
    ),
    MegatronPatch(
        "transformer.multi_latent_attention.MLASelfAttention._resolve_qk_norm_config",
        "puts Transformer Engine's fused norm and projection in place where queries have no norm",
        _keep_norms_of_spec,
        "0.19.0 to 0.19.x",
        _resolves_fused_query_norms,
    ),
    MegatronPatch(
        (
            "transformer.moe.token_dispatcher.{MoEAlltoAll,"
            " MoEAllGather}TokenDispatcher.combine_postprocess"
        ),
        (
            "keep the probabilities of the last pass and with them, under full recompute, each"
            " layer's input and its gradient until the next: 2.1 GB of a rank of"
            " Qwen3-30B-A3B at tp2 ep8"
        ),
        _drop_probabilities_after_combine,
    ),
    MegatronPatch(
        "tensor_parallel.layers.{fused_weight_gradient_mlp_cuda, _grad_accum_fusion_available}",
        (
            "gradient-accumulation fusion asks for an extension of Apex, under Transformer Engine"
            " too; torch can do it"
        ),
        _accumulate_gradients_with_torch,
        is_needed=_lacks_gradient_extension,
    ),
    MegatronPatch(
        "optimizer.clip_grads.l2_norm_impl",
        (
            "without Transformer Engine and Apex the gradient norm waits for the device once"
            " a parameter"
        ),
        _replace_gradient_norm,
        is_needed=_computes_gradient_norm_in_loop,
    ),
    MegatronPatch(
        "parallel_state.create_group",
        (
            "a group of one rank takes 0.5 GB of a GPU as soon as one thing is summed in it (H100,"
            " NCCL 2.28); with one channel it is 8 MB"
        ),
        _shrink_single_rank_groups,
    ),
)

_state = {"is_applied": False}


def apply_megatron_fixes() -> None:
    """Import megatron-core and apply all needed patches, once in this process; later calls do
    nothing.
    """
    if not _state["is_applied"]:
        _state["is_applied"] = True
        apply_needed_patches(PATCHES)
