"""Whether a program printed, or its function returned, what a test expects.

    close      numbers have a tolerance, wherever they stand: rtol 1e-6 and atol 1e-9. Whole numbers
               have none where one of the two is written as an integer. A returned set equals a
               list of its items in any order.
    exact      as LiveCodeBench compares: output line by line, a line of numbers as decimals; values
               by ==
    allclose   as verl's prime_code compares: numpy.allclose (rtol 1e-5, atol 1e-8) on output that
               has one number on each line, else text; values by ==

Text and plain JSON values are compared, so that no code of a program takes part, and a million
digits are compared as fast as they are read: no text becomes an integer (`long_integers`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any, Literal

from rlhf_megatron.rewards.sandbox.harness import SET_KEY
from rlhf_megatron.rewards.sandbox.long_integers import read_long_json

ComparisonRule = Literal["close", "exact", "allclose"]

CLOSE_RTOL = Decimal("1e-6")
CLOSE_ATOL = Decimal("1e-9")
# numpy.allclose's defaults
ALLCLOSE_RTOL = 1e-5
ALLCLOSE_ATOL = 1e-8

# A number as programs print it, in ASCII and without underscores. Quantifiers take all that they
# can and give nothing back, so that a long text takes no longer than its length.
NUMBER = re.compile(
    r"[-+]?(?:(?:[0-9]++(?P<point>\.[0-9]*+)?|(?P<leading_point>\.[0-9]++))"
    r"(?:e(?P<exponent>[-+]?[0-9]++))?|inf(?:inity)?|nan)",
    re.ASCII | re.IGNORECASE,
)
# what stands between words in a line: white space, and the marks of printed lists and labels
SEPARATORS = re.compile(r"([\s\[\](){},:;=]+)")
# No exponent is out of range and nothing raises; 50 digits are more than a tolerance needs.
ARITHMETIC = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
SORTING = Context(prec=6, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


@dataclass(frozen=True)
class ComparedNumber:
    """A number with what its spelling says."""

    value: Decimal  # exact; also NaN and infinities
    is_integer: bool  # written without a point and without a negative exponent


@dataclass(frozen=True)
class ReturnedSet:
    """A set or frozenset that a function returned, in no order."""

    items: list[Any]


def is_same_output(printed: str, expected: str, compare: ComparisonRule) -> bool:
    """Return whether output equals the expected output. White space around lines and around the
    whole does not count.
    """
    if compare == "allclose":
        return _is_allclose_output(printed, expected)
    is_same_line = _is_same_line if compare == "exact" else _is_close_line
    lines = [line.strip() for line in printed.strip().split("\n")]
    expected_lines = [line.strip() for line in expected.strip().split("\n")]
    return len(lines) == len(expected_lines) and all(map(is_same_line, lines, expected_lines))


def _is_same_line(line: str, expected_line: str) -> bool:
    """Return whether two lines are equal as LiveCodeBench compares them: as text, or as decimals
    where all words of both are numbers.
    """
    if line == expected_line:
        return True
    words = line.split()
    expected_words = expected_line.split()
    try:
        return len(words) == len(expected_words) > 0 and all(
            Decimal(word) == Decimal(expected_word)
            for word, expected_word in zip(words, expected_words, strict=True)
        )
    except InvalidOperation:  # no number, or one that signals when it is compared (sNaN)
        return False


def _is_close_line(line: str, expected_line: str) -> bool:
    """Return whether two lines are equal but for the tolerance of their numbers. White space
    between words counts only where a word is no number.
    """
    if line == expected_line:
        return True
    words = line.split()
    expected_words = expected_line.split()
    if len(words) == len(expected_words) and all(map(_are_close_words, words, expected_words)):
        return True
    pieces = SEPARATORS.split(line)
    expected_pieces = SEPARATORS.split(expected_line)
    return len(pieces) == len(expected_pieces) and all(
        map(_are_close_pieces, pieces, expected_pieces)
    )


def _are_close_words(word: str, expected_word: str) -> bool:
    """Return whether two words are close numbers."""
    number = read_printed_number(word)
    expected_number = read_printed_number(expected_word)
    return (
        number is not None
        and expected_number is not None
        and are_close_numbers(number, expected_number)
    )


def _are_close_pieces(piece: str, expected_piece: str) -> bool:
    """Return whether two words within other text, or what stands between words, are equal, or
    close numbers that are not both integers: 05 is not 5 in a date or a name.
    """
    if piece == expected_piece:
        return True
    number = read_printed_number(piece)
    expected_number = read_printed_number(expected_piece)
    return (
        number is not None
        and expected_number is not None
        and not (number.is_integer and expected_number.is_integer)
        and are_close_numbers(number, expected_number)
    )


def read_printed_number(word: str) -> ComparedNumber | None:
    """Return the number that a word is, or None where it is none: 1_000, 0x1f and other words."""
    match = NUMBER.fullmatch(word)
    if match is None:
        return None
    try:
        value = Decimal(word)
    except InvalidOperation:  # an exponent of more than eighteen digits
        return None
    has_point = match["point"] is not None or match["leading_point"] is not None
    has_negative_exponent = (match["exponent"] or "").startswith("-")
    return ComparedNumber(value, value.is_finite() and not has_point and not has_negative_exponent)


def are_close_numbers(number: ComparedNumber, expected: ComparedNumber) -> bool:
    """Return whether two numbers are equal, or differ by at most CLOSE_ATOL + CLOSE_RTOL x the
    expected one. NaN equals NaN. Where one of two whole numbers is written as an integer there is
    no tolerance: 1000001.0 is a wrong count for 1000000.
    """
    if number.value.is_nan() or expected.value.is_nan():
        return number.value.is_nan() and expected.value.is_nan()
    if number.value == expected.value:
        return True
    if number.value.is_infinite() or expected.value.is_infinite():
        return False
    has_integer = number.is_integer or expected.is_integer
    if has_integer and _is_whole(number.value) and _is_whole(expected.value):
        return False
    difference = ARITHMETIC.subtract(number.value, expected.value).copy_abs()
    share = ARITHMETIC.multiply(CLOSE_RTOL, expected.value.copy_abs())
    return difference <= ARITHMETIC.add(CLOSE_ATOL, share)


def _is_whole(value: Decimal) -> bool:
    """Return whether a finite number has no decimals."""
    return value == value.to_integral_value()


def _is_allclose_output(printed: str, expected: str) -> bool:
    """Return whether output equals the expected output as verl's prime_code compares it: as text,
    or by numpy.allclose where each line that is not empty is one number, unless all of them are
    digits only.
    """
    lines = printed.splitlines()
    stripped = "\n".join(line.strip() for line in lines)
    if expected.strip() in ("\n".join(lines).strip(), stripped.strip()):
        return True
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    if lines == expected_lines:
        return True
    lines = [line for line in lines if line]
    if lines == expected_lines:
        return True
    if len(lines) != len(expected_lines) or all(map(str.isdigit, [*lines, *expected_lines])):
        return False
    return all(map(_are_allclose_lines, lines, expected_lines))


def _are_allclose_lines(line: str, expected_line: str) -> bool:
    """Return whether two lines are numbers that numpy.allclose says are equal; infinities are
    equal to themselves and NaN to nothing.
    """
    number = read_printed_number(line.strip())
    expected_number = read_printed_number(expected_line)
    if number is None or expected_number is None:
        return False
    value = float(number.value)
    expected = float(expected_number.value)
    if not math.isfinite(value) or not math.isfinite(expected):
        return value == expected
    return abs(value - expected) <= ALLCLOSE_ATOL + ALLCLOSE_RTOL * abs(expected)


def read_returned_value(text: str) -> Any:
    """Return the value that the sandbox wrote for what a function returned. Raise ValueError or
    RecursionError for text that is no JSON or is nested too deeply.
    """
    return read_long_json(text, _make_returned_object)


def _make_returned_object(items: dict[str, Any]) -> Any:
    """Return the set that an object stands for, or the object. A program that writes such an
    object by itself has returned a set, no more.
    """
    values = items.get(SET_KEY)
    return ReturnedSet(values) if len(items) == 1 and isinstance(values, list) else items


def is_same_value(returned: Any, expected: Any, compare: ComparisonRule) -> bool:
    """Return whether two plain JSON values are equal: numbers by value or, with `close`, within the
    tolerance, NaN to NaN, a boolean only to the same boolean, text as text, lists and objects item
    by item. With `close` a returned set equals a list of its items in any order.

    Values are compared without recursion, however deeply they are nested. Only items of a returned
    set are read by recursion: raise RecursionError for items that are nested too deeply.
    """
    are_same_scalars = _are_close_scalars if compare == "close" else _are_equal_scalars
    pairs = [(returned, expected)]
    while pairs:
        first, second = pairs.pop()
        if isinstance(first, ReturnedSet) and isinstance(second, list) and compare == "close":
            if len(first.items) != len(second):
                return False
            first = sorted(first.items, key=_make_sort_key)
            second = sorted(second, key=_make_sort_key)
        if isinstance(first, list) and isinstance(second, list):
            if len(first) != len(second):
                return False
            pairs.extend(zip(first, second, strict=True))
        elif isinstance(first, dict) and isinstance(second, dict):
            if first.keys() != second.keys():
                return False
            pairs.extend((first[key], second[key]) for key in first)
        elif not are_same_scalars(first, second):
            return False
    return True


def _are_equal_scalars(returned: Any, expected: Any) -> bool:
    """Return whether two values that are no lists or objects are equal, numbers without
    tolerance.
    """
    if type(returned) is type(expected) and returned == expected:
        return True
    number = _read_number(returned)
    expected_number = _read_number(expected)
    if number is None or expected_number is None:
        return False
    if number.value.is_nan() or expected_number.value.is_nan():
        return number.value.is_nan() and expected_number.value.is_nan()
    return number.value == expected_number.value


def _are_close_scalars(returned: Any, expected: Any) -> bool:
    """Return whether two values that are no lists or objects are equal, numbers within the
    tolerance.
    """
    if type(returned) is type(expected) and returned == expected:
        return True
    number = _read_number(returned)
    expected_number = _read_number(expected)
    if number is None or expected_number is None:
        return False
    return are_close_numbers(number, expected_number)


def _read_number(value: Any) -> ComparedNumber | None:
    """Return the number that a JSON value is, or None where it is none. A boolean is none, and a
    Decimal is an integer (`read_long_json`).
    """
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    return ComparedNumber(Decimal(value), not isinstance(value, float))


SortKey = tuple[Any, ...]


def _make_sort_key(value: Any) -> tuple[SortKey, SortKey]:
    """Return a key that sorts the items of a returned set as it sorts those of the expected list,
    so that the two are compared one by one.

    Numbers are rounded first, and the order within items does not count, since an item may be a
    set of its own; what is equal then is sorted by its exact numbers in their order. Two items
    that differ only in numbers which the rounding parts may be sorted differently; so the set is
    refused, and never accepted wrongly.
    """
    rounded = _make_nested_key(value, _round_number, sorted)
    return rounded, _make_nested_key(value, Decimal, list)


def _make_nested_key(
    value: Any,
    convert_number: Callable[[Decimal], Decimal],
    arrange: Callable[[list[SortKey]], list[SortKey]],
) -> SortKey:
    """Return a key of a JSON value: its kind, and its number, its text, or the keys of its items as
    `arrange` puts them. Keys of any two values can be compared.
    """
    number = _read_number(value)
    if number is not None:
        is_nan = number.value.is_nan()
        return (2, is_nan, Decimal(0) if is_nan else convert_number(number.value))
    if value is None or isinstance(value, bool):
        return (0 if value is None else 1, bool(value))
    if isinstance(value, str):
        return (3, value)
    if isinstance(value, dict):
        names = sorted(value)
        keys = [_make_nested_key(value[name], convert_number, arrange) for name in names]
        return (5, tuple(names), tuple(keys))
    items = value.items if isinstance(value, ReturnedSet) else value
    return (4, *arrange([_make_nested_key(item, convert_number, arrange) for item in items]))


def _round_number(value: Decimal) -> Decimal:
    """Return a number with six digits; 0 for one that the absolute tolerance does not tell from
    0.
    """
    return Decimal(0) if value.copy_abs() <= CLOSE_ATOL else SORTING.plus(value)
