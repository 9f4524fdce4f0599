"""KL-Cov: no clip, but tokens of the largest covariance are held to the old policy, against a
collapse of the entropy.

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617,
equations 10 and 12). With the importance ratio r, its logarithm d held in +-20:

    loss = -A r
           -A r + ppo_kl_coef |d|      of a picked token

|d| stands for the KL divergence in the authors' code, and does here. The loss picks the
kl_cov_ratio of the mini-batch's tokens (at least one) with the largest covariance (see
`token_covariance`: of the old policy, over the whole mini-batch); among equal ones (seed, step,
mini-batch, sample) decides.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    compute_clamped_log_ratio,
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
from rlhf_megatron.lazy import Tensor, torch


@dataclass(frozen=True)
class KLCovParams:
    kl_cov_ratio: float = 2e-4  # share of the mini-batch's tokens that are picked
    ppo_kl_coef: float = 1.0  # weight of a picked token's KL term; the paper's

    def __post_init__(self) -> None:
        """Raise ValueError for a share or weight out of range."""
        check_token_share("kl_cov_ratio", self.kl_cov_ratio)
        if not self.ppo_kl_coef > 0:
            raise ValueError(f"ppo_kl_coef ({self.ppo_kl_coef}) must be positive; 1 is usual.")


@PICKS.register("kl_cov")
def pick_kl_cov_tokens(inputs: TokenPickInputs, params: KLCovParams) -> Tensor:
    """Return which tokens get a KL term, [T] bool: the share of the tokens that train with the
    largest covariance.
    """
    index_N, covariances_N = compute_token_covariances(inputs)
    by_noise_N = inputs.noise_T[index_N].argsort(stable=True)
    order_N = by_noise_N[covariances_N[by_noise_N].argsort(descending=True, stable=True)]
    return make_index_mask(
        index_N[order_N[: count_picked_tokens(params.kl_cov_ratio, index_N.numel())]],
        inputs.trains_T,
    )


@POLICY_LOSSES.register("kl_cov", KLCovParams, needs=("advantages", "old_log_probs", "is_picked"))
def kl_cov(inputs: PolicyLossInputs, params: KLCovParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metrics actor/ppo_kl and actor/pg_picked (1: picked)."""
    assert inputs.is_picked_T is not None, "kl_cov needs is_picked"
    log_ratio_T = compute_clamped_log_ratio(inputs)
    free_T = -inputs.advantages_T * log_ratio_T.exp()
    token_loss_T = torch.where(
        inputs.is_picked_T, free_T + params.ppo_kl_coef * log_ratio_T.abs(), free_T
    )
    metrics = {**make_ppo_kl_metric(inputs), "actor/pg_picked": inputs.is_picked_T.to(free_T.dtype)}
    return PolicyLossOutputs(token_loss_T, metrics)
