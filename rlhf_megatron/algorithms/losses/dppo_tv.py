"""DPPO with the total variation between two coins: |p - p_old|.

"Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879, equations 11 and 12). The loss is that of
`dppo`.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.base import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.dppo import check_thresholds, coins, divergence_loss

USUAL = 0.15  # of the authors' runs


@dataclass(frozen=True)
class DPPOTVParams:
    clip_ratio_low: float = USUAL  # a token of negative advantage is out below p_old - clip_ratio_low
    clip_ratio_high: float = USUAL  # one of positive advantage above p_old + clip_ratio_high
    clip_ratio_c: float = 20.0  # bound on the importance weight

    def __post_init__(self) -> None:
        check_thresholds(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c, USUAL)


@POLICY_LOSSES.register("dppo_tv", DPPOTVParams, needs=("advantages", "old_log_probs"))
def dppo_tv(inputs: PolicyLossInputs, params: DPPOTVParams) -> PolicyLossOutputs:
    """Per-token loss; metrics actor/ppo_kl, actor/pg_clipfrac (1 where the token was taken out)."""
    moved_T = coins(inputs).moved_T
    return divergence_loss(
        inputs, moved_T, moved_T.abs(), params.clip_ratio_low, params.clip_ratio_high, params.clip_ratio_c
    )
