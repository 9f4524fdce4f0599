"""A model has megatron-core's own layers, Transformer Engine's, or plain torch under the
latter's names.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from typing import Any, Literal

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rlhf_megatron.ranks.models.grouped_experts import (
    ColumnGroupedLinear,
    GroupedExperts,
    RowGroupedLinear,
)
from rlhf_megatron.ranks.models.packed_attention import PackedAttention
from rlhf_megatron.ranks.models.rms_norm_layer import RMSNorm, apply_rms_norm
from rlhf_megatron.ranks.parallel.optional_packages import (
    INSTALL,
    TRANSFORMER_ENGINE,
    find_transformer_engine,
    try_import_attribute,
)
from rlhf_megatron.ranks.parallel.replicated_linear import ReplicatedLinear
from rlhf_megatron.weights.weight_table import LayerImpl, LayerPart

logger = logging.getLogger(__name__)

_LOCAL_KEYS = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names in checkpoints with latent attention, where megatron's local layers do not have those
of fused ones.
"""


def has_transformer_engine() -> bool:
    """Return whether megatron-core found Transformer Engine when it was imported."""
    return bool(
        getattr(
            importlib.import_module("megatron.core.extensions.transformer_engine"), "HAVE_TE", False
        )
    )


def resolve_layer_impl(
    transformer_impl: Literal["auto", "local", "transformer_engine"],
    device: torch.device,
    has_experts: bool = False,
) -> LayerImpl:
    """Return the implementation of the layers, which also decides the names of the modules. "auto"
    becomes "local" (megatron-core's own layers) for a model with experts, on a CPU and without
    Transformer Engine, else "transformer_engine"; on a CPU "transformer_engine" means plain torch
    under its names. Raise ValueError where "transformer_engine" is set on a GPU without it.
    """
    if has_experts and transformer_impl == "auto":
        return "local"
    is_cuda = device.type == "cuda"
    is_missing = is_cuda and transformer_impl != "local" and not has_transformer_engine()
    why_not = explain_missing_transformer_engine() if is_missing else ""
    if transformer_impl == "auto":
        if is_missing and find_transformer_engine().is_present:
            logger.warning(
                "layers are megatron-core's own, since Transformer Engine cannot be imported: %s",
                why_not,
            )
        return "local" if is_missing or not is_cuda else "transformer_engine"
    if is_missing:
        raise ValueError(
            f"transformer_impl ({transformer_impl}) needs Transformer Engine, which cannot be"
            f" imported ({why_not}); {INSTALL[TRANSFORMER_ENGINE]}, or use transformer_impl local."
        )
    return transformer_impl


def explain_missing_transformer_engine() -> str:
    """Return that Transformer Engine is not installed, or the error of its import; empty when it
    can be imported.
    """
    return (
        find_transformer_engine().why_not
        or try_import_attribute("transformer_engine.pytorch", "Linear")[1]
    )


def make_layer_spec(
    impl: LayerImpl, config: Any, device: torch.device, unbiased_part: LayerPart | None = None
) -> tuple[Any, Any]:
    """Return (the spec of a dense layer, the class of the final norm). Attention is this project's
    own in all of them: it handles document borders, and positions except in latent attention.

    `unbiased_part` names the part of a layer whose linear layers have no bias whatever
    `add_bias_linear` says.
    """
    layer, final_norm = _make_layer_and_norm(impl, config, None, device)
    if unbiased_part is not None:
        linears = getattr(layer.submodules, unbiased_part).submodules
        for name in (
            ("linear_qkv", "linear_proj")
            if unbiased_part == "self_attention"
            else ("linear_fc1", "linear_fc2")
        ):
            setattr(linears, name, _make_class_without_bias(getattr(linears, name)))
    return layer, final_norm


def _make_layer_and_norm(
    impl: LayerImpl, config: Any, num_experts: int | None, device: torch.device
) -> tuple[Any, Any]:
    """Return (the layer spec, the class of the final norm) of the implementation on this device."""
    if impl == "local":
        return _make_local_layer(config, num_experts), RMSNorm
    if device.type == "cuda":
        return _make_transformer_engine_layer(config, num_experts)
    return _make_torch_layer_with_fused_names(config, num_experts), RMSNorm


def make_expert_layer_spec(
    impl: LayerImpl, config: Any, device: torch.device, has_grouped_experts: bool
) -> Any:
    """Return the spec of a layer with experts, which run one after the other or, with
    `has_grouped_experts`, in grouped products, and with this project's attention and norms. Raise
    ValueError for a Transformer Engine without grouped layers.
    """
    layer, _ = _make_layer_and_norm(impl, config, config.num_moe_experts, device)
    parts = _get_submodules(layer.submodules.mlp)
    if has_grouped_experts and impl == "transformer_engine":
        parts.experts = _make_grouped_experts_spec(device)
        return layer
    linears = _get_submodules(parts.experts)
    if linears.linear_fc2 is RowParallelLinear:
        linears.linear_fc2 = ExpertRowLinear
    if has_grouped_experts and isinstance(parts.experts, functools.partial):  # megatron-core 0.19
        parts.experts = functools.partial(
            GroupedExperts, *parts.experts.args, **parts.experts.keywords
        )
    elif has_grouped_experts:
        parts.experts.module = GroupedExperts
    return layer


