"""Policy losses by name (`actor.policy_loss.loss_mode`). Every module of this package
registers itself.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.losses.policy_loss import (
    PICKS,
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
    TokenPickInputs,
)
from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)

__all__ = ["PICKS", "POLICY_LOSSES", "PolicyLossInputs", "PolicyLossOutputs", "TokenPickInputs"]
