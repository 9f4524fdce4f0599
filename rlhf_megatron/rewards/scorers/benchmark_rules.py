r"""The rules by which GSM8K, MATH and DAPO's problems are scored elsewhere: text after some
rules, no algebra.

    gsm8k      1 when the number behind the last "#### " is the label's
    math       1 when text in the last \boxed{...} equals the label after the rules of MATH
    math_dapo  1 when text behind the last "Answer:" equals the label after the rules of
               Minerva, else -1

They say what verl's scorers of the data sources openai/gsm8k, MATH and math_dapo say. The rules of
MATH are those of arXiv 2103.03874, Minerva's those of arXiv 2206.14858, both as in
lm-evaluation-harness. The end of a response is read also where it was cut by length. A label that
would equal an empty answer is masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rlhf_megatron.rewards.scorers.answer_params import ONE_TEXT
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    MAX_SCORE,
    REWARDS,
    RewardResult,
    RewardSample,
    make_bad_label_result,
)

# of the response, in which an answer is looked for
END_CHARS = 300
BOX_CHARS = 100

LEFT_OUT = ("\n", "\\!"), ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")

REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)

UNWRAPPED = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    *((rf"(\\{name}\{{)(.*?)(\}})", r"\2") for name in ("text", "textbf", "overline")),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


@dataclass(frozen=True)
class BenchmarkRuleParams:
    # regular expression of those that an answer can equal, and what that is
    answerable_labels: ClassVar[tuple[str, str]]
    wrong_score: float = 0.0  # of an answer that is not right or malformed; a right one scores 1

    def __post_init__(self) -> None:
        """Raise ValueError for a wrong_score above 0."""
        if not -MAX_SCORE <= self.wrong_score <= 0:
            raise ValueError(
                f"wrong_score ({self.wrong_score}) must be at most 0; 0 and -1 are usual."
            )

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return why no answer can equal the label, or ""; see `LabelCheckingParams`. A label may
        be a whole solution, for example.
        """
        pattern, form = self.answerable_labels
        if is_json:
            return f"is no text; {ONE_TEXT}"
        return (
            ""
            if re.fullmatch(pattern, label.strip())
            else f"can equal no answer, which is {form}; cut that out of it"
        )

    def describe_partial_reading(self, label: str) -> str:
        """Return how a label counts of which the rules drop numbers or their commas, or ""; see
        `PartialReadingParams`.
        """
        return ""


@dataclass(frozen=True)
class Gsm8kParams(BenchmarkRuleParams):
    answerable_labels = r"-?[0-9.,]*", "a number of digits, commas and points"

    def describe_partial_reading(self, label: str) -> str:
        """Return how a label counts whose commas do not stand between thousands, or ""."""
        label = label.strip()
        if "," not in label or re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d*)?", label):
            return ""
        return f"counts as {label.replace(',', '')!r}, since commas fall away"


@dataclass(frozen=True)
class MathParams(BenchmarkRuleParams):
    answerable_labels = r"(?s)(?!.*\\boxed).*", r"what stands within \boxed{...}"

    def describe_partial_reading(self, label: str) -> str:
        r"""Return how a label counts that has numbers behind a \text{ with a blank, which the rules
        take for a unit; "" for others.
        """
        answer, *units = label.split("\\text{ ")
        if len(units) != 1 or not re.search(r"\d", units[0].partition("}")[2]):
            return ""
        return f"counts as {answer.strip()!r} only"


@dataclass(frozen=True)
class MathDapoParams(BenchmarkRuleParams):
    answerable_labels = ".*", "on one line"
    wrong_score: float = -1.0  # of an answer that is not right or malformed; a right one scores 1

    def describe_partial_reading(self, label: str) -> str:
        """Return how a label with several equations counts, of which the rules read what stands
        behind the last sign; "" for others.
        """
        if label.count("=") < 2:
            return ""
        return f"counts as {_normalise_minerva(label)!r} only"


def _score_normalised_answer(
    sample: RewardSample,
    params: BenchmarkRuleParams,
    answer: str | None,
    normalise: Callable[[str], str],
) -> RewardResult:
    """Score 1 where answer and label are equal after `normalise`, else 0; MALFORMED for an answer
    of None. Where `normalise` raises IndexError or ValueError, compare the raw texts. A label that
    no answer can equal, or that is empty after `normalise`, is masked.
    """
    if problem := params.find_label_problem(sample.label):
        return make_bad_label_result(sample.label, problem)
    try:
        right, found = normalise(sample.label), None if answer is None else normalise(answer)
    except (IndexError, ValueError):
        right = sample.label
        found = answer
    if not right:
        return make_bad_label_result(sample.label, "equals an empty answer")
    return RewardResult(0.0, MALFORMED) if found is None else RewardResult(float(found == right))


