"""A fine for saying the same again: minus the share of a response's runs of words that
stood there before.

As `repetition_penalty` of Open-R1 (after arXiv 2502.03373, appendix C.2), with `max_penalty` as the
term's weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.reward_types import REWARDS, RewardResult, RewardSample


@dataclass(frozen=True)
class RepetitionParams:
    num_words: int = 3  # of a run

    def __post_init__(self) -> None:
        """Raise ValueError for a run of less than one word."""
        if self.num_words < 1:
            raise ValueError(f"num_words ({self.num_words}) must be at least 1.")


@REWARDS.register("repetition", RepetitionParams)
def score_repetition(sample: RewardSample, params: RepetitionParams) -> RewardResult:
    """Return from -1 to 0: (number of distinct runs of words) / (number of runs) - 1. A response of
    fewer words than a run scores 0.
    """
    words = sample.response.lower().split()
    count = len(words) - params.num_words + 1
    distinct = {tuple(words[i : i + params.num_words]) for i in range(count)}
    return RewardResult(len(distinct) / count - 1.0 if count > 0 else 0.0)
