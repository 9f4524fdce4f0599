"""Rewards by name (`reward.name`). Every module of this package is imported, so that a new file
registers itself.
"""

from __future__ import annotations

from rlhf_megatron.registry import import_package_modules
from rlhf_megatron.rewards.scorers.reward_types import (
    OWN_PROCESS,
    REWARDS,
    Reward,
    RewardResult,
    RewardSample,
    is_masked,
)

import_package_modules(__name__, __path__)

__all__ = ["OWN_PROCESS", "REWARDS", "Reward", "RewardResult", "RewardSample", "is_masked"]
