"""The whole loss of a token: policy loss + kl_loss_coef * KL(policy || reference) - entropy_coeff * entropy.

The policy loss is multiplied by the token's correction weight, where there is one.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_megatron.algorithms.losses.base import (
    ExplicitLoss,
    ExplicitOutputs,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutputs,
)
from rlhf_megatron.algorithms.losses.kl import KLType, kl_estimate, kl_explicit
from rlhf_megatron.algorithms.losses.scratch import Scratch
from rlhf_megatron.lazy import torch


@dataclass(frozen=True)
class RegularizerParams:
    """Added to any policy loss. A term is computed where its column is present, added where its weight is not 0."""

    kl_loss_coef: float = 0.0
    kl_loss_type: KLType = "k3"
    entropy_coeff: float = 0.0


def total_token_loss(
    policy_loss: PolicyLoss, loss_params: Any, inputs: PolicyLossInputs, regularizers: RegularizerParams
) -> PolicyLossOutputs:
    """Per-token loss with all terms, and the metrics of each before its coefficient.

    Adds actor/pg_loss, and with the reference's log-probs actor/kl_loss, with entropies actor/entropy_loss.
    Raises ValueError when a coefficient is not 0 and its column is missing.
    """
    _check_columns(inputs, regularizers)
    policy = policy_loss(inputs, loss_params)
    loss_T = policy.token_loss_T
    if inputs.correction_weights_T is not None:
        loss_T = loss_T * inputs.correction_weights_T
    metrics = {**policy.metrics, "actor/pg_loss": loss_T.detach()}

    if inputs.ref_log_probs_T is not None:
        kl_T = kl_estimate(inputs.log_probs_T, inputs.ref_log_probs_T, regularizers.kl_loss_type)
        metrics["actor/kl_loss"] = kl_T.detach()
        if regularizers.kl_loss_coef != 0:
            loss_T = loss_T + regularizers.kl_loss_coef * kl_T
    if inputs.entropies_T is not None:
        metrics["actor/entropy_loss"] = inputs.entropies_T.detach()
        if regularizers.entropy_coeff != 0:
            loss_T = loss_T - regularizers.entropy_coeff * inputs.entropies_T
    return PolicyLossOutputs(loss_T, metrics)


def explicit_token_loss(
    policy_loss: ExplicitLoss,
    loss_params: Any,
    inputs: PolicyLossInputs,
    regularizers: RegularizerParams,
    scratch: Scratch,
) -> ExplicitOutputs:
    """As `total_token_loss`. The gradient with respect to the entropies is -entropy_coeff, of every token."""
    _check_columns(inputs, regularizers)
    policy = policy_loss(inputs, loss_params, scratch)
    loss_T, grad_T = policy.token_loss_T, policy.grad_T
    if inputs.correction_weights_T is not None:
        loss_T.mul_(inputs.correction_weights_T)
        grad_T.mul_(inputs.correction_weights_T)
    metrics = {**policy.metrics, "actor/pg_loss": loss_T}

    if inputs.ref_log_probs_T is not None:
        kl_T, kl_grad_T = kl_explicit(inputs.log_probs_T, inputs.ref_log_probs_T, regularizers.kl_loss_type, scratch)
        metrics["actor/kl_loss"] = kl_T
        if regularizers.kl_loss_coef != 0:
            loss_T = torch.add(loss_T, kl_T, alpha=regularizers.kl_loss_coef, out=scratch.take())
            grad_T.add_(kl_grad_T, alpha=regularizers.kl_loss_coef)
    if inputs.entropies_T is not None:
        metrics["actor/entropy_loss"] = inputs.entropies_T
        if regularizers.entropy_coeff != 0:
            loss_T = torch.sub(loss_T, inputs.entropies_T, alpha=regularizers.entropy_coeff, out=scratch.take())
    return ExplicitOutputs(loss_T, grad_T, metrics)


def _check_columns(inputs: PolicyLossInputs, regularizers: RegularizerParams) -> None:
    """Raises ValueError when a coefficient is not 0 and its column is missing."""
    if regularizers.kl_loss_coef != 0 and inputs.ref_log_probs_T is None:
        raise ValueError(f"kl_loss_coef ({regularizers.kl_loss_coef}) needs ref_log_probs; enable the reference role.")
    if regularizers.entropy_coeff != 0 and inputs.entropies_T is None:
        raise ValueError(f"entropy_coeff ({regularizers.entropy_coeff}) needs entropies; compute them with log_probs.")
