"""The whole loss of a token: policy loss + kl_loss_coef * KL(policy || reference) - entropy_coeff * entropy."""

# T tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_megatron.algorithms.losses.base import PolicyLoss, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.kl import KLType, kl_estimate


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
    policy = policy_loss(inputs, loss_params)
    loss_T = policy.token_loss_T
    metrics = {**policy.metrics, "actor/pg_loss": loss_T.detach()}

    if inputs.ref_log_probs_T is not None:
        kl_T = kl_estimate(inputs.log_probs_T, inputs.ref_log_probs_T, regularizers.kl_loss_type)
        metrics["actor/kl_loss"] = kl_T.detach()
        if regularizers.kl_loss_coef != 0:
            loss_T = loss_T + regularizers.kl_loss_coef * kl_T
    elif regularizers.kl_loss_coef != 0:
        raise ValueError(f"kl_loss_coef ({regularizers.kl_loss_coef}) needs ref_log_probs; enable the reference role.")

    if inputs.entropies_T is not None:
        metrics["actor/entropy_loss"] = inputs.entropies_T.detach()
        if regularizers.entropy_coeff != 0:
            loss_T = loss_T - regularizers.entropy_coeff * inputs.entropies_T
    elif regularizers.entropy_coeff != 0:
        raise ValueError(f"entropy_coeff ({regularizers.entropy_coeff}) needs entropies; compute them with log_probs.")

    return PolicyLossOutputs(loss_T, metrics)
