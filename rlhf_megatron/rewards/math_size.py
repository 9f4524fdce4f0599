"""Whether a mathematical text asks for more computing than any answer needs. Pure text, no algebra.

A verifier that meets 9^{9^{9}} works out its 370 million digits. What is seen here from the text does not reach it.
"""

from __future__ import annotations

import re
from math import log10

MAX_DEPTH = 10  # of brackets; the parser's time doubles with each of them
MAX_DIGITS = 100_000  # of a power that would be worked out
MAX_FACTORIAL = 10_000
MAX_CHOOSE = 100_000

OPENING = re.compile(r"[({\[]")
POWER = re.compile(r"(\d+)\s*\^\s*(?:\{\s*(\d+)\s*\}|(\d))")
FACTORIAL = re.compile(r"(\d+)\s*!|[)}\]]\s*!")
CHOOSE = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)\s*\}|\\choose|\bC\s*\(\s*(\d+)")
SHRUNK = "9" * 7  # stands for a number of more digits than an exponent may have


def is_too_large(text: str) -> bool:
    """True for brackets nested too deeply, and for powers, factorials and binomials of numbers too large."""
    return _depth(text) > MAX_DEPTH or _has_large_power(text) or _has_large_factorial(text)


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if OPENING.match(character):
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth = max(0, depth - 1)
    return deepest


def _has_large_power(text: str) -> bool:
    """Innermost powers are replaced by their value until none is left."""
    while match := _innermost_power(text):
        base, exponent = match.group(1), match.group(2) or match.group(3)
        if len(exponent) >= len(SHRUNK) and base.strip("0") not in ("", "1"):
            return True
        digits = int(exponent) * log10(max(1, int(base[: len(SHRUNK)])) * 10.0 ** max(0, len(base) - len(SHRUNK)))
        if digits > MAX_DIGITS:
            return True
        value = str(int(base) ** int(exponent)) if digits < len(SHRUNK) else SHRUNK
        text = text[: match.start()] + value + text[match.end() :]
    return False


def _innermost_power(text: str) -> re.Match[str] | None:
    """The last one, so that of 2^3^4 it is 3^4."""
    return next(reversed(list(POWER.finditer(text))), None) if "^" in text else None


def _has_large_factorial(text: str) -> bool:
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
