"""Where an optimizer keeps its moments and float32 parameters between steps, and in how many bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"


@dataclass(frozen=True)
class Kept:
    """How an optimizer keeps its state; without arguments in float32 on the device, as any Adam does."""

    is_on_host: bool = False
    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    main: torch.dtype = torch.float32  # of parameters in bfloat16; int16: see `restored`

    @staticmethod
    def of(megatron: MegatronConfig) -> Kept:
        """Read a layout's settings."""
        first, second = (getattr(torch, name) for name in (megatron.exp_avg_dtype, megatron.exp_avg_sq_dtype))
        main = torch.int16 if megatron.use_precision_aware_optimizer else torch.float32
        return Kept(megatron.optimizer_cpu_offload, first, second, main)

    @property
    def is_plain(self) -> bool:
        """Whether torch's or another Adam keeps it as it is."""
        return self == Kept()

    def dtypes(self) -> dict[str, torch.dtype]:
        """Types by name in the state of a parameter."""
        return {**dict(zip(MOMENTS, (self.exp_avg, self.exp_avg_sq), strict=True)), MAIN: self.main}

    def num_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of a parameter of that type: (main parameter, both moments)."""
        return self.main.itemsize * (dtype != torch.float32), self.exp_avg.itemsize + self.exp_avg_sq.itemsize


def restored(kept: Tensor, model: Tensor) -> Tensor:
    """Return the float32 numbers that `store` put into `kept`, on the device of `model`; `kept` where it is float32.

    int16 is what a float32 parameter has beyond the bfloat16 one beside it: the difference of their bits.
    """
    if kept.dtype == torch.float32:
        return kept
    here = kept.to(model.device, non_blocking=True)  # torch converts what it copies to another device on the host
    if kept.dtype != torch.int16:
        return here.float()
    return here.to(torch.int32).add_(model.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def store(kept: Tensor, value: Tensor, model: Tensor) -> None:
    """Keep float32 numbers in the type of `kept`. Exact as int16, where `model` is `value` rounded to bfloat16, but for
    numbers in the middle of two: they may come back smaller by one unit of float32.
    """
    if kept.dtype == torch.int16:
        bits = value.to(model.device).view(torch.int32) - (model.view(torch.int16).to(torch.int32) << 16)
        value = bits.clamp_(-(1 << 15), (1 << 15) - 1)
    kept.copy_(value.to(kept.dtype), non_blocking=True)
