"""DPO: the answer that people preferred becomes likelier than the other one, measured
against a reference.

"Direct Preference Optimization" (arXiv 2305.18290), with h = log-ratio of the chosen answer - of
the rejected one:

    sigmoid   -log sigmoid(beta h)
    ipo       (h / tokens of each answer - 1 / (2 beta))^2
              (2310.12036; log-ratios are means over tokens)
    hinge     max(0, 1 - beta h)                                     (SLiC, 2305.10425)
    robust    (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)
              (2403.00409; e: label_smoothing)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.algorithms.preferences.preference_loss import (
    PREFERENCE_LOSSES,
    PreferenceLossOutputs,
    PreferencePairs,
)
from rlhf_megatron.lazy import Tensor, torch


@dataclass(frozen=True)
class DPOParams:
    beta: float = 0.1  # how strongly the policy is held to the reference
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = 0.0  # of robust: share of pairs whose answers are taken for exchanged

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range, and for label_smoothing without loss_type
        robust.
        """
        if not self.beta > 0:
            raise ValueError(f"beta ({self.beta}) must be positive; use 0.1.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing ({self.label_smoothing}) must be at least 0 and below"
                " 0.5; use 0.1."
            )
        if self.label_smoothing and self.loss_type != "robust":
            raise ValueError(
                f"label_smoothing ({self.label_smoothing}) would be ignored by loss_type"
                f" {self.loss_type}; use robust."
            )


@PREFERENCE_LOSSES.register("dpo", DPOParams, needs=("ref_log_probs",))
def dpo(pairs: PreferencePairs, params: DPOParams) -> PreferenceLossOutputs:
    """Return one loss for each pair; the rewards of the answers are beta x log-ratio against the
    reference.
    """
    chosen_P = pairs.chosen_P - pairs.ref_chosen_P
    rejected_P = pairs.rejected_P - pairs.ref_rejected_P
    chosen_rewards_P = params.beta * chosen_P.detach()
    rejected_rewards_P = params.beta * rejected_P.detach()
    if params.loss_type == "ipo":
        chosen_P = chosen_P / pairs.num_chosen_P
        rejected_P = rejected_P / pairs.num_rejected_P
    return PreferenceLossOutputs(
        _compute_margin_loss(chosen_P - rejected_P, params), chosen_rewards_P, rejected_rewards_P
    )


def _compute_margin_loss(h_P: Tensor, params: DPOParams) -> Tensor:
    """Return the loss of each pair by `params.loss_type`; `h_P` is the chosen log-ratio minus the
    rejected one.
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    scaled_P = params.beta * h_P
    if params.loss_type == "sigmoid":
        return -log_sigmoid(scaled_P)
    if params.loss_type == "ipo":
        return (h_P - 1 / (2 * params.beta)).square()
    if params.loss_type == "hinge":
        return torch.relu(1 - scaled_P)
    e = params.label_smoothing
    return (-(1 - e) * log_sigmoid(scaled_P) + e * log_sigmoid(-scaled_P)) / (1 - 2 * e)
