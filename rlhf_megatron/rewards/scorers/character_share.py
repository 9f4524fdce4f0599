"""The share of a response's characters that belong to a class. Graded: nearly every group has
different rewards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.reward_types import (
    REWARDS,
    RewardResult,
    RewardSample,
    check_pattern,
)


@dataclass(frozen=True)
class CharacterShareParams:
    pattern: str = "[0-9]"  # regular expression of one character

    def __post_init__(self) -> None:
        """Raise ValueError for a pattern that is no regular expression."""
        check_pattern(self.pattern)


@REWARDS.register("character_share", CharacterShareParams)
def score_character_share(sample: RewardSample, params: CharacterShareParams) -> RewardResult:
    """Return the share of the response's characters that match the pattern; 0 for an empty
    response. The label is not read.
    """
    matches = sum(bool(re.fullmatch(params.pattern, character)) for character in sample.response)
    return RewardResult(matches / max(1, len(sample.response)))
