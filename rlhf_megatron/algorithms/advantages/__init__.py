"""Advantage estimators by name (`algorithm.adv_estimator`). Every module of this package registers itself."""

from __future__ import annotations

import importlib
import pkgutil

from rlhf_megatron.algorithms.advantages.base import ADV_ESTIMATORS, AdvantageInputs, AdvantageOutputs

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ADV_ESTIMATORS", "AdvantageInputs", "AdvantageOutputs"]
