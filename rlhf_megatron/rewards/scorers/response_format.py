"""1 when the response has the form that a regular expression describes, else 0. The
label is not read.

The response is matched behind the beginning that the prompt wrote of it (a chat template that ends
with <think>), and with the special tokens that the pattern names, which decoding leaves out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlhf_megatron.rewards.scorers.reward_types import (
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    check_pattern,
    read_response,
)


@dataclass(frozen=True)
class FormatParams:
    pattern: str  # regular expression; a dot also matches a line's end
    # whether the whole response, but for white space around it, must match
    match: Literal["whole", "somewhere"] = "whole"
    # true: special tokens of a response are not read; false: all are; null: those in the pattern
    skip_special_tokens: bool | None = None
    reads_response_prefix: ClassVar[bool] = True  # see `ResponseReadingParams`

    def __post_init__(self) -> None:
        """Raise ValueError for a pattern that is no regular expression."""
        check_pattern(self.pattern)

    @property
    def response_pattern(self) -> str:
        """Return the pattern; see `ResponseReadingParams`."""
        return self.pattern


@REWARDS.register("format", FormatParams, needs=(OWN_PROCESS,))
def score_format(sample: RewardSample, params: FormatParams) -> RewardResult:
    """Score 1 where the stripped response matches the pattern, wholly or somewhere as `match` says,
    else 0. A response that ended by length is judged as any other.
    """
    look = re.fullmatch if params.match == "whole" else re.search
    text = read_response(sample, params).strip()
    return RewardResult(float(look(params.pattern, text, re.DOTALL) is not None))
