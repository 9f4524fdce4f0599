"""Losses of pairs of answers by name (`sft.loss_mode`). Every module of this package registers itself."""

from __future__ import annotations

from rlhf_megatron.algorithms.preferences.base import PREFERENCE_LOSSES, Pairs, PreferenceLoss
from rlhf_megatron.registry import import_modules

import_modules(__name__, __path__)

__all__ = ["PREFERENCE_LOSSES", "Pairs", "PreferenceLoss"]
