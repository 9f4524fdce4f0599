"""A preference loss is a pure function from the log-probs of two answers to one loss a pair.

Its slopes by the two log-probs are all that an update needs: the gradient of the whole is the sum
of slope x gradient of a log-prob, so they travel to the ranks as loss weights of tokens, and the
two answers of a pair may be forwarded anywhere. The price is one forward pass without a gradient.
"""

# P pairs

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlhf_megatron.lazy import Tensor
from rlhf_megatron.registry import Registry, name_attributes


@dataclass(frozen=True)
class PreferencePairs:
    """Sums of log-probs over the answers' tokens, in nats; those of the policy have grad. `ref`:
    frozen reference.

    A loss that needs `rewards` trains a reward model (`job: reward-model`): rewards stand in the
    place of log-probs.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    ref_chosen_P: Tensor  # zeros for a loss that does not need ref_log_probs
    ref_rejected_P: Tensor
    num_chosen_P: Tensor  # tokens of the answers
    num_rejected_P: Tensor

    @property
    def margins_P(self) -> Tensor:
        """Return how much more than the reference the policy prefers the chosen answer, in nats,
        [P].
        """
        return (self.chosen_P - self.ref_chosen_P) - (self.rejected_P - self.ref_rejected_P)


@dataclass(frozen=True)
class PreferenceLossOutputs:
    loss_P: Tensor  # with grad
    chosen_rewards_P: Tensor  # what the loss takes for the rewards of the answers; no grad
    rejected_rewards_P: Tensor


PreferenceLossFunction: TypeAlias = Callable[[PreferencePairs, Any], PreferenceLossOutputs]
PREFERENCE_LOSSES: Registry[PreferenceLossFunction] = Registry(
    "preference loss",
    call_arguments=("pairs", "params"),
    attributes_by_name=name_attributes(PreferencePairs),
)
