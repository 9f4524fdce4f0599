"""Advantage estimators by name (`algorithm.adv_estimator`). Every module of this package
registers itself.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
)
from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)

__all__ = ["ADV_ESTIMATORS", "AdvantageInputs", "AdvantageOutputs"]
