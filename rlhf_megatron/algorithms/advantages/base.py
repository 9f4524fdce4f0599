"""What an advantage estimator is: a pure function of a step's rewards. A new estimator is one new file here.

    @ADV_ESTIMATORS.register("grpo", GRPOParams, needs=("rewards", "group_ids"))
    def grpo(inputs: AdvantageInputs, params: GRPOParams) -> AdvantageOutputs: ...

`needs` names batch columns. All estimators treat a sample of masked status alike (advantage 0, left out of every
statistic) and so a group with one sample left (no baseline, advantage 0).
"""

# B samples, T packed tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlhf_megatron.registry import Registry


@dataclass(frozen=True)
class AdvantageInputs:
    """Columns of a whole step; sample i owns tokens offsets[i] : offsets[i + 1]."""

    rewards_B: Tensor  # float32; undefined where not valid
    group_ids_B: Tensor  # int64; the samples of one prompt share it
    is_valid_B: Tensor  # bool; False: masked status
    response_mask_T: Tensor  # bool
    offsets: Tensor  # [B + 1] int64
    token_rewards_T: Tensor | None = None  # float32, per-token stream (after KL-in-reward)
    values_T: Tensor | None = None  # float32, critic


@dataclass(frozen=True)
class AdvantageOutputs:
    advantages_T: Tensor  # float32, 0 outside of response_mask_T
    returns_T: Tensor | None = None  # float32, what a critic learns; None where the estimator has none
    metrics: dict[str, float] = field(default_factory=dict)  # keys of algorithms/metric_names.py


AdvantageEstimator = Callable[[AdvantageInputs, Any], AdvantageOutputs]
ADV_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator")


def spread(advantages_B: Tensor, response_mask_T: Tensor, offsets: Tensor) -> Tensor:
    """[B] -> [T] float32: each sample's advantage on its response tokens, 0 elsewhere."""
    advantages_T = advantages_B.repeat_interleave(offsets.diff())
    return advantages_T.masked_fill(~response_mask_T, 0.0).float()
