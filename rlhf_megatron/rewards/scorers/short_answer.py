"""Answers to questions about facts, against one or several right ones: exact match, or F1 of words.

Text is compared as SQuAD's evaluation does (arXiv 1606.05250): small letters, without punctuation
and articles.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

from rlhf_megatron.rewards.scorers.answer_params import AnswerParams
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    REWARDS,
    RewardResult,
    RewardSample,
    make_bad_label_result,
)

ARTICLES = re.compile(r"\b(a|an|the)\b")
SIGNED_OR_DECIMAL = re.compile(r"-\d[\d,]*(?:\.\d+)?|[\d,]*\.\d+")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class ShortAnswerParams(AnswerParams):
    """Without a pattern the whole response is the answer."""

    pattern: str | None = r"(?s)<answer>(.*?)</answer>"
    # contains: a right answer stands in the answer
    score: Literal["exact", "f1", "contains"] = "exact"

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return what is wrong with a label that holds no right answer with words, or ""; see
        `LabelCheckingParams`.
        """
        return (
            ""
            if list_right_answers(label)
            else "has no words to compare with: a text, a list of texts or {'target': ...}"
        )

    def describe_partial_reading(self, label: str) -> str:
        """Return how a label counts that is a number with a sign or a point, which fall away as
        punctuation; "" for others. See `PartialReadingParams`.
        """
        if not SIGNED_OR_DECIMAL.fullmatch(label.strip()):
            return ""
        return f"counts as {normalise_answer(label)!r}, since punctuation falls away"


def normalise_answer(text: str) -> str:
    """Return the text in lower case, without punctuation and the articles a, an, the, with one
    blank between words.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def compute_word_f1(answer: str, right_answer: str) -> float:
    """Return the harmonic mean of precision and recall of the words. Both texts must be normalised
    already.
    """
    words = answer.split()
    wanted = right_answer.split()
    num_same = sum((Counter(words) & Counter(wanted)).values())
    return 2 * num_same / (len(words) + len(wanted)) if num_same else 0.0


def list_right_answers(label: str) -> list[str]:
    """Return the normalised right answers of a label: a text, a JSON list of texts, or Search-R1's
    {"target": ...}, also as JSON within JSON. Empty ones, and items that are neither text nor
    number, are dropped.
    """
    found: Any = label
    with suppress(ValueError, RecursionError):
        while isinstance(found, str):
            found = json.loads(found)
    if isinstance(found, dict):
        found = found.get("target", [])
    elif not isinstance(found, str | list):  # a number, true, null: the text of it
        found = label
    texts = found if isinstance(found, list) else [found]
    is_text = [isinstance(text, str | int | float) and not isinstance(text, bool) for text in texts]
    return [text for text in map(normalise_answer, map(str, compress(texts, is_text))) if text]


@REWARDS.register("short_answer", ShortAnswerParams)
def score_short_answer(sample: RewardSample, params: ShortAnswerParams) -> RewardResult:
    """Return the best score of the answer over all right answers, by exact match, word F1 or
    containment as `score` says. A label without words is masked, since an empty answer would equal
    it.
    """
    rights = list_right_answers(sample.label)
    if problem := params.find_label_problem(sample.label):
        return make_bad_label_result(sample.label, problem)
    answer = params.extract_answer(sample)
    if answer is None:
        return RewardResult(0.0, MALFORMED)
    text = normalise_answer(answer)
    if params.score == "f1":
        return RewardResult(max(compute_word_f1(text, right) for right in rights))
    if params.score == "contains":
        return RewardResult(float(any(f" {right} " in f" {text} " for right in rights)))
    return RewardResult(float(text in rights))
