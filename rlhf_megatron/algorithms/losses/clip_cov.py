"""Clip-Cov: PPO's clip, and a few tokens of large covariance without gradient, against a collapse
of the entropy.

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617,
equations 10 and 11). With the importance ratio r, its logarithm held in +-20:

    loss = max(-A r, -A clip(r, 1 - low, 1 + high))    no dual clip, as in the authors' code
           0                                           of a picked token

The loss picks clip_cov_ratio of the mini-batch's tokens (at least one), drawn from the tokens whose
covariance lies between lb and ub (see `token_covariance`: of the old policy, over the whole
mini-batch). The authors draw from tokens that the ratio clip has not taken already, which only the
forward pass could tell; in the first optimizer step after a rollout there are none. The draw is
seeded by (seed, step, mini-batch, sample), so that it does not depend on order or layout.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    check_clip_range,
    compute_clamped_log_ratio,
    compute_clipped_loss,
    make_ppo_kl_metric,
)
from rlhf_megatron.algorithms.losses.policy_loss import (
    PICKS,
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
    TokenPickInputs,
)
from rlhf_megatron.algorithms.losses.token_covariance import (
    check_token_share,
    compute_token_covariances,
    count_picked_tokens,
    make_index_mask,
)
from rlhf_megatron.lazy import Tensor


@dataclass(frozen=True)
class ClipCovParams:
    clip_ratio_low: float = 0.2  # the ratio is clipped to 1 - clip_ratio_low from below
    clip_ratio_high: float = 0.2  # and to 1 + clip_ratio_high from above
    clip_cov_ratio: float = 2e-4  # share of the mini-batch's tokens that are picked
    clip_cov_lb: float = 1.0  # picked tokens have a covariance above this
    clip_cov_ub: float = 5.0  # and below this

    def __post_init__(self) -> None:
        """Raise ValueError for bounds or a share out of range."""
        check_clip_range(self.clip_ratio_low, self.clip_ratio_high, "0.2, 0.2")
        check_token_share("clip_cov_ratio", self.clip_cov_ratio)
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb ({self.clip_cov_lb}) must be below clip_cov_ub ({self.clip_cov_ub});"
                " 1 and 5 are usual."
            )


@PICKS.register("clip_cov")
def pick_clip_cov_tokens(inputs: TokenPickInputs, params: ClipCovParams) -> Tensor:
    """Return which tokens lose their gradient, [T] bool: a share of the tokens that train, drawn
    from the tokens with a covariance between the bounds.
    """
    index_N, covariances_N = compute_token_covariances(inputs)
    is_candidate_N = (covariances_N > params.clip_cov_lb) & (covariances_N < params.clip_cov_ub)
    candidates = index_N[is_candidate_N]
    drawn = inputs.noise_T[candidates].argsort(stable=True)[
        : count_picked_tokens(params.clip_cov_ratio, index_N.numel())
    ]
    return make_index_mask(candidates[drawn], inputs.trains_T)


@POLICY_LOSSES.register(
    "clip_cov", ClipCovParams, needs=("advantages", "old_log_probs", "is_picked")
)
def clip_cov(inputs: PolicyLossInputs, params: ClipCovParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metrics actor/ppo_kl, actor/pg_clipfrac (of the ratio
    clip) and actor/pg_picked (1: picked).
    """
    assert inputs.is_picked_T is not None, "clip_cov needs is_picked"
    token_loss_T, is_clipped_T = compute_clipped_loss(
        inputs.advantages_T,
        compute_clamped_log_ratio(inputs).exp(),
        params.clip_ratio_low,
        params.clip_ratio_high,
    )
    metrics = {
        **make_ppo_kl_metric(inputs),
        "actor/pg_clipfrac": is_clipped_T.to(token_loss_T.dtype),
        "actor/pg_picked": inputs.is_picked_T.to(token_loss_T.dtype),
    }
    return PolicyLossOutputs(token_loss_T.masked_fill(inputs.is_picked_T, 0.0), metrics)
