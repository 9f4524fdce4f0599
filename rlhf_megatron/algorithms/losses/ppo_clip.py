"""PPO's clipped objective with an asymmetric range and a dual clip.

"Proximal Policy Optimization Algorithms" (arXiv 1707.06347, equation 7); separate lower and upper
ranges from DAPO (arXiv 2503.14476, equation 10); the dual clip bounds the loss of a token with
negative advantage whose ratio ran away (arXiv 1912.09729, equation 5). With the importance ratio
r = exp(log_probs - old_log_probs), the exponent clamped to +-20:

    loss = max(-A r, -A clip(r, 1 - low, 1 + high));    for A < 0 at most -A c

A token whose loss is not replaced by a larger or smaller one has all of its gradient, on
the borders too.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
    mark_returns_gradient,
)
from rlhf_megatron.lazy import torch


@dataclass(frozen=True)
class PPOClipParams:
    clip_ratio_low: float = 0.2  # the ratio is clipped to 1 - clip_ratio_low from below
    clip_ratio_high: float = 0.2  # and to 1 + clip_ratio_high from above
    clip_ratio_c: float = 3.0  # dual clip: bound on the ratio where the advantage is negative

    def __post_init__(self) -> None:
        """Raise ValueError for a bound out of range."""
        if not 0 < self.clip_ratio_low <= 1:
            raise ValueError(
                f"clip_ratio_low ({self.clip_ratio_low}) must be in (0, 1]; 0.2 is usual."
            )
        if self.clip_ratio_high <= 0:
            raise ValueError(
                f"clip_ratio_high ({self.clip_ratio_high}) must be positive; 0.2 to 0.28 is usual."
            )
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c ({self.clip_ratio_c}) must be above 1; 3 is usual.")


@POLICY_LOSSES.register("ppo_clip", PPOClipParams, needs=("advantages", "old_log_probs"))
@mark_returns_gradient
def ppo_clip(inputs: PolicyLossInputs, params: PPOClipParams) -> PolicyLossOutputs:
    """Return the loss of each token and its gradient, with metrics actor/ppo_kl, actor/pg_clipfrac
    and actor/pg_clipfrac_lower (0 or 1 a token).

    Both clips together keep A r in [min(A c, 0), max(A (1 - low), A (1 + high))], for either sign
    of A; the gradient of A r is A r itself where they let it be.
    """
    advantages_T = inputs.advantages_T
    raw_T = inputs.log_probs_T.detach() - inputs.old_log_probs_T
    log_ratio_T = raw_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # 1.0 or 0.0: without a bool tensor each of these is several times faster
    is_inside_T = raw_T.eq_(log_ratio_T)
    free_T = log_ratio_T.exp().mul_(advantages_T)
    upper_T = advantages_T * (1 - params.clip_ratio_low)
    other_T = advantages_T * (1 + params.clip_ratio_high)
    torch.maximum(upper_T, other_T, out=upper_T)  # few temporaries: they share a cache
    lower_T = torch.mul(advantages_T, params.clip_ratio_c, out=other_T).clamp_(max=0)
    kept_T = free_T.clamp(lower_T, upper_T)
    grad_T = (
        torch.eq(kept_T, free_T, out=torch.empty_like(free_T)).mul_(free_T).mul_(is_inside_T).neg_()
    )
    metrics = {
        "actor/ppo_kl": log_ratio_T.neg_(),
        "actor/pg_clipfrac": torch.lt(kept_T, free_T, out=upper_T),
        "actor/pg_clipfrac_lower": torch.gt(kept_T, free_T, out=lower_T),
    }
    return PolicyLossOutputs(kept_T.neg_(), metrics, grad_T)
