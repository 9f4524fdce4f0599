"""CISPO: the policy gradient with a clipped importance weight. No token loses its gradient.

"MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (arXiv 2506.13585,
equations 4 and 5). With the importance ratio r, its logarithm held in +-20, and sg the value
without gradient:

    loss = -sg(clip(r, 1 - low, 1 + high)) A log_probs

The paper sets no lower bound, and so does the default low of 1; its upper bound is tuned, and not
told. The default lets weights up to 5 through, as "The Art of Scaling Reinforcement Learning
Compute for LLMs" (arXiv 2510.13786).
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    check_clip_range,
    compute_clamped_log_ratio,
    make_ppo_kl_metric,
)
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)


@dataclass(frozen=True)
class CISPOParams:
    # the weight is clipped to 1 - clip_ratio_low from below; 1: no bound
    clip_ratio_low: float = 1.0
    clip_ratio_high: float = 4.0  # and to 1 + clip_ratio_high from above

    def __post_init__(self) -> None:
        """Raise ValueError for bounds that are no range around 1."""
        check_clip_range(self.clip_ratio_low, self.clip_ratio_high, "1, 4")


@POLICY_LOSSES.register("cispo", CISPOParams, needs=("advantages", "old_log_probs"))
def cispo(inputs: PolicyLossInputs, params: CISPOParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metrics actor/ppo_kl and actor/pg_clipfrac (1 where the
    weight was clipped).
    """
    ratio_T = compute_clamped_log_ratio(inputs).detach().exp()
    weight_T = ratio_T.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_high)
    metrics = {
        **make_ppo_kl_metric(inputs),
        "actor/pg_clipfrac": (weight_T != ratio_T).to(ratio_T.dtype),
    }
    return PolicyLossOutputs(-weight_T * inputs.advantages_T * inputs.log_probs_T, metrics)
