"""What a policy loss is: a pure function from token columns to one loss a token. A new loss is one new file here.

    @POLICY_LOSSES.register("ppo_clip", PPOClipParams, needs=("advantages", "old_log_probs"))
    def ppo_clip(inputs: PolicyLossInputs, params: PPOClipParams) -> PolicyLossOutputs: ...

Nothing here masks, averages or divides: the caller sums `token_loss_T * loss_weights_T` (see `aggregate`). `needs`
names the columns that must not be None, beside log_probs.
"""

# T tokens of a micro-batch: all, or only those with a True response mask

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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


@dataclass(frozen=True)
class PolicyLossOutputs:
    token_loss_T: Tensor  # with grad
    metrics: dict[str, Tensor]  # keys of algorithms/metric_names.py -> [T] float32, without grad


PolicyLoss = Callable[[PolicyLossInputs, Any], PolicyLossOutputs]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")
