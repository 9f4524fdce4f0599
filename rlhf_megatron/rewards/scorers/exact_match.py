"""1 when the parsed answer equals the label, else 0. There is no credit for an answer that merely contains it."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.answer import AnswerParams
from rlhf_megatron.rewards.scorers.base import MALFORMED, REWARDS, RewardResult, RewardSample, bad_label


@dataclass(frozen=True)
class ExactMatchParams(AnswerParams):
    pass


@REWARDS.register("exact_match", ExactMatchParams)
def exact_match(sample: RewardSample, params: ExactMatchParams) -> RewardResult:
    """White space around answer and label does not count."""
    if problem := params.label_problem(sample.label):
        return bad_label(sample.label, problem)
    answer = params.cut(sample)
    return RewardResult(0.0, MALFORMED) if answer is None else RewardResult(float(answer == sample.label.strip()))
