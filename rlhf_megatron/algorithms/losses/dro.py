"""DRO: the policy gradient with a quadratic bound on how far a token's log-prob moves.

"Offline Regularised Reinforcement Learning for Large Language Models Alignment" (arXiv 2405.19107,
the gradient of its equation 8), token by token, with the baseline in the advantage:

    loss = -(A log_probs - beta / 2 (log_probs - old_log_probs)^2)

No ratio and no clip; the gradient -A + beta (log_probs - old_log_probs) pulls back towards the old
policy the harder the further a token is off. The advantage should be a soft one; any
estimator is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import make_ppo_kl_metric
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)


@dataclass(frozen=True)
class DROParams:
    dro_beta: float = 0.05  # weight of the quadratic term

    def __post_init__(self) -> None:
        """Raise ValueError for a weight that is not positive."""
        if not self.dro_beta > 0:
            raise ValueError(
                f"dro_beta ({self.dro_beta}) must be positive; use 0.05, or the loss reinforce to"
                " have no bound."
            )


@POLICY_LOSSES.register("dro", DROParams, needs=("advantages", "old_log_probs"))
def dro(inputs: PolicyLossInputs, params: DROParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metric actor/ppo_kl."""
    moved_T = inputs.log_probs_T - inputs.old_log_probs_T
    loss_T = 0.5 * params.dro_beta * moved_T.square() - inputs.advantages_T * inputs.log_probs_T
    return PolicyLossOutputs(loss_T, make_ppo_kl_metric(inputs))