@REWARDS.register("gsm8k", Gsm8kParams)
def score_gsm8k(sample: RewardSample, params: Gsm8kParams) -> RewardResult:
    """Score 1 where the number behind the last "#### " equals the label, else 0. Commas in either
    do not count, nor the text behind the number.
    """
    found = re.findall(r"#### (-?[0-9.,]+)", sample.response[-END_CHARS:])
    return _score_normalised_answer(
        sample, params, found[-1] if found else None, lambda text: text.strip().replace(",", "")
    )


@REWARDS.register("math", MathParams)
def score_math(sample: RewardSample, params: MathParams) -> RewardResult:
    r"""Score 1 where the answer in the last \boxed{...} equals the label after the rules of MATH,
    else 0.
    """
    return _score_normalised_answer(
        sample, params, _find_last_box(sample.response), _normalise_math
    )


@REWARDS.register("math_dapo", MathDapoParams)
def score_math_dapo(sample: RewardSample, params: MathDapoParams) -> RewardResult:
    r"""Score 1 where the answer behind the last "Answer:" equals the label after the rules of
    Minerva, else 0. Without "Answer:" compare the content of a \boxed{...} at the end as it is.
    """
    end = sample.response[-END_CHARS:]
    if found := re.findall(r"(?i)answer\s*:\s*([^\n]+)", end):
        return _score_normalised_answer(sample, params, found[-1], _normalise_minerva)
    return _score_normalised_answer(
        sample, params, _find_last_braced(end[-BOX_CHARS:], "\\boxed{"), str
    )


def _find_last_braced(text: str, opening: str) -> str | None:
    """Return the content of the last `opening` (which ends with a brace) up to its closing brace;
    None where there is none.
    """
    start = text.rfind(opening)
    depth = 0
    for place in range(start + len(opening) - 1, len(text)) if start >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + len(opening) : place]
    return None


def _find_last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, or None. A "\boxed 5$" without braces comes
    before all others.
    """
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    start = text.rfind("\\boxed")
    return (
        _find_last_braced(text[start:], "\\boxed{")
        if start >= 0 and text.startswith("\\boxed{", start)
        else None
    )


def _normalise_math(text: str) -> str:
    """Return the text after the rules of MATH, in their order. Raise IndexError or ValueError for
    text that the rules do not know.
    """
    for what in LEFT_OUT[0]:
        text = text.replace(what, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for what in LEFT_OUT[1]:
        text = text.replace(what, "")
    if "\\text{ " in text:
        text, _ = text.split("\\text{ ")  # a unit
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    first, *others = text.split("\\sqrt")
    text = first + "".join(
        "\\sqrt" + (one if one[0] == "{" else f"{{{one[0]}}}{one[1:]}") for one in others
    )
    text = _brace_fractions(text.replace(" ", ""))
    text = "\\frac{1}{2}" if text == "0.5" else text
    whole = re.fullmatch(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)", text, re.ASCII)
    return f"\\frac{{{whole.group(1)}}}{{{whole.group(2)}}}" if whole else text


def _brace_fractions(text: str) -> str:
    r"""Write \frac12 and \frac1{72} with braces. Raise IndexError where \frac ends the text."""
    first, *others = text.split("\\frac")
    for one in others:
        if one[0] != "{" and len(one) < 2:
            return text
        ends = (
            one
            if one[0] == "{"
            else f"{{{one[0]}}}" + (one[1:] if one[1] == "{" else f"{{{one[1]}}}{one[2:]}")
        )
        first += "\\frac" + ends
    return first


WORDS = (
    *(
        "square",
        "ways",
        "integers",
        "dollars",
        "mph",
        "inches",
        "hours",
        "km",
        "units",
        "\\ldots",
        "sue",
        "points",
    ),
    *(
        "feet",
        "minutes",
        "digits",
        "cents",
        "degrees",
        "cm",
        "gm",
        "pounds",
        "meters",
        "meals",
        "edges",
        "students",
    ),
    *(
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
    ),
    *(
        "\\text{\n}",
        "\\text{}",
        "\\mathrm{th}",
        "^\\circ",
        "^{\\circ}",
        "\\;",
        ",\\!",
        "{,}",
        '"',
        "\\dots",
    ),
)


def _normalise_minerva(text: str) -> str:
    """Return the text after the rules of Minerva, in their order."""
    text = text.split("=")[-1]
    for before, after in (*REPLACED, *((word, "") for word in WORDS)):
        text = text.replace(before, after)
    for pattern, kept in UNWRAPPED:
        text = re.sub(pattern, kept, text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()
