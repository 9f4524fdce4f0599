"""Finds the answer in a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.rewards.scorers.reward_types import (
    MAX_SCORE,
    RewardSample,
    check_pattern,
    show_special_tokens,
)

BLOCK = re.compile(r"^[ \t]*```([^`\n]*)\n(.*?)(?:^[ \t]*```|```[ \t]*$)", re.DOTALL | re.MULTILINE)
ONE_TEXT = "name the key of one text or number in data.label_key"
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


@dataclass(frozen=True)
class AnswerParams:
    """Parameters of a reward that reads an answer. A subclass may have more, or other defaults."""

    # regular expression; group 1 of its last match is the answer. null: whole response
    pattern: str | None = None
    max_answer_chars: int = 256  # a longer answer is malformed
    allow_truncated: bool = False  # true: also read a response that ended by length
    # of an answer that is not right, malformed or too slow; a right one scores 1
    wrong_score: float = 0.0
    # true: special tokens of a response are not read; false: all are; null: those in the pattern
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range, or a pattern without a group."""
        if not -MAX_SCORE <= self.wrong_score <= 0:
            raise ValueError(
                f"wrong_score ({self.wrong_score}) must be at most 0; 0 and -1 are usual."
            )
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars ({self.max_answer_chars}) must be at least 1.")
        if self.pattern is not None:
            check_pattern(self.pattern, num_groups=1)

    @property
    def needs_process(self) -> bool:
        """Return whether a pattern is set: searching it can take for ever on some responses, so
        that the reward must run in a process of its own.
        """
        return self.pattern is not None

    @property
    def reads_response_prefix(self) -> bool:
        """Return whether a pattern is set: it is searched in the beginning that the prompt wrote of
        the answer, too. Without a pattern the response is the answer as the policy wrote it.
        """
        return self.pattern is not None

    @property
    def response_pattern(self) -> str | None:
        """Return the pattern; see `ResponseReadingParams`."""
        return self.pattern

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return why no answer could equal the label, with the fix, or ""; see
        `LabelCheckingParams`.
        """
        if is_json:
            return f"is no text; {ONE_TEXT}, or use short_answer, which takes several right answers"
        if not label.strip():
            return "is empty, which no answer is; correct the row"
        if len(label.strip()) > self.max_answer_chars:
            return (
                f"has {len(label.strip())} characters, and a longer answer than max_answer_chars"
                f" ({self.max_answer_chars}) is malformed; cut the answer out of it, or raise that"
            )
        return ""

    def can_read_response(self, sample: RewardSample) -> bool:
        """Return False for a response that ended by length, unless `allow_truncated` is set."""
        return sample.finish_reason != "length" or self.allow_truncated

    def extract_answer(self, sample: RewardSample) -> str | None:
        """Return the answer in the response; None where there is none, it is too long, or the
        response was truncated.
        """
        answer = self.find_answer(sample) if self.can_read_response(sample) else None
        return answer if answer and len(answer) <= self.max_answer_chars else None

    def find_answer(self, sample: RewardSample) -> str | None:
        """Return the answer in the response, however long it is, or None. Where the response alone
        has none, look for the pattern behind the beginning that the prompt wrote of the answer.
        """
        text = show_special_tokens(sample, self)
        answer = parse_answer(text, self.pattern)
        if answer is None and sample.response_prefix:
            return parse_answer(sample.response_prefix + text, self.pattern)
        return answer


def parse_answer(response: str, pattern: str | None) -> str | None:
    """Return the stripped group 1 of the last match of `pattern`, or None without a match. With no
    pattern return the whole response, stripped.
    """
    if pattern is None:
        return response.strip()
    answers = [match.group(1) for match in re.finditer(pattern, response)]
    return answers[-1].strip() if answers and answers[-1] is not None else None


def find_last_block(response: str, languages: Sequence[str]) -> str | None:
    """Return the text of the last fenced code block that is marked with one of `languages`; without
    one, that of the last block without a mark; else None.
    """
    blocks = [(mark.strip().lower(), text) for mark, text in BLOCK.findall(response)]
    for wanted in (languages, ("",)):
        if found := [text for mark, text in blocks if mark in wanted]:
            return found[-1]
    return None


def find_last_boxed(response: str) -> str | None:
    r"""Return the content of the \boxed{...} (or \fbox{...}) that is closed last, stripped; None
    without one, and where a box that is opened behind it is never closed. The time is linear in
    the length.
    """
    return find_last_box(response).content


@dataclass(frozen=True)
class LastBox:
    """What a response has in its last box."""

    content: str | None  # stripped; None without a box, and where the last one is not closed
    is_open: bool  # the last box is not closed, such as in a response that was cut within it


def find_last_box(response: str) -> LastBox:
    r"""Return the last \boxed{...} or \fbox{...} of a response, as `find_last_boxed` reads it."""
    content = None
    content_start = -1
    opened: list[int | None] = []  # of each open brace, where its content starts if it is a box
    for match in BRACES.finditer(response):
        text = match.group()
        if text == "}":
            start = opened.pop() if opened else None
            if start is not None:
                content = response[start : match.start()]
                content_start = start
        elif text.endswith("{") and text != r"\{":
            opened.append(match.end() if text != "{" else None)
    if any(start is not None and start > content_start for start in opened):
        return LastBox(None, is_open=True)
    return LastBox(content if content is None else content.strip(), is_open=False)
