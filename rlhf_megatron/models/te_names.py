"""Transformer Engine's module layout in plain torch: the norm stands in the linear layer behind it.

So weight table, checkpoints, sequence parallelism and export are proven for that layout on a machine without it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from rlhf_megatron.models.attention import PackedAttention
from rlhf_megatron.models.norm import RMSNorm, rms_norm


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then megatron's column-parallel linear layer. State dict: `layer_norm_weight`, `weight`, `bias`.

    In megatron's sharded_state_dict, which knows of `weight` and `bias`, the norm's weight is whole on every tp rank.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # see RMSNorm

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, output / tp]; s is this rank's part under sequence parallelism."""
        normed = rms_norm(input_, self.layer_norm_weight, self.eps)
        return super().forward(normed, weight, runtime_gather_output)


class TorchSpecProvider(LocalSpecProvider):
    """What megatron's functions that make layer specs ask for."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention
