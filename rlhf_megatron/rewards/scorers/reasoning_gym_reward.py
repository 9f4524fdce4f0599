"""Rewards for problems of the library reasoning-gym (the task of that name,
data/tasks/reasoning_gym_task.py).

The score is 1 when the parsed answer equals the label. The library's own score of that answer is a
part, for metrics: it gives credit to an answer that merely contains the right one, in proportion to
lengths, which a policy learns to use. Where a problem has many right answers, and so no label, the
library alone can judge: `score: library`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rlhf_megatron.data.extra_columns import parse_extra
from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.rewards.scorers.answer_params import AnswerParams
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    make_bad_label_result,
    make_masked_result,
)

EXTRA_KEY = "reasoning_gym"  # of the sample's extra: {"dataset", "config", "entry"}


@dataclass(frozen=True)
class ReasoningGymRewardParams(AnswerParams):
    max_answer_chars: int = 4096
    # library: from 0 to 1, with partial credit as each task has it
    score: Literal["exact", "library"] = "exact"

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return what is wrong with the label, or ""; see `LabelCheckingParams`. With score:
        library no label is needed, and the reward itself reports a missing label.
        """
        return (
            ""
            if self.score == "library" or not label.strip()
            else super().find_label_problem(label, is_json)
        )

    def prepare(self) -> None:
        """Import the library. Raise ValueError when it is not installed."""
        try:
            import reasoning_gym  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"the reward reasoning_gym needs a package that is not there ({error});"
                f" {format_install_command('reasoning-gym')}, which needs a C compiler."
            ) from error


@REWARDS.register("reasoning_gym", ReasoningGymRewardParams, needs=(OWN_PROCESS,))
def score_reasoning_gym(sample: RewardSample, params: ReasoningGymRewardParams) -> RewardResult:
    """Score the answer by equality with the label, or with score: library as the library does. A
    sample without the library's entry, or without a label where one is needed, is masked.
    """
    problem = parse_extra(sample.extra).get(EXTRA_KEY)
    label = sample.label.strip()
    if problem is None:
        return make_masked_result(
            "no_entry", "The sample's extra has no 'reasoning_gym'; use data.task: reasoning_gym."
        )
    if params.score == "exact" and not label:
        why = (
            f"Problems of {problem['dataset']} have many answers; set `score: library` in the"
            " reward's params."
        )
        return make_masked_result("no_label", why)
    if problem_of_label := params.find_label_problem(label):
        return make_bad_label_result(label, problem_of_label)
    answer = params.extract_answer(sample)
    if answer is None:
        return RewardResult(0.0, MALFORMED)
    library = _score_with_library(answer, problem)
    parts = {} if library is None else {"library": library}
    if params.score == "exact":
        return RewardResult(float(answer == label), parts=parts)
    return RewardResult(0.0, MALFORMED) if library is None else RewardResult(library, parts=parts)


def _score_with_library(answer: str, problem: dict[str, Any]) -> float | None:
    """Return the library's score of the answer; None where the library raises because it cannot
    read the answer.
    """
    judge = _make_library_dataset(problem["dataset"], json.dumps(problem["config"]))
    try:
        return float(judge.score_answer(answer, problem["entry"]))
    except Exception:  # whatever it raises, the answer has made it do so
        return None


@lru_cache(maxsize=64)
def _make_library_dataset(dataset: str, config: str) -> Any:
    """Return the library's data set of this name, which judges answers. `config` is JSON."""
    import reasoning_gym as library

    return library.create_dataset(dataset, **json.loads(config), size=1, seed=0)
