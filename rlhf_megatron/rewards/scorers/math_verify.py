r"""1 when the answer is mathematically equal to the label, by the library math-verify; else 0.

The answer is the content of the last \boxed{...}, or the match of `pattern`, or the formula that
the library finds in the whole response. Text that equals the label's is right without algebra. An
answer that cannot be read as mathematics, or would take for ever to compute, is malformed.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import log10
from typing import Any

from rlhf_megatron.rewards.scorers.answer_params import AnswerParams, find_last_boxed
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    make_masked_result,
)

MAX_DEPTH = 10  # of brackets; the parser's time doubles with each of them
MAX_DIGITS = 100_000  # of a power that would be worked out
MAX_FACTORIAL = 10_000
MAX_CHOOSE = 100_000

OPENING = re.compile(r"[({\[]")
POWER = re.compile(r"(\d+)\s*\^\s*(?:\{\s*(\d+)\s*\}|(\d))")
FACTORIAL = re.compile(r"(\d+)\s*!|[)}\]]\s*!")
CHOOSE = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)\s*\}|\\choose|\bC\s*\(\s*(\d+)")
SHRUNK = "9" * 7  # stands for a number of more digits than an exponent may have

# Parsed once before workers are forked: parser and algebra are slow the first time that they meet
# a construct.
REHEARSAL = (
    r"\frac{1}{2}",
    "0.5",
    r"2\sqrt{3}",
    "x^2+2x+1",
    "(1,2)",
    r"\{1,2\}",
    "[0,1)",
    "10^{5}",
    r"\pi",
    "x=3",
    "12%",
)
PROSE = re.compile(r"\$|\\[(\[]|(?<![\\a-zA-Z])[a-zA-Z]{2}")  # formulas marked as such, or words


def is_formula_too_large(text: str) -> bool:
    """Return whether brackets are nested too deeply, or powers, factorials or binomials would take
    too long to evaluate.
    """
    return (
        _measure_bracket_depth(text) > MAX_DEPTH
        or _has_large_power(text)
        or _has_large_factorial_or_binomial(text)
    )


def _measure_bracket_depth(text: str) -> int:
    """Return the greatest depth of nested brackets."""
    deepest = depth = 0
    for character in text:
        if OPENING.match(character):
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth = max(0, depth - 1)
    return deepest


def _has_large_power(text: str) -> bool:
    """Return whether evaluating the text's powers would give more than about MAX_DIGITS digits.
    Nested powers are evaluated from the inside out.
    """
    while match := _find_innermost_power(text):
        base = match.group(1)
        exponent = match.group(2) or match.group(3)
        if len(exponent) >= len(SHRUNK) and base.strip("0") not in ("", "1"):
            return True
        digits = int(exponent) * log10(
            max(1, int(base[: len(SHRUNK)])) * 10.0 ** max(0, len(base) - len(SHRUNK))
        )
        if digits > MAX_DIGITS:
            return True
        value = str(int(base) ** int(exponent)) if digits < len(SHRUNK) else SHRUNK
        text = text[: match.start()] + value + text[match.end() :]
    return False


def _find_innermost_power(text: str) -> re.Match[str] | None:
    """Return the match of the last power, which of 2^3^4 is 3^4; None where there is no power."""
    return next(reversed(list(POWER.finditer(text))), None) if "^" in text else None


def _has_large_factorial_or_binomial(text: str) -> bool:
    """Return whether the text has a factorial or a binomial coefficient that would take too long to
    evaluate.
    """
    for match in FACTORIAL.finditer(text):
        if match.group(1) is None:
            inner = text[: match.start()]
            if "!" in inner or re.search(r"\d{5}|\^", inner):
                return True
        elif len(match.group(1)) > 6 or int(match.group(1)) > MAX_FACTORIAL:
            return True
    return any(
        int(number) > MAX_CHOOSE
        for match in CHOOSE.finditer(text)
        if (number := match.group(1) or match.group(2)) is not None
    )


@dataclass(frozen=True)
class MathVerifyParams(AnswerParams):
    r"""Without a pattern the answer is in the last \boxed{...}, or where the library finds it in
    the response.
    """

    max_memory_gib: float = 2.0  # that the worker process may use

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        super().__post_init__()
        if not self.max_memory_gib > 0:
            raise ValueError(f"max_memory_gib ({self.max_memory_gib}) must be above 0.")

    def prepare(self) -> None:
        """Import the library and parse the usual constructs once, which is slow the first time.
        Raise ValueError when the library is not installed.
        """
        try:
            import math_verify
        except ImportError as error:
            raise ValueError(
                f"the reward math_verify needs a package that is not there ({error});"
                " pip install 'rlhf-megatron[math]'."
            ) from error
        # it warns at each call that it has no time-out
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        for text in REHEARSAL:
            math_verify.verify(_parse_formula(text), _parse_formula(text), timeout_seconds=None)

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return the problem of a label, or ""; see `LabelCheckingParams`. A label longer than
        max_answer_chars has no problem, since its value may be short.
        """
        return (
            ""
            if not is_json and len(label.strip()) > self.max_answer_chars
            else super().find_label_problem(label, is_json)
        )

    def make_result_key(self, sample: RewardSample) -> str:
        """Return a key on which alone the result depends: the extracted answer and the label."""
        answer = extract_math_answer(sample, self)
        return json.dumps([answer and (answer.text, answer.is_prose), sample.label.strip()])