def _get_submodules(spec: Any) -> Any:
    """Return the submodules of a part of a layer spec, which is a functools.partial in
    megatron-core 0.19.
    """
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _make_grouped_experts_spec(device: torch.device) -> Any:
    """Return the spec of megatron's TEGroupedMLP, with linear layers of Transformer Engine on CUDA,
    of torch elsewhere. Raise ValueError for a Transformer Engine without grouped layers.
    """
    linears: dict[str, Any] = {"linear_fc1": ColumnGroupedLinear, "linear_fc2": RowGroupedLinear}
    if device.type == "cuda":
        extension = importlib.import_module("megatron.core.extensions.transformer_engine")
        linears = {
            "linear_fc1": extension.TEColumnParallelGroupedLinear,
            "linear_fc2": extension.TERowParallelGroupedLinear,
        }
    if None in linears.values():
        raise ValueError(
            "moe_grouped_gemm (true) needs Transformer Engine 1.9 or newer with transformer_impl"
            " transformer_engine; upgrade it, or use transformer_impl local."
        )
    kind = getattr(experts, "GroupedMLPSubmodules", None)  # megatron-core 0.19
    if kind is not None:
        return functools.partial(experts.TEGroupedMLP, submodules=kind(**linears))
    return ModuleSpec(experts.TEGroupedMLP, submodules=MLPSubmodules(**linears))


@functools.cache
def _make_class_without_bias(linear_class: Any) -> Any:
    """Return a subclass of one of megatron's linear classes that ignores `bias` and has none."""

    class LinearWithoutBias(linear_class):
        def __init__(
            self, input_size: int, output_size: int, *, bias: bool, **options: Any
        ) -> None:
            super().__init__(input_size, output_size, bias=False, **options)

    return LinearWithoutBias


def _make_local_layer(config: Any, num_experts: int | None) -> Any:
    """Return the spec of megatron's own layer with this project's attention and norm, because
    megatron's wrapper of torch's norm refuses sequence parallelism.

    Both down projections of latent attention are whole on every tp rank.
    """
    is_latent = config.multi_latent_attention
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=is_latent,
            normalization="RMSNorm",
        )
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if is_latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = RMSNorm if config.q_lora_rank is not None else IdentityOp
        attention.kv_layernorm = RMSNorm
        return layer
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if num_experts:  # names in checkpoints: the norm behind attention is not part of a matrix here
        layer.submodules.sharded_state_dict_keys_map = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
        }
    return layer


def _make_torch_layer_with_fused_names(config: Any, num_experts: int | None) -> Any:
    """Return the spec of a plain torch layer whose parameters have the names of Transformer
    Engine's fused layers.
    """
    layer = _make_local_layer(config, num_experts)
    provider = TorchSpecProvider()
    fused = provider.column_parallel_layer_norm_linear()
    attention = layer.submodules.self_attention.submodules
    # For plain attention: gives the local layers these names in checkpoints.
    layer.submodules.sharded_state_dict_keys_map = (
        _LOCAL_KEYS if config.multi_latent_attention else {}
    )
    if config.multi_latent_attention:
        if config.q_lora_rank is not None:
            attention.linear_q_up_proj = fused
        attention.linear_kv_up_proj = fused
        attention.q_layernorm = attention.kv_layernorm = IdentityOp
    else:
        attention.linear_qkv = fused
        layer.submodules.input_layernorm = IdentityOp
    if not num_experts:
        layer.submodules.mlp = get_mlp_module_spec_for_backend(backend=provider)
        layer.submodules.pre_mlp_layernorm = IdentityOp
    return layer


def _make_transformer_engine_layer(config: Any, num_experts: int | None) -> tuple[Any, Any]:
    """Return (the spec of Transformer Engine's layer with this project's attention, the class of
    its norm).
    """
    is_latent = config.multi_latent_attention
    layer = copy.deepcopy(
        get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=is_latent,
        )
    )
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    if is_latent:
        layer.submodules.sharded_state_dict_keys_map = _LOCAL_KEYS
    return layer, importlib.import_module("megatron.core.extensions.transformer_engine").TENorm


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then megatron's column-parallel linear layer. State dict: `layer_norm_weight`,
    `weight`, `bias`.

    In megatron's sharded_state_dict, which knows of `weight` and `bias`, the norm's weight is whole
    on every tp rank.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype)
        )
        # see RMSNorm
        self.layer_norm_weight.sequence_parallel = (  # type: ignore[attr-defined]
            config.sequence_parallel
        )

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, output / tp], bias or None) for `input_` [s, b, h]; s is this rank's part
        under sequence parallelism.
        """
        normed = apply_rms_norm(input_, self.layer_norm_weight, self.eps)
        return super().forward(normed, weight, runtime_gather_output)


class ExpertRowLinear(RowParallelLinear):
    """The second matrix of an expert. megatron's MLP adds the bias in place to the output; autograd
    refuses this where a sum over one rank returned its input as the output: RuntimeError at tp 1
    and ep 1.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([tokens, h], bias or None) for `input_` [tokens, width / etp]."""
        output, bias = super().forward(input_)
        return output if bias is None else output.clone(), bias


class TorchSpecProvider(LocalSpecProvider):
    """The provider of plain torch classes for megatron's functions that make layer specs."""

    def fuse_layernorm_and_linear(self) -> bool:
        """Return True: norm and linear layer are one module."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the class of a norm fused with a column-parallel linear layer."""
        return LayerNormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """Return `RMSNorm`, whatever the arguments."""
        return RMSNorm

    def core_attention(self) -> type:
        """Return `PackedAttention`."""
        return PackedAttention
