"""Losses of pairs of answers by name (`sft.loss_mode`). Every module of this package
registers itself.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.preferences.preference_loss import (
    PREFERENCE_LOSSES,
    PreferenceLossOutputs,
    PreferencePairs,
)
from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)

__all__ = ["PREFERENCE_LOSSES", "PreferenceLossOutputs", "PreferencePairs"]
