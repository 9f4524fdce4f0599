"""Answers to questions about facts, against one or several right ones: exact match, or F1 of words.

Text is compared as SQuAD's evaluation does (arXiv 1606.05250): small letters, without punctuation and articles.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_megatron.rewards.scorers.answer import AnswerParams
from rlhf_megatron.rewards.scorers.base import MALFORMED, REWARDS, RewardResult, RewardSample, masked

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class ShortAnswerParams(AnswerParams):
    """Without a pattern the whole response is the answer."""

    pattern: str | None = r"(?s)<answer>(.*?)</answer>"
    score: Literal["exact", "f1", "contains"] = "exact"  # contains: a right answer stands in the answer


def normalised(text: str) -> str:
    """Return a text in small letters, without punctuation and articles, one blank between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(answer: str, right: str) -> float:
    """The harmonic mean of precision and recall of words, both normalised."""
    words, wanted = answer.split(), right.split()
    num_same = sum((Counter(words) & Counter(wanted)).values())
    return 2 * num_same / (len(words) + len(wanted)) if num_same else 0.0


def right_answers(label: str) -> list[str]:
    """List the right answers of a label: text, a JSON list of texts, or Search-R1's {"target": ...}. Empty ones are
    dropped.
    """
    try:
        found: Any = json.loads(label)
    except ValueError:
        found = label
    if isinstance(found, dict):
        found = found.get("target", [])
    texts = found if isinstance(found, list) else [found if isinstance(found, str) else label]
    return [text for text in map(normalised, map(str, texts)) if text]


@REWARDS.register("short_answer", ShortAnswerParams)
def short_answer(sample: RewardSample, params: ShortAnswerParams) -> RewardResult:
    """The best over all right answers. A label without words is masked: an empty answer would equal it."""
    rights = right_answers(sample.label)
    if not rights:
        return masked("bad_label", f"The label {sample.label!r:.80} has no words to compare with.")
    answer = params.cut(sample)
    if answer is None:
        return RewardResult(0.0, MALFORMED)
    text = normalised(answer)
    if params.score == "f1":
        return RewardResult(max(f1(text, right) for right in rights))
    if params.score == "contains":
        return RewardResult(float(any(f" {right} " in f" {text} " for right in rights)))
    return RewardResult(float(text in rights))
