r"""Spellings of numbers and formulas, written as the LaTeX that math-verify reads whole.

math-verify reads the first part of what it does not know and drops the rest without a word:
2**10 is 2, 1½ is 1, 1\,000 is 0. `read_formula_spelling` writes one label or answer anew;
`respell_prose` does so with the numbers and formulas of a whole response. Both sides of a
comparison are written anew by the same rules.

Some spellings have two meanings (2t: twice t, or two tonnes). They get a main reading, which is an
expression, and alternatives. Two alternatives are never compared with each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from unicodedata import numeric

from rlhf_megatron.rewards.scorers.math_units import (
    COUNTED_WORDS,
    JOINING_WORDS,
    KNOWN_WORDS,
    MATH_WORDS,
    NUMBER_WORDS,
    SCALE_WORDS,
    UNIT_NAMES,
)

# Most labels and answers: nothing to write anew.
PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")

# --- characters -----------------------------------------------------------------------------------

VULGAR_FRACTIONS = {
    character: Fraction(numeric(character)).limit_denominator(10)
    for character in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
RAISED_TO_ASCII = str.maketrans(SUPERSCRIPTS + SUBSCRIPTS, "0123456789+-n" * 2)
DASHES = "‒–—―"  # figure dash, en dash, em dash, horizontal bar
CHARACTERS = str.maketrans(
    {
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        **dict.fromkeys("−﹣‐‑", "-"),  # minus sign, small hyphen-minus, hyphens
        **dict.fromkeys("\u00a0\u202f\u205f\u3000", "\\,"),
        **dict.fromkeys(map(chr, range(0x2000, 0x200B)), "\\,"),
        **dict.fromkeys("\u200b\u2060\ufeff\u200e\u200f", ""),
        **dict.fromkeys("·∙•⋅", "\\cdot "),
        **dict.fromkeys("′’‘", "'"),
        **dict.fromkeys("″“”", '"'),
        **dict.fromkeys("º˚", "°"),
        **dict.fromkeys("∞", "\\infty "),
        **dict.fromkeys("∈", "\\in "),
        **dict.fromkeys("±", "\\pm "),
        **dict.fromkeys("μ", "µ"),
        **dict.fromkeys("⁄", "/"),
    }
)

# --- spaces ---------------------------------------------------------------------------------------

THIN = r"(?:\\[,;:> ]|\\(?:thinspace|quad|qquad|enspace)(?![A-Za-z])|~)"
THIN_SPACE = re.compile(THIN)
GROUPING_SPACE = re.compile(rf"(?<=\d)\s*{THIN}\s*(?=\d{{3}}(?!\d))")
# 1 000 000 with plain blanks
BLANK_GROUPS = re.compile(r"(?<![\d.,/^_])[1-9]\d{0,2}(?: \d{3})+(?![\d/])")
BRACED_COMMA = re.compile(r"(?<=\d)\s*\{,\}\s*(?=(\d+))")

# --- marks around the whole text ------------------------------------------------------------------

PAIRED_MARKS = (
    ("\\[", "\\]"),
    ("\\(", "\\)"),
    ("**", "**"),
    ("__", "__"),
    ("`", "`"),
    ("*", "*"),
    ("_", "_"),
)
LINE_MARK = re.compile(
    r"^(?:(?:#{1,6}|>)\s+)*(?:[-*+•]\s+(?=[$\\(*`_]*[-+]?(?:[\d.,/]*\d|\\d?frac\{\d+\}\{\d+\})"
    r"[*`_$)\\!?.]*$))?"
)
LAST_STOP = re.compile(r"(?<!\\)[.,;]+$")
EXCLAIMED_NUMBER = re.compile(r"^([-+]?[\d.,/]*\d)\s*[!?]+$")

# --- numbers --------------------------------------------------------------------------------------

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
POWER_OF_TEN = re.compile(rf"(?<![\w.\\}}])({NUMBER})([eE])([-+]?)(\d+)(?![\w.])")
CROSS_TEN = re.compile(r"(\d)\s*[xX]\s*10\s*(?=\^)")
SCALE = re.compile(rf"(\d)\s*({'|'.join(SCALE_WORDS)})(?![A-Za-z])")
MIXED_NUMBER = re.compile(r"(?<![\d.,/^_}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,])")
SMALL_FRACTION = re.compile(f"([{SUPERSCRIPTS}]+)/([{SUBSCRIPTS}]+)")
RAISED = re.compile(f"[{SUPERSCRIPTS}]+")
LOWERED = re.compile(f"[{SUBSCRIPTS}]+")
VULGAR = re.compile(f"(\\^\\s*)?([{''.join(VULGAR_FRACTIONS)}])")
MIXED_VULGAR = re.compile(f"(?:(?<!\\d)(\\d+))?\\s?([{''.join(VULGAR_FRACTIONS)}])")
ROOT = re.compile(
    r"([√∛∜])\s*(\([^()√∛∜]*\)|\{[^{}√∛∜]*\}|\d+(?:\.\d+)?|\\frac\{[^{}]*\}\{[^{}]*\}"
    r"|\\[a-z]+|[A-Za-zπ])"
)
ROOT_COMMANDS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
SIGNED_POWER = re.compile(r"\^\s*([-+])\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))")
STACKED_POWER = re.compile(r"\^\s*(\w+)\s*\^\s*(\{[^{}]*\}|\w+)")
BARE_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
BARE_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)h?|cot|csc|log|ln|(?:sec|exp)(?=\s*\())(?![A-Za-z])"
)
ROMAN_CONSTANT = re.compile(r"\\(?:mathrm|text|textrm|operatorname)\s*\{\s*([ie])\s*\}")

DEGREE = r"(?:°|\^\s*\{?\s*\\circ\s*\}?|\\degree|\s*degrees?)"
MINUTE = r"(?:'(?!')|\^\s*\{?\s*\\prime\s*\}?(?!\s*\\prime)|\\prime(?!\s*\\prime)|\s*minutes?)"
SECOND = r"(?:''|\"|\^\s*\{?\s*\\prime\s*\\prime\s*\}?|\s*seconds?)"
DEGREES_AND_MINUTES = re.compile(
    rf"(?<![\d.])(\d+)\s*{DEGREE}[\s,]*(?:and\s+)?(\d+(?:\.\d+)?)\s*{MINUTE}"
    rf"(?:[\s,]*(?:and\s+)?(\d+(?:\.\d+)?)\s*{SECOND})?"
)
LAST_DEGREE = re.compile(rf"(?<=[\d}}])\s*{DEGREE}\s*[CF]?\s*$")

# as programs write them: 1_000, 0x1F
UNDERSCORE_GROUPS = re.compile(r"(?<![\w.\\])[1-9]\d{0,2}(?:_\d{3})+(?!\w)")
PREFIXED_NUMBER = re.compile(
    r"(?<![\w.\\])0(?:[xX][0-9A-Fa-f]{1,16}|[oO][0-7]{1,21}|[bB][01]{1,64})(?!\w)"
)
# two numbers with nothing between them, which math-verify adds up
NUMBERS_SIDE_BY_SIDE = re.compile(rf"(?<![\w.^_{{])(?<!frac )(?<!frac){NUMBER}\s+{NUMBER}(?![\w.])")
BASE_WORDS = {word: value for word, value in NUMBER_WORDS.items() if value > 1}
IN_BASE = re.compile(
    r"(?<![\w.\\^{])(\d[0-9A-F]*)\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{\s*)?(\w+)\s*\}?\s*\}|(\d{1,2})(?!\w))"
)

DASH = rf"(?:[{DASHES}]|\\text\s*\{{\s*(?:-{{1,3}}|[{DASHES}])\s*\}}|\\textendash(?:\{{\}})?)"
RANGE_END = rf"[-+]?\s*(?:{NUMBER}|\d+/\d+|\\d?frac\{{\d+\}}\{{\d+\}})(?:\s*\\?%|\s*°)?"
RANGE = re.compile(
    rf"((?:^|[=,;(\[≈]|\\approx)\s*)({RANGE_END})\s*{DASH}\s*({RANGE_END})"
    r"(?=\s*(?:$|[,;)\]])|\s*[A-Za-z]{2}|\s+[A-Za-z]|\s*\\(?:text|mathrm|mbox))"
)
ANY_DASH = re.compile(DASH)

# --- units ----------------------------------------------------------------------------------------

CURRENCY = r"(?:US\$|\\\$|\$|[€£¥₹₩₽]|\\(?:pounds|euro|yen)\b|(?:USD|EUR|GBP|Rs\.?)\s)"
FIRST_CURRENCY = re.compile(rf"^([-+]?)\s*{CURRENCY}\s*(?=[-\d.\\])")
LAST_CURRENCY = re.compile(r"(?<=\d)\s*(?:\\\$|[$€£¥₹₩₽¢])$")
EQUALS_IN_WORDS = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s+(?:is|equals)\s+(?=[-+\d\\])")
LATEX_TEXT = r"\\(?:text|mbox|mathrm|textrm|textnormal|textit|mathit|textbf|operatorname|hbox)"
TEXT_PIECE = rf"{LATEX_TEXT}\s*\{{([^{{}}]*)\}}"
UNIT_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)"
LAST_TEXT = re.compile(
    rf"(?<=[^\s=+\-*/(,;&^_])(?:\s|\\cdot\b|[/*])*"
    rf"(?:(?:{TEXT_PIECE}{UNIT_POWER}?|\\d?frac\s*\{{\s*{TEXT_PIECE}{UNIT_POWER}?\s*\}}"
    rf"\s*\{{\s*{TEXT_PIECE}{UNIT_POWER}?\s*\}})(?:\s|\\cdot\b|[/*.])*)+$"
)
ORDINAL = re.compile(
    rf"(?<=\d)\s*(?:\^\s*\{{?\s*(?:{LATEX_TEXT}\s*\{{)?\s*)?(?:st|nd|rd|th)[\s}}]*$"
)
TEXT_CONTENT = re.compile(TEXT_PIECE)
PERCENT_TEXT = re.compile(
    rf"\s*(?:{LATEX_TEXT}\s*\{{\s*(?:percent|per cent|pct|percentage|\\?%)\s*\}}|\bper\s+cent\b)"
)
# A number, and letters behind it that may be a unit.
LAST_LETTERS = re.compile(
    r"^(.*?[\d})\]%])(\s*)((?:[A-Za-zµΩ]|\\cdot)(?:[A-Za-zµΩ\s/*.^{}\d()-]|\\cdot)*)$", re.DOTALL
)
LAST_FRACTION = re.compile(r"^(.*[\d})\]%])\s*\\[dt]?frac\{([^{}\d]+)\}\{([^{}]+)\}$", re.DOTALL)
LETTER_AT_THE_END = re.compile(r"[A-Za-zµΩ.](?:\s*\^?\s*\{?\s*-?\d\s*\}?)?\)?$")
SINGLE_LETTERS = "[mgshltdcLNJWVACFKΩ]"  # metre, gram ... or a variable
UNIT_NAME = "|".join(sorted(UNIT_NAMES, key=len, reverse=True))
UNIT_FACTOR = (
    rf"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?(?:{UNIT_NAME}|{SINGLE_LETTERS})"
    rf"(?![A-Za-z])\.?(?:{UNIT_POWER}|\d(?!\d))?"
)
UNIT = re.compile(rf"{UNIT_FACTOR}(?:\s*(?:/|\*|\\cdot|\bper\b|\s)\s*\(?{UNIT_FACTOR}\)?){{0,3}}")
LETTER_FACTOR = rf"{SINGLE_LETTERS}{UNIT_POWER}?"
AMBIGUOUS_UNIT = re.compile(rf"{LETTER_FACTOR}(?:\s*(?:/|\*|\\cdot|\s)\s*\(?{LETTER_FACTOR}\)?)*")
NOT_UNITS = MATH_WORDS | JOINING_WORDS
UNIT_WORDS = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+){0,4}")
COMMAND = re.compile(r"\\[A-Za-z]+")
LETTER = re.compile(r"[A-Za-z]")

# --- words ----------------------------------------------------------------------------------------

WORDS_ONLY = re.compile(r"[A-Za-z](?:[A-Za-z' -]*[A-Za-z])?")
WORD = re.compile(r"[A-Za-z]{2,}(?:'[a-z]+)?")
FORMULA_SIGN = re.compile(r"[=+*^_<>\\|{}$]")
LOOSE_WORD = re.compile(r"(?<![A-Za-z_{])[A-Za-z]{2,}(?![A-Za-z_(}])")
ITEM_NUMBER = re.compile(r"^\s*\(?\d{1,3}[.)]\s+(?=[A-Za-z])")
NUMBER_WORD = re.compile(rf"\b({'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)
MATH_SEGMENT = re.compile(
    r"(\$\$[^$]+\$\$|(?<!\\)\$[^$\n]+\$"
    r"|\\\((?:[^\\]|\\(?![()]))+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))+\\\])"
)
# What makes prose worth writing anew: these spellings only.
RESPELLED = re.compile(
    rf"[^\x00-\x7f]|\d\s*\*\*\s*[\d(]|\d[eE][-+]?\d|\d_[\d{{]|\d\s*{THIN}|\d\^-|\\text\{{-"
)
MATH_RESPELLED = re.compile(
    RESPELLED.pattern + r"|[A-Za-z](?:\^\s*\{?-?\d\}?)?\s*\$|\\mathrm|\\text"
)


@dataclass(frozen=True)
class FormulaSpelling:
    """A label or an answer, written anew."""

    main: str
    alternatives: tuple[str, ...] = ()  # other meanings of an ambiguous spelling
    is_prose: bool = False  # main is a sentence: its last number or formula counts
    left_out: str = ""  # words that were taken for a unit, but are none that we know


@lru_cache(maxsize=4096)
def read_formula_spelling(text: str, may_exclaim: bool = False) -> FormulaSpelling:
    """Return a label or an answer, written anew. With `may_exclaim` a mark behind a number, as in
    42!, may be that of a sentence: the text is a whole response, or what a pattern cut out of one.
    """
    text = _strip_marks(text)
    if PLAIN_NUMBER.fullmatch(text):
        return FormulaSpelling(text)
    alternatives = []
    if may_exclaim and (exclaimed := EXCLAIMED_NUMBER.match(text)):
        alternatives.append(exclaimed.group(1))
    if WORDS_ONLY.fullmatch(text) and len(text) > 2:
        number = NUMBER_WORDS.get(text.lower())
        alternatives.append(f"\\text{{{text}}}" if number is None else str(number))
    text = _respell_characters(text)
    text = _respell_numbers(text)
    if (power := POWER_OF_TEN.search(text)) is not None:
        if power.group(2) == "e" and power.group(3):  # 2e-3: also twice e, less three
            alternatives.append(text)
        text = POWER_OF_TEN.sub(_write_power_of_ten, text)
    text, unit = split_unit(text)
    if unit.is_ambiguous:
        alternatives.append(text)
        text += unit.text
    if _is_sentence(text):
        return FormulaSpelling(respell_prose(_number_the_words(text)), (), True)
    return FormulaSpelling(text, tuple(alternatives), False, unit.unknown_words)


def strip_line_mark(text: str) -> str:
    """Return a response of one number without the mark of a list's item, a heading or a quotation
    before it. Of "- x + 5" the first character may be a minus, and stays.
    """
    return LINE_MARK.sub("", text, count=1)


def _strip_marks(text: str) -> str:
    """Return the text without what surrounds it: dollars, LaTeX's brackets of formulas and the
    marks of Markdown.
    """
    text = LAST_STOP.sub("", text.strip("$ \t\n"))
    is_changed = True
    while is_changed:
        is_changed = False
        for opening, closing in PAIRED_MARKS:
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in text[len(opening) : -len(closing)]  # no second formula
            ):
                text = LAST_STOP.sub("", text[len(opening) : -len(closing)].strip("$ \t\n"))
                is_changed = True
    if "**" in text:  # one mark of a pair, of which a pattern cut the other off
        text = text.removeprefix("**").removesuffix("**").strip()
    return text


def _respell_characters(text: str) -> str:
    """Return the text with ASCII and LaTeX in place of other characters, without thin spaces, and
    with an interval in place of a range of two numbers.
    """
    if not text.isascii():
        text = text.translate(CHARACTERS)
        text = SMALL_FRACTION.sub(_write_small_fraction, text)
        text = RAISED.sub(lambda raised: f"^{{{raised.group().translate(RAISED_TO_ASCII)}}}", text)
        text = LOWERED.sub(lambda low: f"_{{{low.group().translate(RAISED_TO_ASCII)}}}", text)
        text = VULGAR.sub(_write_vulgar_fraction, text)
        text = _write_roots(text)
    if "\\" in text or "~" in text:
        text = GROUPING_SPACE.sub("", text.replace("\\!", ""))
        text = THIN_SPACE.sub(" ", text).strip()
        text = ROMAN_CONSTANT.sub(r"\1", text)
    if "{,}" in text:
        text = BRACED_COMMA.sub(
            lambda comma: "," if len(comma.group(1)) % 3 == 0 else ".",
            text,
        )
    if " " in text:
        text = BLANK_GROUPS.sub(lambda groups: groups.group().replace(" ", ""), text)
    if not text.isascii() or "\\text" in text:
        text = RANGE.sub(_write_interval, text)
        text = ANY_DASH.sub("-", text)
    return text


def _respell_numbers(text: str) -> str:
    """Return the text with LaTeX in place of Python's powers, mixed numbers, degrees and minutes,
    numbers in another base and words such as million; without signs of currencies.
    """
    if "**" in text:
        text = re.sub(r"\s*\*\*\s*", "^", text)
    if "^" in text:
        text = CROSS_TEN.sub(r"\1\\times 10", text)
        text = SIGNED_POWER.sub(r"^{\1\2}", text)
        text = STACKED_POWER.sub(r"^{\1^\2}", text)
    if "/" in text:
        text = MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    text = PREFIXED_NUMBER.sub(lambda number: str(int(number.group(), 0)), text)
    if "_" in text:
        text = UNDERSCORE_GROUPS.sub(lambda number: number.group().replace("_", ""), text)
        text = IN_BASE.sub(_write_number_in_base, text)
    if "°" in text or "\\circ" in text or "degree" in text:
        text = DEGREES_AND_MINUTES.sub(_write_degrees, text)
        text = LAST_DEGREE.sub("", text)
    if "pi" in text:
        text = BARE_PI.sub(r"\\pi ", text)
    if LETTER.search(text):
        text = EQUALS_IN_WORDS.sub(r"\1 = ", text)
        text = ORDINAL.sub("", text)
        text = BARE_FUNCTION.sub(r"\\\1 ", text)
        text = SCALE.sub(lambda scale: scale.group(1) + SCALE_WORDS[scale.group(2)], text)
    text = FIRST_CURRENCY.sub(r"\1", text)
    return LAST_CURRENCY.sub("", text)


def _write_small_fraction(fraction: re.Match[str]) -> str:
    r"""Return \frac for a fraction of raised and lowered digits."""
    numerator, denominator = (part.translate(RAISED_TO_ASCII) for part in fraction.groups())
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _write_vulgar_fraction(vulgar: re.Match[str]) -> str:
    r"""Return \frac for a character such as ½, in braces where it is an exponent."""
    value = VULGAR_FRACTIONS[vulgar.group(2)]
    written = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"^{{{written}}}" if vulgar.group(1) else written


def _write_roots(text: str) -> str:
    r"""Return the text with \sqrt in place of √, the innermost root first."""
    for _ in range(text.count("√") + text.count("∛") + text.count("∜")):
        text = ROOT.sub(_write_root, text)
    return text


def _write_root(root: re.Match[str]) -> str:
    r"""Return \sqrt{...} of what stands behind the sign, without brackets around it."""
    radicand = root.group(2)
    if radicand[0] in "({":
        radicand = radicand[1:-1]
    return f"{ROOT_COMMANDS[root.group(1)]}{{{radicand}}}"


def _write_interval(span: re.Match[str]) -> str:
    """Return the closed interval from one end of a range to the other."""
    first, last = (span.group(place).replace(",", "") for place in (2, 3))
    return f"{span.group(1)}\\left[{first},{last}\\right]"


def _write_power_of_ten(power: re.Match[str]) -> str:
    """Return 1e6 as 1 times 10^{6}."""
    sign = power.group(3).replace("+", "")
    return f"{power.group(1)}\\times 10^{{{sign}{power.group(4)}}}"


def _write_degrees(angle: re.Match[str]) -> str:
    """Return the degrees of an angle in degrees, minutes and perhaps seconds, as a fraction."""
    degrees, minutes, seconds = angle.groups(default="0")
    value = Fraction(degrees) + Fraction(minutes) / 60 + Fraction(seconds) / 3600
    if value.denominator == 1:
        return str(value.numerator)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _write_number_in_base(number: re.Match[str]) -> str:
    r"""Return the symbol \zeta with an index that stands for the digits and their base, so that
    the number equals itself only; of a number in base 10 its digits; what is no such number as it
    is.
    """
    digits = number.group(1)
    base_text = number.group(2) or number.group(3)
    base = int(base_text) if base_text.isdigit() else BASE_WORDS.get(base_text.lower(), 0)
    if base == 10 and digits.isdigit():
        return digits
    try:
        value = int(digits, base) if 2 <= base <= 36 else None
    except ValueError:
        value = None
    return number.group() if value is None else f"\\zeta_{{{value}{base:02d}}}"


@dataclass(frozen=True)
class UnitText:
    """What stands behind a number."""

    text: str = ""
    is_ambiguous: bool = False  # its letters may also be variables
    unknown_words: str = ""


def split_unit(text: str) -> tuple[str, UnitText]:
    """Return the text in front of the unit at its end, and the unit. Words behind a number are one.
    Without a unit return the text as it is.
    """
    if "percent" in text or "pct" in text or "per cent" in text or "%" in text:
        text = PERCENT_TEXT.sub(r"\\%", text)
    if text.endswith("}") or text[-3:-1] == "}^" or "\\text" in text or "\\mathrm" in text:
        last_text = LAST_TEXT.search(text)
        if last_text is not None:
            words = " ".join(map(_take_content, TEXT_CONTENT.finditer(last_text.group())))
            is_known = _is_unit(words) or not words.strip()
            return text[: last_text.start()], UnitText("", False, "" if is_known else words.strip())
    if (fraction := LAST_FRACTION.match(text)) is not None:
        number, numerator, denominator = fraction.groups()
        if UNIT.fullmatch(unit := f"{numerator}/{denominator}"):
            is_ambiguous = AMBIGUOUS_UNIT.fullmatch(unit) is not None
            return number, UnitText(text[len(number) :], is_ambiguous)
    if not LETTER_AT_THE_END.search(text):
        return text, UnitText()
    letters = LAST_LETTERS.match(text)
    if letters is None:
        return text, UnitText()
    number, blank, unit = letters.groups()
    if LETTER.search(COMMAND.sub("", number)):
        return text, UnitText()
    unit = unit.rstrip(". ")
    if UNIT.fullmatch(unit):
        return number, UnitText(blank + unit, AMBIGUOUS_UNIT.fullmatch(unit) is not None)
    unit_words = unit.split()
    if (
        blank
        and UNIT_WORDS.fullmatch(unit)
        and max(map(len, unit_words)) > 2
        and NOT_UNITS.isdisjoint(map(str.lower, unit_words))
    ):
        unknown_words = "" if _is_unit(unit) else unit
        return number, UnitText(blank + unit, unknown_words != "", unknown_words)
    return text, UnitText()


def _take_content(piece: re.Match[str]) -> str:
    r"""Return what stands within \text{...}."""
    return str(piece.group(1))


def _is_unit(words: str) -> bool:
    """Return whether all words are units or things that problems count."""
    names = re.findall(r"[A-Za-zµΩ]+", words)
    return all(
        name in UNIT_NAMES or name.lower() in COUNTED_WORDS or len(name) == 1 for name in names
    )


def _is_sentence(text: str) -> bool:
    """Return whether the text is a sentence with a number in it, and no formula."""
    if FORMULA_SIGN.search(text):
        return False
    words = [word for word in WORD.findall(text) if word.lower() not in MATH_WORDS]
    has_number = any(map(str.isdigit, text)) or NUMBER_WORD.search(text) is not None
    return len(words) > 1 and max(map(len, words)) > 2 and has_number


def find_loose_word(formula: str) -> str:
    r"""Return the first word in a formula that stands neither in \text{...} nor for a function, or
    "". math-verify takes such a word for a product of its letters.
    """
    bare = TEXT_CONTENT.sub(" ", formula)
    words = LOOSE_WORD.findall(COMMAND.sub(" ", bare))
    return next(
        (
            word
            for word in words
            # two letters are a product of variables, unless they are a unit
            if word in UNIT_NAMES or (len(word) > 2 and word.lower() not in KNOWN_WORDS)
        ),
        "",
    )


def _number_the_words(sentence: str) -> str:
    """Return the sentence with digits in place of words such as five, and without the number that
    it has as an item of a list.
    """
    sentence = ITEM_NUMBER.sub("", sentence)
    return NUMBER_WORD.sub(lambda word: str(NUMBER_WORDS[word.group().lower()]), sentence)


def respell_prose(text: str) -> str:
    """Return prose with its formulas written anew, and with numbers outside of formulas as
    math-verify reads them in prose.
    """
    if RESPELLED.search(text) is None and MATH_RESPELLED.search(text) is None:
        return text
    pieces = MATH_SEGMENT.split(text)
    for place, piece in enumerate(pieces):
        if place % 2:
            pieces[place] = _respell_segment(piece)
        elif RESPELLED.search(piece):
            pieces[place] = _respell_plain_piece(piece)
    return "".join(pieces)


def _respell_segment(segment: str) -> str:
    """Return a formula with its marks, written anew. What lies between the signs of two prices is
    no formula.
    """
    width = 1 if segment[0] == "$" and segment[1] != "$" else 2
    inner = segment[width:-width]
    if width == 1 and inner != inner.strip():
        return segment
    if "\\boxed" in inner or not MATH_RESPELLED.search(inner + "$"):
        return segment
    return f"{segment[:width]}{read_formula_spelling(inner).main}{segment[-width:]}"


def _respell_plain_piece(piece: str) -> str:
    """Return a piece of prose without formulas, with its numbers written anew: as digits, or where
    they have roots, as formulas.
    """
    if not piece.isascii():
        piece = MIXED_VULGAR.sub(_write_improper_fraction, piece)
        piece = PROSE_RANGE.sub(_in_dollars(_write_interval), piece)
        piece = piece.translate(PROSE_CHARACTERS)
        piece = RAISED.sub(lambda run: f"^({run.group().translate(RAISED_TO_ASCII)})", piece)
        piece = PROSE_ROOT.sub(lambda root: f"${_write_roots(root.group())}$", piece)
        piece = DEGREES_AND_MINUTES.sub(_write_plain_degrees, piece)
    piece = GROUPING_SPACE.sub("", piece)
    piece = PROSE_POWER.sub("^", piece)
    piece = re.sub(r"(?<=\d)\^(-\d+)", r"^(\1)", piece)
    piece = IN_BASE.sub(_in_dollars(_write_number_in_base), piece)
    return POWER_OF_TEN.sub(r"\1*10^(\3\4)", piece)


PROSE_CHARACTERS = str.maketrans(
    {
        character: written
        for character, written in CHARACTERS.items()
        if chr(character) not in "·∙•⋅∞∈±’‘“”\n"
    }
)
PROSE_RANGE = re.compile(
    rf"((?<![\w.,/^–])\s*)({RANGE_END})\s*{DASH}\s*({RANGE_END})(?![\d/^(*]|[.,]\d)"
)
PROSE_ROOT = re.compile(
    r"(?<![\d.])[-+]?(?:\d+(?:\.\d+)?)?\s?[√∛∜]\s?(?:\([^()]*\)|\d+(?:\.\d+)?)(?:\s*/\s*\d+)?"
)
PROSE_POWER = re.compile(r"(?<=[\d)])\s*\*\*\s*(?=[-(\d])")


def _in_dollars(write: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    """Return a function that writes a match as `write` does, with dollars around a formula."""

    def write_formula(match: re.Match[str]) -> str:
        """Return the match written anew, with dollars where it has become a formula."""
        written = write(match)
        return f" ${written.strip()}$" if "\\" in written else written

    return write_formula


def _write_improper_fraction(mixed: re.Match[str]) -> str:
    """Return 1½ as 3/2."""
    value = int(mixed.group(1) or 0) + VULGAR_FRACTIONS[mixed.group(2)]
    return f"{value.numerator}/{value.denominator}"


def _write_plain_degrees(angle: re.Match[str]) -> str:
    """Return an angle in degrees and minutes as a decimal number."""
    degrees, minutes, seconds = angle.groups(default="0")
    value = Fraction(degrees) + Fraction(minutes) / 60 + Fraction(seconds) / 3600
    return f"{value.numerator}/{value.denominator}"
