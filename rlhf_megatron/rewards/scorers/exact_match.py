"""1 when the parsed answer equals the label, else 0. There is no credit for an answer that
merely contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.answer_params import AnswerParams
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    REWARDS,
    RewardResult,
    RewardSample,
    make_bad_label_result,
)


@dataclass(frozen=True)
class ExactMatchParams(AnswerParams):
    pass


@REWARDS.register("exact_match", ExactMatchParams)
def score_exact_match(sample: RewardSample, params: ExactMatchParams) -> RewardResult:
    """Score 1 where the answer equals the label, without white space around them, else 0. A label
    that no answer can equal is masked.
    """
    if problem := params.find_label_problem(sample.label):
        return make_bad_label_result(sample.label, problem)
    answer = params.extract_answer(sample)
    return (
        RewardResult(0.0, MALFORMED)
        if answer is None
        else RewardResult(float(answer == sample.label.strip()))
    )
