"""The whole loss of a token: policy loss + kl_loss_coef * KL(policy || reference) -
entropy_coeff * entropy.

The policy loss is multiplied by the token's correction weight, where there is one.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_megatron.algorithms.losses.kl_estimators import KLType, compute_kl_with_gradient
from rlhf_megatron.algorithms.losses.policy_loss import (
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutputs,
    attach_gradient,
)


@dataclass(frozen=True)
class RegularizerParams:
    """Added to any policy loss. A term is computed where its column is present, added where its
    weight is not 0.
    """

    kl_loss_coef: float = 0.0
    kl_loss_type: KLType = "k3"
    entropy_coeff: float = 0.0


def compute_total_token_loss(
    policy_loss: PolicyLoss,
    loss_params: Any,
    inputs: PolicyLossInputs,
    regularizers: RegularizerParams,
) -> PolicyLossOutputs:
    """Return the loss of each token with all terms, with grad, and the metrics of each term before
    its coefficient.

    Raise ValueError when a coefficient is not 0 and its column is missing.
    """
    check_regularizer_columns(inputs, regularizers)
    total = add_regularizers(policy_loss(inputs, loss_params), inputs, regularizers)
    if total.grad_T is None:
        return total
    return PolicyLossOutputs(
        attach_gradient(total.token_loss_T, total.grad_T, inputs.log_probs_T), total.metrics
    )


def add_regularizers(
    policy_outputs: PolicyLossOutputs, inputs: PolicyLossInputs, regularizers: RegularizerParams
) -> PolicyLossOutputs:
    """Return the outputs of a policy loss multiplied by the correction weights, with KL and entropy
    terms added. Where the loss gives its gradient, `grad_T` includes the KL's; the gradient with
    respect to the entropies is -entropy_coeff. `grad_T` of `policy_outputs` is changed in place.

    The metrics gain actor/pg_loss, and with the reference's log-probs actor/kl_loss, with entropies
    actor/entropy_loss.
    """
    loss_T = policy_outputs.token_loss_T
    grad_T = policy_outputs.grad_T
    if inputs.correction_weights_T is not None:
        loss_T = loss_T * inputs.correction_weights_T
        grad_T = None if grad_T is None else grad_T.mul_(inputs.correction_weights_T)
    metrics = {**policy_outputs.metrics, "actor/pg_loss": loss_T.detach()}

    if inputs.ref_log_probs_T is not None:
        log_probs_T = inputs.log_probs_T
        coef = regularizers.kl_loss_coef
        kl_T, kl_grad_T = compute_kl_with_gradient(
            log_probs_T.detach(), inputs.ref_log_probs_T, regularizers.kl_loss_type
        )
        metrics["actor/kl_loss"] = kl_T
        if coef != 0:
            if grad_T is None:
                kl_T = attach_gradient(kl_T, kl_grad_T, log_probs_T)
            else:
                grad_T.add_(kl_grad_T, alpha=coef)
            loss_T = loss_T.add(kl_T, alpha=coef)
    if inputs.entropies_T is not None:
        metrics["actor/entropy_loss"] = inputs.entropies_T.detach()
        if regularizers.entropy_coeff != 0:
            loss_T = loss_T.sub(inputs.entropies_T, alpha=regularizers.entropy_coeff)
    return PolicyLossOutputs(loss_T, metrics, grad_T)


def check_regularizer_columns(inputs: PolicyLossInputs, regularizers: RegularizerParams) -> None:
    """Raise ValueError when a coefficient is not 0 and its column is missing."""
    if regularizers.kl_loss_coef != 0 and inputs.ref_log_probs_T is None:
        raise ValueError(
            f"kl_loss_coef ({regularizers.kl_loss_coef}) needs ref_log_probs; enable the"
            " reference role."
        )
    if regularizers.entropy_coeff != 0 and inputs.entropies_T is None:
        raise ValueError(
            f"entropy_coeff ({regularizers.entropy_coeff}) needs entropies; compute them"
            " with log_probs."
        )
