"""SAPO: a smooth gate in place of PPO's clip.

"Soft Adaptive Policy Optimization" (arXiv 2511.20347, equations 5 to 7). With the importance ratio
r, its logarithm held in +-20, and the temperature tau = tau_pos where A > 0, else tau_neg:

    loss = -A sigmoid(tau (r - 1)) 4 / tau

At r = 1 the gradient is that of -A r, and it fades to both sides, the faster the larger tau: with
tau_neg > tau_pos tokens of negative advantage are held tighter. The loss is of single tokens; the
paper averages them by seq-mean-token-mean, which is not forced here: a run whose settings leave
`actor.loss_agg_mode` at its default is refused.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    compute_clamped_log_ratio,
    make_ppo_kl_metric,
)
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)
from rlhf_megatron.lazy import torch


@dataclass(frozen=True)
class SAPOParams:
    tau_pos: float = 1.0  # temperature of tokens with positive advantage
    tau_neg: float = 1.05  # and of the others

    def __post_init__(self) -> None:
        """Raise ValueError for a temperature that is not positive."""
        for name, value in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            if not value > 0:
                raise ValueError(
                    f"{name} ({value}) must be positive; 1.0 (tau_pos) and 1.05"
                    " (tau_neg) are usual."
                )


@POLICY_LOSSES.register(
    "sapo", SAPOParams, needs=("advantages", "old_log_probs"), aggregation="seq-mean-token-mean"
)
def sapo(inputs: PolicyLossInputs, params: SAPOParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metrics actor/ppo_kl and actor/sapo_gate (share of the
    gradient that the gate lets through).
    """
    advantages_T = inputs.advantages_T
    tau_T = torch.full_like(advantages_T, params.tau_neg).masked_fill_(
        advantages_T > 0, params.tau_pos
    )
    gate_T = torch.sigmoid(tau_T * (compute_clamped_log_ratio(inputs).exp() - 1))
    share_T = (4 * gate_T * (1 - gate_T)).detach()
    return PolicyLossOutputs(
        -advantages_T * gate_T * 4 / tau_T,
        {**make_ppo_kl_metric(inputs), "actor/sapo_gate": share_T},
    )
