"""Policy losses by name (`actor.policy_loss.loss_mode`). Every module of this package registers itself."""

from __future__ import annotations

from rlhf_megatron.algorithms.losses.base import (
    PICKS,
    POLICY_LOSSES,
    PickInputs,
    PolicyLossInputs,
    PolicyLossOutputs,
)
from rlhf_megatron.registry import import_modules

import_modules(__name__, __path__)

__all__ = ["PICKS", "POLICY_LOSSES", "PickInputs", "PolicyLossInputs", "PolicyLossOutputs"]
