"""Rewards by name (`reward.name`). Every module of this package is imported, so that a new file registers itself."""

from __future__ import annotations

import importlib
import pkgutil

from rlhf_megatron.rewards.scorers.base import OWN_PROCESS, REWARDS, Reward, RewardResult, RewardSample, is_masked

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["OWN_PROCESS", "REWARDS", "Reward", "RewardResult", "RewardSample", "is_masked"]
