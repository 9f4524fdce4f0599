"""Losses of a reward model: the better answer of a pair has the larger reward.

bradley_terry   -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2
                (Bradley & Terry 1952, arXiv 2203.02155; the margin: 2307.09288; c: 2312.09244)
regression      ((r_chosen - high)^2 + (r_rejected - low)^2) / 2
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.preferences.preference_loss import (
    PREFERENCE_LOSSES,
    PreferenceLossOutputs,
    PreferencePairs,
)
from rlhf_megatron.lazy import Tensor, torch


@dataclass(frozen=True)
class BradleyTerryParams:
    margin: float = 0.0  # by which the better answer must lead
    center_coef: float = 0.0  # c, which keeps rewards around 0; 0.01 is usual

    def __post_init__(self) -> None:
        """Raise ValueError for a negative number."""
        if min(self.margin, self.center_coef) < 0:
            raise ValueError(
                f"margin ({self.margin}) and center_coef ({self.center_coef}) must be at least 0."
            )


@dataclass(frozen=True)
class RegressionParams:
    high: float = 1.0  # reward of the better answer
    low: float = 0.0  # of the worse one

    def __post_init__(self) -> None:
        """Raise ValueError unless low is below high."""
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be under high ({self.high:g}).")


@PREFERENCE_LOSSES.register("bradley_terry", BradleyTerryParams, needs=("rewards",))
def bradley_terry(pairs: PreferencePairs, params: BradleyTerryParams) -> PreferenceLossOutputs:
    """Return one loss for each pair: -log sigmoid of the lead of the chosen score over the rejected
    one, less the margin, plus the centering term. The scores stand in the place of log-probs.
    """
    loss_P = -torch.nn.functional.logsigmoid(pairs.margins_P - params.margin)
    loss_P = loss_P + params.center_coef * (pairs.chosen_P + pairs.rejected_P).square()
    return _make_reward_outputs(pairs, loss_P)


@PREFERENCE_LOSSES.register("regression", RegressionParams, needs=("rewards",))
def pair_score_regression(
    pairs: PreferencePairs, params: RegressionParams
) -> PreferenceLossOutputs:
    """Regress the chosen score to params.high and the rejected score to params.low, and return half
    the sum of the squared errors, one loss for each pair.
    """
    loss_P = (
        (pairs.chosen_P - params.high).square() + (pairs.rejected_P - params.low).square()
    ) / 2
    return _make_reward_outputs(pairs, loss_P)


def _make_reward_outputs(pairs: PreferencePairs, loss_P: Tensor) -> PreferenceLossOutputs:
    """Return the losses, with the scores as the rewards of the answers."""
    return PreferenceLossOutputs(loss_P, pairs.chosen_P.detach(), pairs.rejected_P.detach())
