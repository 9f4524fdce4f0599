"""The policy loss of a micro-batch's rows with its gradient and metrics in one pass. See `row_loss`.

Specified by `algorithms.losses.compose.total_token_loss` and sums with the weights of the columns.
"""

# R rows

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses.base import ExplicitLoss, ExplicitOutputs, PolicyLossInputs
from rlhf_megatron.algorithms.losses.compose import RegularizerParams, explicit_token_loss
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams, ppo_clip_explicit
from rlhf_megatron.algorithms.losses.scratch import Scratch
from rlhf_megatron.kernels.row_loss import Block, KnownGradient, RowSums, sum_rows, with_gradients
from rlhf_megatron.kernels.triton_support import try_triton

logger = logging.getLogger(__name__)

MAX_ERROR = 1e-4  # of losses and gradients of about 1

TritonLoss = Callable[[PolicyLossInputs, Any, RegularizerParams, Tensor, Tensor], RowSums]


@dataclass(frozen=True)
class FusedPolicyLoss:
    """A policy loss with its parameters and regularizers. `use_triton`: on a GPU, where it has a kernel that runs."""

    loss: ExplicitLoss
    params: Any
    regularizers: RegularizerParams
    use_triton: bool = False

    def __call__(
        self, inputs: PolicyLossInputs, loss_weights_R: Tensor, metric_weights_R: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the sum of the rows' losses with `loss_weights_R`, with grad in log-probs and, under an entropy bonus, in
        entropies; the sum of each metric with `metric_weights_R`).

        Raises ValueError for log-probs that are neither float32 nor float64, and as `total_token_loss`.
        """
        dtype = inputs.log_probs_T.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log-probs are {dtype}: rounded, they differ from the old ones by more than an update changes them."
                " Compute them in float32."
            )
        columns = _columns(inputs, dtype)
        loss_weights_R, metric_weights_R = loss_weights_R.to(dtype), metric_weights_R.to(dtype)
        with torch.no_grad():
            sums = self._sums(columns, loss_weights_R, metric_weights_R)
        known = [KnownGradient(inputs.log_probs_T, sums.grad_R)]
        if inputs.entropies_T is not None and self.regularizers.entropy_coeff != 0:
            known.append(KnownGradient(inputs.entropies_T, loss_weights_R, -self.regularizers.entropy_coeff))
        return with_gradients(sums.value, *known), sums.metrics

    def _sums(self, columns: PolicyLossInputs, loss_weights_R: Tensor, metric_weights_R: Tensor) -> RowSums:
        is_float32 = loss_weights_R.dtype == torch.float32
        triton_loss = _triton_loss(self.loss, loss_weights_R.device) if self.use_triton and is_float32 else None
        if triton_loss is not None:
            return triton_loss(columns, self.params, self.regularizers, loss_weights_R, metric_weights_R)

        def token_loss(block: Block, scratch: Scratch) -> ExplicitOutputs:
            rows = PolicyLossInputs(*block)  # type: ignore[arg-type]
            return explicit_token_loss(self.loss, self.params, rows, self.regularizers, scratch)

        return sum_rows(token_loss, _in_order(columns), loss_weights_R, metric_weights_R)


def _in_order(inputs: PolicyLossInputs) -> list[Tensor | None]:
    return [getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__]


def _columns(inputs: PolicyLossInputs, dtype: torch.dtype) -> PolicyLossInputs:
    """`inputs` without grad, the columns in `dtype`."""
    columns = [
        column if column is None or column.dtype == torch.bool else column.detach().to(dtype)
        for column in _in_order(inputs)
    ]
    return PolicyLossInputs(*columns)  # type: ignore[arg-type]


def _triton_loss(loss: ExplicitLoss, device: torch.device) -> TritonLoss | None:
    """The kernel that computes what `loss` does, with the regularizers, where there is one and it runs on `device`."""
    if loss is not ppo_clip_explicit or device.type != "cuda" or not _has_triton(device):
        return None
    from rlhf_megatron.kernels.policy_loss_triton import ppo_clip_sums

    return ppo_clip_sums


@functools.cache
def _has_triton(device: torch.device) -> bool:
    why_not = try_triton(device) or _kernel_problem(device)
    if why_not:
        logger.warning("the policy loss runs in plain torch: %s", why_not)
    return not why_not


def _kernel_problem(device: torch.device) -> str:
    """What is wrong with the kernel on `device`; "" where it works. Waits for the device."""
    try:
        error = kernel_error(device)
    except Exception as problem:  # whatever a compiler or a driver raises: it is reported, not handled
        lines = f"{type(problem).__name__}: {problem}".splitlines()
        return f"its Triton kernel failed: {lines[0]}"
    return "" if error < MAX_ERROR else f"its Triton kernel is off by {error:g}."


def kernel_error(device: torch.device) -> float:
    """Largest difference between the Triton kernel and plain torch, on some rows inside and outside of the ranges."""
    from rlhf_megatron.kernels.policy_loss_triton import ppo_clip_sums

    count_R = torch.arange(67, dtype=torch.float32, device=device)
    log_probs_R = -1 - (0.7 * count_R).sin()
    inputs = PolicyLossInputs(
        log_probs_T=log_probs_R,
        old_log_probs_T=-1 + (1.1 * count_R).cos(),
        advantages_T=(1.3 * count_R).sin(),
        response_mask_T=count_R >= 0,
        entropies_T=1 + count_R.cos(),
        ref_log_probs_T=log_probs_R + 0.3 * (1.7 * count_R).cos(),
        correction_weights_T=1 + count_R.sin(),
    )
    regularizers = RegularizerParams(kl_loss_coef=0.1, entropy_coeff=0.1)
    weights_R = torch.full_like(count_R, 1 / 67)
    plain = FusedPolicyLoss(ppo_clip_explicit, PPOClipParams(), regularizers)
    expected = plain._sums(inputs, weights_R, weights_R)
    found = ppo_clip_sums(inputs, PPOClipParams(), regularizers, weights_R, weights_R)
    pairs = [(found.value, expected.value), (67 * found.grad_R, 67 * expected.grad_R)]
    pairs += [(metric, expected.metrics[name]) for name, metric in found.metrics.items()]
    return max(float((one - other).abs().max()) for one, other in pairs)