@dataclass(frozen=True)
class MathAnswer:
    text: str
    is_prose: bool  # the answer stands somewhere in it


@REWARDS.register("math_verify", MathVerifyParams, needs=(OWN_PROCESS,))
def score_math_verify(sample: RewardSample, params: MathVerifyParams) -> RewardResult:
    """Score 1 where the answer equals the label as text or by algebra, else 0. A label that cannot
    be read as mathematics gives a masked result, unless the answer is the same text.
    """
    answer = extract_math_answer(sample, params)
    if answer is None:
        return RewardResult(0.0, MALFORMED)
    label = sample.label.strip()
    return (
        RewardResult(1.0)
        if answer.text == label
        else _compare_by_algebra(label, answer, params.max_answer_chars)
    )


def extract_math_answer(sample: RewardSample, params: MathVerifyParams) -> MathAnswer | None:
    """Return the answer, or the whole response where it is prose that contains the answer; None
    where none can be read or the answer is too long.
    """
    if not params.can_read_response(sample):
        return None
    text = params.find_answer(sample)
    boxed = find_last_boxed(sample.response) if params.pattern is None else None
    is_prose = (
        params.pattern is None and boxed is None and PROSE.search(sample.response) is not None
    )
    text = text if boxed is None else boxed
    return (
        MathAnswer(text, is_prose)
        if text and (is_prose or len(text) <= params.max_answer_chars)
        else None
    )


def _compare_by_algebra(label: str, answer: MathAnswer, max_chars: int) -> RewardResult:
    """Return 1 or 0 by algebra. A label that math-verify cannot read gives a masked result; an
    answer that it cannot read, or that makes it raise, gives 0 with the status MALFORMED. There is
    no time limit but that of the process.
    """
    from math_verify import verify

    expected = [] if is_formula_too_large(label) else _parse_label(label)
    if not expected:
        return make_masked_result("bad_label", f"math-verify cannot read the label {label!r}.")
    try:
        found = _parse_prose(answer.text, max_chars) if answer.is_prose else []
        if not found and len(answer.text) <= max_chars and not is_formula_too_large(answer.text):
            found = _parse_formula(answer.text)
        if not found:
            return RewardResult(0.0, MALFORMED)
        return RewardResult(float(verify(expected, found, timeout_seconds=None)))
    except Exception:  # whatever the parser and the algebra raise, the answer has made them do it
        return RewardResult(0.0, MALFORMED)


@lru_cache(maxsize=4096)
def _parse_label(label: str) -> Any:
    """Parse a label as `_parse_formula` does, and cache the result."""
    return _parse_formula(label)


def _parse_formula(text: str) -> Any:
    """Return the expressions that math-verify reads in a formula, the best guess first; empty where
    it reads nothing.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    return parse(
        f"${text.strip('$ ').rstrip('.')}$", extraction_config=configs, parsing_timeout=None
    )


def _parse_prose(text: str, max_chars: int) -> list[Any]:
    """Return the expressions that math-verify's `parse` finds in prose: the last match that it can
    read, of the pattern with the best priority ("final answer is" before "answer" before any
    formula or number). Return [] where it finds none.

    Raise ValueError, before parsing, where a match is longer than `max_chars` or too large to
    evaluate.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify.parser import extract_match, get_extraction_regexes

    kinds = get_extraction_regexes([LatexExtractionConfig(), ExprExtractionConfig()])
    patterns = [
        (priority, pattern, kind) for of_kind, kind in kinds for pattern, priority in of_kind
    ]
    for _, alike in groupby(sorted(patterns, key=lambda one: one[0]), key=lambda one: one[0]):
        matches = [(match, kind) for _, pattern, kind in alike for match in pattern.finditer(text)]
        for match, kind in sorted(
            matches, key=lambda one: (one[0].end(), -one[0].start()), reverse=True
        ):
            answer = max(filter(None, match.groupdict().values()), key=len, default="")
            if len(answer) > max_chars or is_formula_too_large(answer):
                raise ValueError(f"the answer {answer[:80]!r} is too large.")
            value, as_text = extract_match(match, kind)
            if value is not None:
                return [value, *filter(None, [as_text])]
    return []
