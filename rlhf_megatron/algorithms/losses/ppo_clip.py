"""PPO's clipped objective with an asymmetric range and a dual clip.

"Proximal Policy Optimization Algorithms" (arXiv 1707.06347, equation 7); separate lower and upper ranges from DAPO
(arXiv 2503.14476); the dual clip bounds the loss of a token with negative advantage whose ratio ran away (arXiv
1912.09729, equation 5). With the importance ratio r = exp(log_probs - old_log_probs), the exponent clamped to +-20:

    loss = max(-A r, -A clip(r, 1 - low, 1 + high));    for A < 0 at most -A c
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_megatron.algorithms.losses.base import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.kl import MAX_LOG_RATIO


@dataclass(frozen=True)
class PPOClipParams:
    clip_ratio_low: float = 0.2  # the ratio is clipped to 1 - clip_ratio_low from below
    clip_ratio_high: float = 0.2  # and to 1 + clip_ratio_high from above
    clip_ratio_c: float = 3.0  # dual clip: bound on the ratio where the advantage is negative

    def __post_init__(self) -> None:
        if not 0 < self.clip_ratio_low <= 1:
            raise ValueError(f"clip_ratio_low ({self.clip_ratio_low}) must be in (0, 1]; 0.2 is usual.")
        if self.clip_ratio_high <= 0:
            raise ValueError(f"clip_ratio_high ({self.clip_ratio_high}) must be positive; 0.2 to 0.28 is usual.")
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c ({self.clip_ratio_c}) must be above 1; 3 is usual.")


@POLICY_LOSSES.register("ppo_clip", PPOClipParams, needs=("advantages", "old_log_probs"))
def ppo_clip(inputs: PolicyLossInputs, params: PPOClipParams) -> PolicyLossOutputs:
    """Per-token loss; metrics actor/ppo_kl, actor/pg_clipfrac, actor/pg_clipfrac_lower (0 or 1 a token)."""
    advantages_T = inputs.advantages_T
    log_ratio_T = (inputs.log_probs_T - inputs.old_log_probs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    free_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_high)
    worse_T = torch.maximum(free_T, clipped_T)
    bound_T = -advantages_T * params.clip_ratio_c
    is_negative_T = advantages_T < 0
    token_loss_T = torch.where(is_negative_T, torch.minimum(worse_T, bound_T), worse_T)
    with torch.no_grad():
        metrics = {
            "actor/ppo_kl": -log_ratio_T,
            "actor/pg_clipfrac": (clipped_T > free_T).to(ratio_T.dtype),
            "actor/pg_clipfrac_lower": (is_negative_T & (worse_T > bound_T)).to(ratio_T.dtype),
        }
    return PolicyLossOutputs(token_loss_T, metrics)
