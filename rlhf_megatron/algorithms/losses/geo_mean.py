"""GMPO: the geometric mean of a sequence's clipped importance ratios.

"Geometric-Mean Policy Optimization" (arXiv 2507.20673, equation 4 and its pseudocode). With d_t =
log_probs_t - old_log_probs_t and the n response tokens of a sequence:

    kept_t = min(d_t, high)     where A > 0
             max(d_t, -low)     where A < 0
    loss   = -A exp((1 / n) sum_t kept_t)                            the mean held in +-20

of every token, where the ratio has the gradient ratio * d kept_t: none where the clip bites. Under
seq-mean-token-mean that is the paper's objective, value and gradient. Other implementations average
over the sequences of a micro-batch whatever the aggregation; here it is the aggregation's, and the
denominator global. The sign of A is that of each token.

The bounds are of the logarithm: 0.4 is the paper's range (e^-0.4, e^0.4), wider than PPO's.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    compute_sequence_ratio,
    make_ppo_kl_metric,
)
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)
from rlhf_megatron.lazy import torch


@dataclass(frozen=True)
class GeoMeanParams:
    clip_ratio_low: float = 0.4  # a log-ratio is clipped to -clip_ratio_low from below
    clip_ratio_high: float = 0.4  # and to clip_ratio_high from above

    def __post_init__(self) -> None:
        """Raise ValueError for a bound that is not positive."""
        for name, value in (
            ("clip_ratio_low", self.clip_ratio_low),
            ("clip_ratio_high", self.clip_ratio_high),
        ):
            if not value > 0:
                raise ValueError(
                    f"{name} ({value}) must be positive, a bound of the log-ratio; 0.4 is usual."
                )


@POLICY_LOSSES.register(
    "geo_mean",
    GeoMeanParams,
    needs=("advantages", "old_log_probs", "sequences"),
    aggregation="seq-mean-token-mean",
)
def geo_mean(inputs: PolicyLossInputs, params: GeoMeanParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metrics actor/ppo_kl and actor/pg_clipfrac (1 where the
    token's own log-ratio was clipped).
    """
    advantages_T = inputs.advantages_T
    log_ratio_T = inputs.log_probs_T - inputs.old_log_probs_T
    bounded_T = log_ratio_T.detach().clamp(-params.clip_ratio_low, params.clip_ratio_high)
    is_clipped_T = torch.where(advantages_T < 0, bounded_T > log_ratio_T, bounded_T < log_ratio_T)
    ratio_T = compute_sequence_ratio(inputs, torch.where(is_clipped_T, bounded_T, log_ratio_T))
    metrics = {**make_ppo_kl_metric(inputs), "actor/pg_clipfrac": is_clipped_T.to(ratio_T.dtype)}
    return PolicyLossOutputs(-advantages_T * ratio_T, metrics)
