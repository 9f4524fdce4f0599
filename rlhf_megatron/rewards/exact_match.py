"""1 when the parsed answer equals the label, else 0. There is no credit for an answer that merely contains it."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.rewards.answer import parse_answer, pattern_problem
from rlhf_megatron.rewards.base import MALFORMED, REWARDS, RewardResult, RewardSample


@dataclass(frozen=True)
class ExactMatchParams:
    pattern: str | None = None  # regular expression; group 1 of its last match is the answer. null: the whole response
    max_answer_chars: int = 256  # a longer answer is malformed
    allow_truncated: bool = False  # true: also read a response that ended by length

    def __post_init__(self) -> None:
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars ({self.max_answer_chars}) must be at least 1.")
        if problem := pattern_problem(self.pattern):
            raise ValueError(problem)


@REWARDS.register("exact_match", ExactMatchParams)
def exact_match(sample: RewardSample, params: ExactMatchParams) -> RewardResult:
    """White space around answer and label does not count."""
    if sample.finish_reason == "length" and not params.allow_truncated:
        return RewardResult(0.0, MALFORMED)
    answer = parse_answer(sample.response, params.pattern)
    if not answer or len(answer) > params.max_answer_chars:
        return RewardResult(0.0, MALFORMED)
    return RewardResult(float(answer == sample.label.strip()))
