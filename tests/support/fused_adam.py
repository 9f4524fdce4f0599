"""A stand-in for the FusedAdam of Transformer Engine and Apex, which run on CUDA only. It keeps to
their interface:
moments by parameter, no step count there but one in each parameter group, made at the first
step; float32 only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and bias_correction and not capturable
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:  # as there: such a group counts no steps
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            assert type(group["step"]) is int
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
                assert set(state) == {"exp_avg", "exp_avg_sq"}, "it knows no other state"
                _update(parameter, group, state["exp_avg"], state["exp_avg_sq"])


def _update(parameter: Tensor, group: dict[str, Any], mean: Tensor, square: Tensor) -> None:
    """Kingma and Ba's rule with Loshchilov and Hutter's decay, as the multi-tensor
    kernel writes it.
    """
    grad = parameter.grad
    assert (
        grad is not None
        and parameter.dtype == grad.dtype == mean.dtype == square.dtype == torch.float32
    )
    first, second = group["betas"]
    mean.mul_(first).add_(grad, alpha=1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    corrected = mean / (1 - first ** group["step"])
    scale = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
    parameter.sub_((corrected / scale + group["weight_decay"] * parameter), alpha=group["lr"])
