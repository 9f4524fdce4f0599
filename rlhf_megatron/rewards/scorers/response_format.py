"""1 when the response has the form that a regular expression describes, else 0. The
label is not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.rewards.scorers.reward_types import (
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    check_pattern,
)


@dataclass(frozen=True)
class FormatParams:
    pattern: str  # regular expression; a dot also matches a line's end
    # whether the whole response, but for white space around it, must match
    match: Literal["whole", "somewhere"] = "whole"

    def __post_init__(self) -> None:
        """Raise ValueError for a pattern that is no regular expression."""
        check_pattern(self.pattern)


@REWARDS.register("format", FormatParams, needs=(OWN_PROCESS,))
def score_format(sample: RewardSample, params: FormatParams) -> RewardResult:
    """Score 1 where the stripped response matches the pattern, wholly or somewhere as `match` says,
    else 0. A response that ended by length is judged as any other.
    """
    look = re.fullmatch if params.match == "whole" else re.search
    return RewardResult(float(look(params.pattern, sample.response.strip(), re.DOTALL) is not None))
