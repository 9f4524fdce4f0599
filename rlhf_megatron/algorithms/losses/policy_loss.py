"""What a policy loss is: a pure function from token columns to one loss a token. A new loss is one
new file here.

    @POLICY_LOSSES.register("ppo_clip", PPOClipParams, needs=("advantages", "old_log_probs"))
    def ppo_clip(inputs: PolicyLossInputs, params: PPOClipParams) -> PolicyLossOutputs: ...

Nothing here masks, averages or divides: the caller sums `token_loss_T * loss_weights_T` (see
`loss_aggregation`). `needs` names the columns that must not be None, beside log_probs.

A loss may tell its gradient, as `grad_T`, instead of leaving it to autograd, which takes a few
times longer. It is marked with `mark_returns_gradient`, looks at each token by itself, and is
called without autograd on blocks of rows.

A loss sees one micro-batch. One that needs statistics of the whole mini-batch names "is_picked" in
`needs` and has a second function under its name, which chooses tokens on the controller before the
mini-batch is cut:

    @PICKS.register("clip_cov")
    def pick_clip_cov_tokens(inputs: TokenPickInputs, params: ClipCovParams) -> Tensor: ...

One that needs sums over whole sequences names "sequences" (`algorithms.row_sequences`).
"""

# T tokens of a micro-batch: all, or only those with a True response mask

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.lazy import Tensor
from rlhf_megatron.registry import Registry, name_attributes


@dataclass(frozen=True)
class PolicyLossInputs:
    """All columns [T] float32 but the mask. Finite also where the mask is False: a weight of
    0 hides no NaN.
    """

    log_probs_T: Tensor  # current policy, with grad
    old_log_probs_T: Tensor  # trainer's policy at the start of this update
    advantages_T: Tensor
    response_mask_T: Tensor  # bool
    entropies_T: Tensor | None = None  # nats, with grad
    ref_log_probs_T: Tensor | None = None  # frozen reference
    rollout_log_probs_T: Tensor | None = None  # as the engine reported
    sequences: RowSequences | None = None  # of the rows; sequence-level losses need it
    # factor of the policy loss for off-policy tokens; not of KL and entropy
    correction_weights_T: Tensor | None = None
    is_picked_T: Tensor | None = None  # bool, what the loss's entry in PICKS chose


@dataclass(frozen=True)
class PolicyLossOutputs:
    token_loss_T: Tensor  # with grad, unless `grad_T` is there
    metrics: dict[str, Tensor]  # keys of algorithms/metric_names.py -> [T] float32, without grad
    grad_T: Tensor | None = None  # d token_loss / d log_probs, of a loss that tells it


PolicyLoss = Callable[[PolicyLossInputs, Any], PolicyLossOutputs]
POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    call_arguments=("inputs", "params"),
    attributes_by_name=name_attributes(PolicyLossInputs),
)
LOSSES_WITH_GRADIENT: set[PolicyLoss] = set()


def mark_returns_gradient(loss: PolicyLoss) -> PolicyLoss:
    """Mark a loss whose outputs have `grad_T`, and return it: the loss may be called on blocks of
    rows, cut anywhere. Use as a decorator.
    """
    LOSSES_WITH_GRADIENT.add(loss)
    return loss


def attach_gradient(value_T: Tensor, grad_T: Tensor, leaf_T: Tensor) -> Tensor:
    """Return the values `value_T`, [T], with `grad_T` as their gradient with respect to
    `leaf_T`.
    """
    return value_T + grad_T * (leaf_T - leaf_T.detach()) if leaf_T.requires_grad else value_T


@dataclass(frozen=True)
class TokenPickInputs:
    """Columns of a whole mini-batch. A choice of tokens is made on the controller,
    before the update.
    """

    old_log_probs_T: Tensor  # float32
    advantages_T: Tensor  # float32
    # bool: response tokens of samples whose reward counts; the rest is out of every statistic
    trains_T: Tensor
    # float64 in [0, 1), by (seed, step, mini-batch, sample): a token has the same in any order
    noise_T: Tensor


TokenPick = Callable[[TokenPickInputs, Any], Tensor]
"""(columns, parameters of the loss) -> [T] bool, False where `trains_T` is."""
PICKS: Registry[TokenPick] = Registry(
    "choice of tokens",
    call_arguments=("inputs", "params"),
    attributes_by_name=name_attributes(TokenPickInputs),
)
