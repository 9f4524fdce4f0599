"""What a policy loss is: a pure function from token columns to one loss a token. A new loss is one new file here.

    @POLICY_LOSSES.register("ppo_clip", PPOClipParams, needs=("advantages", "old_log_probs"))
    def ppo_clip(inputs: PolicyLossInputs, params: PPOClipParams) -> PolicyLossOutputs: ...

Nothing here masks, averages or divides: the caller sums `token_loss_T * loss_weights_T` (see `aggregate`). `needs`
names the columns that must not be None, beside log_probs.

A loss may also tell its gradient instead of leaving it to autograd, which takes a few times longer. That form is
registered under the same name, and is what trains where `actor.kernels.fused_loss` is on; the other one specifies it:

    @EXPLICIT_LOSSES.register("ppo_clip")
    def ppo_clip_explicit(inputs: PolicyLossInputs, params: PPOClipParams, scratch: Scratch) -> ExplicitOutputs: ...

A loss sees one micro-batch. One that needs statistics of the whole mini-batch names "is_picked" in `needs` and has a
second function under its name, which chooses tokens on the controller before the mini-batch is cut:

    @PICKS.register("clip_cov")
    def pick_clip_cov(inputs: PickInputs, params: ClipCovParams) -> Tensor: ...

One that needs sums over whole sequences names "sequences" (`algorithms.sequences`).
"""

# T tokens of a micro-batch: all, or only those with a True response mask

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.algorithms.losses.scratch import Scratch
from rlhf_megatron.algorithms.sequences import Sequences
from rlhf_megatron.lazy import Tensor
from rlhf_megatron.registry import Registry


@dataclass(frozen=True)
class PolicyLossInputs:
    """All columns [T] float32 but the mask. Finite also where the mask is False: a weight of 0 hides no NaN."""

    log_probs_T: Tensor  # current policy, with grad
    old_log_probs_T: Tensor  # trainer's policy at the start of this update
    advantages_T: Tensor
    response_mask_T: Tensor  # bool
    entropies_T: Tensor | None = None  # nats, with grad
    ref_log_probs_T: Tensor | None = None  # frozen reference
    rollout_log_probs_T: Tensor | None = None  # as the engine reported
    sequences: Sequences | None = None  # of the rows; sequence-level losses need it
    correction_weights_T: Tensor | None = None  # factor of the policy loss for off-policy tokens; not of KL and entropy
    is_picked_T: Tensor | None = None  # bool, what the loss's entry in PICKS chose


@dataclass(frozen=True)
class PolicyLossOutputs:
    token_loss_T: Tensor  # with grad
    metrics: dict[str, Tensor]  # keys of algorithms/metric_names.py -> [T] float32, without grad


PolicyLoss = Callable[[PolicyLossInputs, Any], PolicyLossOutputs]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


@dataclass(frozen=True)
class ExplicitOutputs:
    """Of a block, in tensors of the scratch. None has grad."""

    token_loss_T: Tensor
    grad_T: Tensor  # d token_loss / d log_probs
    metrics: dict[str, Tensor]  # as in PolicyLossOutputs; may be the loss, or columns that came in


ExplicitLoss = Callable[[PolicyLossInputs, Any, Scratch], ExplicitOutputs]
"""Each token by itself: it is called on blocks of rows, cut anywhere. Loss and gradient are the caller's to change."""
EXPLICIT_LOSSES: Registry[ExplicitLoss] = Registry("policy loss with an explicit gradient")


@dataclass(frozen=True)
class PickInputs:
    """Columns of a whole mini-batch. A choice of tokens is made on the controller, before the update."""

    old_log_probs_T: Tensor  # float32
    advantages_T: Tensor  # float32
    trains_T: Tensor  # bool: response tokens of samples whose reward counts; the rest is out of every statistic
    noise_T: Tensor  # float64 in [0, 1), by (seed, step, mini-batch, sample): a token has the same in any order


Pick = Callable[[PickInputs, Any], Tensor]
"""(columns, parameters of the loss) -> [T] bool, False where `trains_T` is."""
PICKS: Registry[Pick] = Registry("choice of tokens")
