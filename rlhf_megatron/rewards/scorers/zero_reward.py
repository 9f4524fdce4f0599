"""0 for every sample: a reward model, or terms, say all."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.reward_types import REWARDS, RewardResult, RewardSample


@dataclass(frozen=True)
class ZeroParams:
    """Parameters of `score_zero`: none."""


@REWARDS.register("zero", ZeroParams)
def score_zero(sample: RewardSample, params: ZeroParams) -> RewardResult:
    """Score 0 without reading the sample."""
    return RewardResult(0.0)
