"""Soft over-long punishment (DAPO, arXiv 2503.14476, equation 13): 0, then linear down
to -1, then -1.

Tokens of the response:      0 ..... max_len - buffer ..... max_len .....
Score:                       0 ..... 0 ................... -1 ..... -1
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.reward_types import REWARDS, RewardResult, RewardSample


@dataclass(frozen=True)
class OverlongParams:
    max_len: int  # tokens from which a response gets -1; data.max_response_length, as a rule
    buffer: int  # tokens before that over which the score falls

    def __post_init__(self) -> None:
        """Raise ValueError unless 1 <= buffer <= max_len."""
        if not 1 <= self.buffer <= self.max_len:
            raise ValueError(
                f"buffer ({self.buffer} tokens) must be from 1 to max_len ({self.max_len})."
            )

    @property
    def acts_from(self) -> int:
        """Return the number of tokens from which a response is punished."""
        return self.max_len - self.buffer


@REWARDS.register("overlong", OverlongParams)
def score_overlong(sample: RewardSample, params: OverlongParams) -> RewardResult:
    """Return the punishment, from -1 to 0: min(-(num_tokens - (max_len - buffer)) / buffer, 0),
    and not below -1.
    """
    return RewardResult(-min(1.0, max(0.0, (sample.num_tokens - params.acts_from) / params.buffer)))
