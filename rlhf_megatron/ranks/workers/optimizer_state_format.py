"""Where an optimizer keeps its moments and float32 parameters between steps,
and in how many bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"


@dataclass(frozen=True)
class OptimizerStateFormat:
    """The place and the types in which an optimizer keeps its state; without arguments float32 on
    the device, as any Adam does.
    """

    is_on_host: bool = False
    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    # of parameters in bfloat16; int16: see `decode_float32_state`
    main_param: torch.dtype = torch.float32

    @staticmethod
    def from_megatron_config(megatron: MegatronConfig) -> OptimizerStateFormat:
        """Return the format that a Megatron configuration selects."""
        first, second = (
            getattr(torch, name) for name in (megatron.exp_avg_dtype, megatron.exp_avg_sq_dtype)
        )
        main = torch.int16 if megatron.use_precision_aware_optimizer else torch.float32
        return OptimizerStateFormat(megatron.optimizer_cpu_offload, first, second, main)

    @property
    def is_default(self) -> bool:
        """Return whether this is the plain format, float32 on the device, which any Adam keeps."""
        return self == OptimizerStateFormat()

    def get_state_dtypes(self) -> dict[str, torch.dtype]:
        """Return the type of each tensor in a parameter's state, by name: exp_avg, exp_avg_sq and
        fp32_param.
        """
        return {
            **dict(zip(MOMENTS, (self.exp_avg, self.exp_avg_sq), strict=True)),
            MAIN: self.main_param,
        }

    def count_bytes_per_parameter(self, param_dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes of one element of a parameter of type `param_dtype`: (main parameter,
        both moments). The main parameter takes 0 bytes where the parameter is float32 itself.
        """
        return self.main_param.itemsize * (
            param_dtype != torch.float32
        ), self.exp_avg.itemsize + self.exp_avg_sq.itemsize


def decode_float32_state(stored_state: Tensor, model_param: Tensor) -> Tensor:
    """Return the float32 numbers that `encode_float32_state` stored in `stored_state`, on the
    device of `model_param`; a float32 `stored_state` is returned as it is.

    An int16 state holds the difference between the bits of a float32 parameter and those of the
    bfloat16 parameter beside it.
    """
    if stored_state.dtype == torch.float32:
        return stored_state
    # torch converts what it copies to another device on the host
    here = stored_state.to(model_param.device, non_blocking=True)
    if stored_state.dtype != torch.int16:
        return here.float()
    return (
        here.to(torch.int32)
        .add_(model_param.view(torch.int16).to(torch.int32) << 16)
        .view(torch.float32)
    )


def encode_float32_state(stored_state: Tensor, float32_value: Tensor, model_param: Tensor) -> None:
    """Store float32 numbers in `stored_state`, in its type. As int16 the numbers come back exactly
    where `model_param` is `float32_value` rounded to bfloat16, except numbers halfway between two
    bfloat16 values, which may come back smaller by one unit of float32.
    """
    if stored_state.dtype == torch.int16:
        bits = float32_value.to(model_param.device).view(torch.int32) - (
            model_param.view(torch.int16).to(torch.int32) << 16
        )
        float32_value = bits.clamp_(-(1 << 15), (1 << 15) - 1)
    stored_state.copy_(float32_value.to(stored_state.dtype), non_blocking=True)
