"""Policy losses by name (`actor.policy_loss.loss_mode`). Every module of this package registers itself."""

from __future__ import annotations

import importlib
import pkgutil

from rlhf_megatron.algorithms.losses.base import (
    EXPLICIT_LOSSES,
    PICKS,
    POLICY_LOSSES,
    PickInputs,
    PolicyLossInputs,
    PolicyLossOutputs,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["EXPLICIT_LOSSES", "PICKS", "POLICY_LOSSES", "PickInputs", "PolicyLossInputs", "PolicyLossOutputs"]
