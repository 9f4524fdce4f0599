r"""1 when the answer is mathematically equal to the label, by the library math-verify; else 0.

The answer is the content of the last \boxed{...}, or the match of `pattern`, or the formula that
the library finds in the whole response. Text that equals the label's is right without algebra. An
answer that cannot be read as mathematics, or would take for ever to compute, is malformed, and so
is a last \boxed{ that is not closed. Label and answer are written anew before they are parsed
(math_spelling.py).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from math import log10
from typing import Any

from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.rewards.scorers.answer_params import (
    AnswerParams,
    find_last_box,
)
from rlhf_megatron.rewards.scorers.math_spelling import (
    NUMBERS_SIDE_BY_SIDE,
    PLAIN_NUMBER,
    find_loose_word,
    read_formula_spelling,
    respell_prose,
    strip_line_mark,
)
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    make_masked_result,
)

SHOWN_CHARS = 80  # of what a label's reading leaves out, in a message
MAX_DEPTH = 10  # of brackets; the parser's time doubles with each of them
MAX_DIGITS = 100_000  # of a power that would be worked out
MAX_FACTORIAL = 10_000
MAX_CHOOSE = 100_000

OPENING = re.compile(r"[({\[]")
POWER = re.compile(r"(\d+)\s*\^\s*(?:\{\s*(\d+)\s*\}|(\d+))")  # the library reads 2^10 as 2^{10}
FACTORIAL = re.compile(r"(\d+)\s*!|[)}\]]\s*!")
TWO_FACTORIALS = re.compile(r"!\s*!")  # the factorial of a factorial
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

# A mark that may be that of a sentence; in Markdown others may stand behind it.
EXCLAIMING = re.compile(r"[!?][*`_]*$")


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
    if TWO_FACTORIALS.search(text):
        return True
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
                f" {format_install_command('math')}."
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

    def describe_partial_reading(self, label: str) -> str:
        """Return which part of a label counts for nothing, or ""; see `PartialReadingParams`. The
        label is parsed for it, and not evaluated. Without the library return "".
        """
        label = label.strip()
        if not label or PLAIN_NUMBER.fullmatch(label) or find_spec("math_verify") is None:
            return ""
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        return _describe_partial_reading(label)

    def make_result_key(self, sample: RewardSample) -> str:
        """Return a key on which alone the result depends: the extracted answer and the label."""
        answer = extract_math_answer(sample, self)
        label = sample.label.strip()
        if answer is None:
            return json.dumps([None, label])
        kind = [answer.text, answer.is_prose, *(["exclaims"] if answer.may_exclaim else [])]
        return json.dumps([kind, label])


@dataclass(frozen=True)
class MathAnswer:
    text: str
    is_prose: bool  # the answer stands somewhere in it
    may_exclaim: bool = False  # a mark behind a number, as in 42!, may be that of a sentence


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
    r"""Return the answer, or the whole response where it is prose that contains the answer; None
    where none can be read or the answer is too long, or the last \boxed{ is not closed.
    """
    if not params.can_read_response(sample):
        return None
    if params.pattern is not None:
        text = params.find_answer(sample)
        is_prose = False
        may_exclaim = text is not None and EXCLAIMING.search(text) is not None
    elif (box := find_last_box(sample.response)).is_open:
        return None
    elif box.content is not None:
        text = box.content
        is_prose = False
        may_exclaim = False
    else:
        text = strip_line_mark(sample.response.strip())
        is_prose = PROSE.search(text) is not None
        may_exclaim = not is_prose and EXCLAIMING.search(text) is not None
    return (
        MathAnswer(text, is_prose, may_exclaim)
        if text and (is_prose or len(text) <= params.max_answer_chars)
        else None
    )


def _compare_by_algebra(label: str, answer: MathAnswer, max_chars: int) -> RewardResult:
    """Return 1 or 0 by algebra. A label that math-verify cannot read gives a masked result; an
    answer that it cannot read, or that makes it raise, gives 0 with the status MALFORMED. There is
    no time limit but that of the process.
    """
    expected = _read_label(label)
    if not any(expected):
        return make_masked_result("bad_label", f"math-verify cannot read the label {label!r}.")
    try:
        readings = _iterate_answer_readings(answer, max_chars)
        main: Any = next(readings, [])
        if _is_any_equal(expected, main):
            return RewardResult(1.0)
        has_reading = bool(main)
        for alternative in readings:
            has_reading = has_reading or bool(alternative)
            # Not with the alternatives of the label: 3t and 3s are both 3 without a unit.
            if _is_any_equal(expected[:1], alternative):
                return RewardResult(1.0)
    except Exception:  # whatever the parser and the algebra raise, the answer has made them do it
        return RewardResult(0.0, MALFORMED)
    return RewardResult(0.0) if has_reading else RewardResult(0.0, MALFORMED)


def _is_any_equal(expected: Sequence[Any], reading: Any) -> bool:
    """Return whether one of the label's readings equals that of an answer."""
    from math_verify import verify

    return any(
        verify(label_reading, reading, timeout_seconds=None)
        for label_reading in expected
        if label_reading and reading
    )


def _iterate_answer_readings(answer: MathAnswer, max_chars: int) -> Iterator[Any]:
    """Yield the readings of an answer, the main one first, each as the list that math-verify
    compares; [] for one that it cannot read, or that would take too long to evaluate.
    """
    if answer.is_prose and (prose := _parse_prose(respell_prose(answer.text), max_chars)):
        yield prose
        return
    if len(answer.text) > max_chars:
        return
    spelling = read_formula_spelling(answer.text, answer.may_exclaim)
    for text in (spelling.main, *spelling.alternatives):
        yield [] if is_formula_too_large(text) else _parse_formula(text)


@lru_cache(maxsize=4096)
def _read_label(label: str) -> tuple[Any, ...]:
    """Return the readings of a label as `_iterate_answer_readings` does, and cache them. Of a label
    in prose the last number or formula counts.
    """
    spelling = read_formula_spelling(label)
    if spelling.is_prose:
        return (_parse_sentence(spelling.main),)
    return tuple(
        [] if is_formula_too_large(text) else _parse_formula(text)
        for text in (spelling.main, *spelling.alternatives)
    )


def _parse_sentence(sentence: str) -> list[Any]:
    """Return the last number or formula of a label in prose, as `_parse_prose` does; [] where it
    would take too long to evaluate.
    """
    try:
        return _parse_prose(sentence, len(sentence))
    except ValueError:
        return []


def _describe_partial_reading(label: str) -> str:
    """Return which part of a label counts for nothing when it is scored, as the end of a sentence
    that begins with the label; "" where the whole label counts.
    """
    spelling = read_formula_spelling(label)
    if spelling.is_prose:
        expressions = _parse_sentence(spelling.main)
        return f"counts as {expressions[0]} only" if expressions else "holds no number to count"
    if spelling.left_out:
        return f"counts without {spelling.left_out[:SHOWN_CHARS]!r}, too"
    if is_formula_too_large(spelling.main):
        return "is too large to work out and is masked"
    if not _is_whole_formula(spelling.main):
        expressions = _parse_formula(spelling.main)  # the numbers in it, without the rest
        if expressions and not isinstance(expressions[0], str):
            return f"counts as {expressions[0]} only"
        return "cannot be read as mathematics: only the same text is right"
    if spelling.alternatives:
        return ""
    if numbers := NUMBERS_SIDE_BY_SIDE.search(spelling.main):
        return f"counts {numbers.group()!r} as the sum of two numbers"
    word = find_loose_word(spelling.main)
    return f"counts {word!r} as a product of its letters" if word else ""


def _is_whole_formula(text: str) -> bool:
    """Return whether the parser of math-verify reads the whole text as a formula. Where it does
    not, math-verify takes the last number in the text instead.
    """
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy, normalize_latex

    formula = normalize_latex(text, _make_latex_config().normalization_config)
    try:
        _Latex2Sympy().create_parser(formula).math()
    except Exception:  # the parser raises this very class
        return False
    return True


@lru_cache(maxsize=1)
def _make_latex_config() -> Any:
    """Return how math-verify reads LaTeX here: as by default, but units stay, since they have been
    taken off already. math-verify takes off single letters, of expressions too: x+2t would be x+2.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True,
            units=False,
            malformed_operators=True,
            nits=True,
            boxed="all",
            equations=False,
        )
    )


def _parse_formula(text: str) -> Any:
    """Return the expressions that math-verify reads in a formula that has been written anew, the
    best guess first; empty where it reads nothing.
    """
    from math_verify import ExprExtractionConfig, parse

    configs = [_make_latex_config(), ExprExtractionConfig()]
    return parse(f"${text}$", extraction_config=configs, parsing_timeout=None)


def _parse_prose(text: str, max_chars: int) -> list[Any]:
    """Return the expressions that math-verify's `parse` finds in prose: the last match that it can
    read, of the pattern with the best priority ("final answer is" before "answer" before any
    formula or number). Return [] where it finds none.

    Raise ValueError, before parsing, where a match is longer than `max_chars` or too large to
    evaluate.
    """
    from math_verify import ExprExtractionConfig
    from math_verify.parser import extract_match, get_extraction_regexes

    kinds = get_extraction_regexes([_make_latex_config(), ExprExtractionConfig()])
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
