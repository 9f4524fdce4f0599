"""DPPO with the KL divergence of two coins, KL(old || current).

"Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879, equations 11 and 12). The loss is that of
`dppo`, with the divergence

    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

A probability that is 1 to all its digits counts as 1 - 1e-8, so that the divergence is a number.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_megatron.algorithms.losses.base import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.dppo import Coins, check_thresholds, coins, divergence_loss

USUAL = 0.05  # of the authors' runs
LARGEST_LOG_P = -1e-8


@dataclass(frozen=True)
class DPPOKLParams:
    clip_ratio_low: float = USUAL  # nats: a token of negative advantage that became rarer is out beyond
    clip_ratio_high: float = USUAL  # nats: one of positive advantage that became likelier is out beyond
    clip_ratio_c: float = 20.0  # bound on the importance weight

    def __post_init__(self) -> None:
        check_thresholds(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c, USUAL)


@POLICY_LOSSES.register("dppo_kl", DPPOKLParams, needs=("advantages", "old_log_probs"))
def dppo_kl(inputs: PolicyLossInputs, params: DPPOKLParams) -> PolicyLossOutputs:
    """Per-token loss; metrics actor/ppo_kl, actor/pg_clipfrac (1 where the token was taken out)."""
    both = coins(inputs)
    return divergence_loss(
        inputs, both.moved_T, _binary_kl(both), params.clip_ratio_low, params.clip_ratio_high, params.clip_ratio_c
    )


def _binary_kl(both: Coins) -> Tensor:
    """[T] nats, finite."""
    log_p_T, log_p_old_T = both.log_p_T.clamp(max=LARGEST_LOG_P), both.log_p_old_T.clamp(max=LARGEST_LOG_P)
    heads_T = log_p_old_T.exp() * (log_p_old_T - log_p_T)
    rest_T, rest_old_T = -log_p_T.expm1(), -log_p_old_T.expm1()
    return heads_T + rest_old_T * (rest_old_T.log() - rest_T.log())
