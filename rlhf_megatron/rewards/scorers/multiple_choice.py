"""1 when the letter that the response chooses is the label's, else 0.

The letter is read as the authors of MMLU-Pro (arXiv 2406.01574) and GPQA's graders do: the last of
"the answer is (C)", "Answer: C" and a box, and with `lenient` else the last letter that stands
alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.answer_params import find_last_boxed
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    REWARDS,
    RewardResult,
    RewardSample,
    make_bad_label_result,
)


@dataclass(frozen=True)
class MultipleChoiceParams:
    letters: str = "ABCDEFGHIJ"  # of the choices
    # true: where none is named as the answer, the last capital letter that stands alone
    lenient: bool = False
    allow_truncated: bool = False  # true: also read a response that ended by length

    def __post_init__(self) -> None:
        """Raise ValueError unless `letters` are two or more different capital letters."""
        if not re.fullmatch("[A-Z]{2,}", self.letters) or len(set(self.letters)) < len(
            self.letters
        ):
            raise ValueError(
                f"letters ({self.letters!r}) must be two capital letters or more, each once."
            )

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return what is wrong with a label that does not begin with one of the letters, or ""; see
        `LabelCheckingParams`.
        """
        if not is_json and read_choice_letter(label, self.letters) is not None:
            return ""
        return (
            f"begins with none of the letters {self.letters}, as C, (C) or C. with the text of the"
            " choice behind it"
        )


def read_choice_letter(text: str, letters: str) -> str | None:
    """Return the capital letter with which a label or the content of a box begins, as C, (C), C. or
    C) with the text of the choice behind it; None where there is none.
    """
    found = re.match(rf"\s*(?:\\[a-z]+\{{)?\(?([{letters}])(?:[).:}}]|\s*$)", text, re.IGNORECASE)
    return found.group(1).upper() if found else None


def find_chosen_letter(response: str, letters: str, is_lenient: bool) -> str | None:
    """Return the letter of the last statement of an answer or of the box, whichever is later.
    Without either, and with `is_lenient`, return the last letter that stands alone, else None.
    """
    box = find_last_boxed(response)
    stated = rf"(?i:answer\s*(?:is|:)[\s*:]*)(?:[$(]\(?\**)?([{letters}])\b(?!')"
    said = [(match.end(), match.group(1)) for match in re.finditer(stated, response)]
    if box is not None and (letter := read_choice_letter(box, letters)):
        said.append((response.rindex(box), letter))
    if not said and is_lenient:
        said = [
            (match.end(), match.group())
            for match in re.finditer(rf"\b[{letters}]\b(?!')", response)
        ]
    return max(said)[1] if said else None


@REWARDS.register("multiple_choice", MultipleChoiceParams)
def score_multiple_choice(sample: RewardSample, params: MultipleChoiceParams) -> RewardResult:
    """Score 1 where the letter that the response chooses is the label's, else 0. A label that
    begins with none of the letters is masked.
    """
    if problem := params.find_label_problem(sample.label):
        return make_bad_label_result(sample.label, problem)
    can_read = sample.finish_reason != "length" or params.allow_truncated
    letter = (
        find_chosen_letter(sample.response, params.letters, params.lenient) if can_read else None
    )
    return (
        RewardResult(0.0, MALFORMED)
        if letter is None
        else RewardResult(float(letter == read_choice_letter(sample.label, params.letters)))
    )
