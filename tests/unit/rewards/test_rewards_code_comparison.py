"""When printed text and returned values are what a test expects: three rules, worked out by hand,
and the time that they take on hostile texts.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy
import pytest

from rlhf_megatron.rewards.sandbox.long_integers import read_long_json, write_long_json
from rlhf_megatron.rewards.scorers.code_comparison import (
    ComparisonRule,
    is_same_output,
    is_same_value,
    read_returned_value,
)

LONG = "7" * 6000

PRINTED = [  # printed, expected, close, exact, allclose
    ("0.30000000000000004", "0.3", 1, 0, 1),
    ("0.333333", "0.333333333333", 1, 0, 1),
    ("0.33333", "0.333333333333", 0, 0, 1),
    ("0.3333333333333333", "0.33", 0, 0, 0),
    ("0.33", "0.3333333333333333", 0, 0, 0),
    # |difference| <= 1e-9 + 1e-6 x 2 = 2.001e-6, and 1e-8 + 1e-5 x 2 = 2.001e-5
    ("2.000002001", "2.0", 1, 0, 1),
    ("2.0000020011", "2.0", 0, 0, 1),
    ("2.00002", "2.0", 0, 0, 1),
    ("2.0000201", "2.0", 0, 0, 0),
    ("1e-9", "0.0", 1, 0, 1),
    ("1.1e-9", "0.0", 0, 0, 1),
    ("1.1e-8", "0.0", 0, 0, 0),
    ("-0.5", "0.5", 0, 0, 0),
    # integers
    ("1000001", "1000000", 0, 0, 0),
    ("1000000", "1000000", 1, 1, 1),
    ("+5", "5", 1, 1, 1),
    ("005", "5", 1, 1, 0),
    ("-0", "0", 1, 1, 1),
    ("5.0", "5", 1, 1, 1),
    ("5", "5.0", 1, 1, 1),
    ("5.", "5", 1, 1, 1),
    (".5", "0.5", 1, 1, 1),
    ("5.0000000001", "5", 1, 0, 1),
    ("4.9999999", "5", 1, 0, 1),
    ("4.9999", "5", 0, 0, 0),
    ("1000001.0", "1000000", 0, 0, 1),
    ("1000001", "1000000.0", 0, 0, 1),
    ("1000001.0", "1000000.0", 1, 0, 1),
    ("1e9", "1000000000", 1, 1, 1),
    ("1e9", "1000000001", 0, 0, 1),
    ("1e+9", "1e9", 1, 1, 1),
    ("500000000500000000.0", "500000000500000001", 0, 0, 1),
    ("5.000000005e+17", "500000000500000001", 0, 0, 1),
    (f"{LONG}", f"{LONG}", 1, 1, 1),
    (f"{LONG}1", f"{LONG}2", 0, 0, 0),
    (f"0{LONG}", f"{LONG}", 1, 1, 0),
    (f"{LONG}.0", f"{LONG}", 1, 1, 1),
    # what is no plain number
    ("nan", "nan", 1, 1, 1),
    ("NaN", "nan", 1, 0, 0),
    ("nan", "0.0", 0, 0, 0),
    ("0.0", "nan", 0, 0, 0),
    ("inf", "inf", 1, 1, 1),
    ("Infinity", "inf", 1, 1, 1),
    ("-inf", "inf", 0, 0, 0),
    ("inf", "1e308", 0, 0, 0),
    ("1.0", "inf", 0, 0, 0),
    ("-0.0", "0.0", 1, 1, 1),
    ("1e400", "1e400", 1, 1, 1),
    ("1.0e400", "1e400", 1, 1, 1),
    ("2e400", "1e400", 0, 0, 1),
    ("inf", "1e400", 0, 0, 1),
    ("1.0000001e400", "1.0e400", 1, 0, 1),
    ("1e-400", "0.0", 1, 0, 1),
    ("9e99999999999999999999", "9e99999999999999999998", 0, 0, 0),
    ("1_000", "1000", 0, 1, 0),
    ("1,000", "1000", 0, 0, 0),
    ("0x10", "16", 0, 0, 0),
    ("0x1f", "0x1f", 1, 1, 1),
    ("1234567e8", "1234568e8", 0, 0, 1),
    ("sNaN", "3", 0, 0, 0),
    ("(0.30000000000000004+1j)", "(0.3+1j)", 0, 0, 0),
    ("(0.3+1j)", "(0.3+1j)", 1, 1, 1),
    ("1.2.3", "1.2.30", 0, 0, 0),
    ("--1.0", "-1.0", 0, 0, 0),
    # trailing zeros
    ("1.50", "1.5", 1, 1, 1),
    ("1.5000000000", "1.5", 1, 1, 1),
    # several numbers, white space, lines
    ("0.30000000000000004 1", "0.3 1", 1, 0, 0),
    ("1 2", "1  2", 1, 1, 0),
    ("1 2", "2 1", 0, 0, 0),
    ("1 2", "1 2 3", 0, 0, 0),
    ("1.0 1000001", "1.0 1000000", 0, 0, 0),
    (" 3 \n\n", "3", 1, 1, 1),
    ("", "", 1, 1, 1),
    ("", "0", 0, 0, 0),
    ("0.30000000000000004\nab\n7", "0.3\nab\n7", 1, 0, 0),
    ("0.30000000000000004\n7", "0.3\n7", 1, 0, 1),
    ("0.5\n1000001", "0.5\n1000000", 0, 0, 1),
    ("0.3\n\n7.0", "0.30\n7", 0, 0, 1),
    ("0.3\n7", "7\n0.3", 0, 0, 0),
    ("0.3\r\n7", "0.30\r\n7", 1, 1, 1),
    # numbers among words
    ("Case #1: 0.30000000000000004", "Case #1: 0.3", 1, 0, 0),
    ("Case #1:  0.3", "Case #1: 0.3", 0, 0, 0),
    ("x=0.30000000000000004", "x=0.3", 1, 0, 0),
    ("[0.30000000000000004, 1.0]", "[0.3, 1.0]", 1, 0, 0),
    ("[0.30000000000000004,1.0]", "[0.3, 1.0]", 0, 0, 0),
    ("{'a': (0.30000000000000004, -0.1)}", "{'a': (0.3, -0.1)}", 1, 0, 0),
    ("['0.30000000000000004']", "['0.3']", 0, 0, 0),
    ("[1000001]", "[1000000]", 0, 0, 0),
    ("[1.0]", "[1]", 1, 0, 0),
    ("12:05", "12:5", 0, 0, 0),
    ("Case 05", "Case 5", 0, 0, 0),
    ("1.0 x", "1 x", 1, 0, 0),
    ("Yes", "YES", 0, 0, 0),
    ("0.3%", "0.30%", 0, 0, 0),
]


def name_row(row: tuple[Any, ...]) -> str:
    return f"{row[0]!r:.30} for {row[1]!r:.30}"


@pytest.mark.parametrize("row", PRINTED, ids=name_row)
def test_printed_text(row: tuple[str, str, int, int, int]) -> None:
    printed, expected, *rights = row
    rules: tuple[ComparisonRule, ...] = ("close", "exact", "allclose")
    assert [int(is_same_output(printed, expected, rule)) for rule in rules] == rights


def test_allclose_is_numpys() -> None:
    """On numbers around the border of the tolerance, each on a line of its own."""
    generator = numpy.random.default_rng(3)
    expected = generator.normal(0, 10.0 ** generator.integers(-9, 9, 2000))
    tolerances = 1e-8 + 1e-5 * numpy.abs(expected)
    printed = expected + tolerances * generator.uniform(-2, 2, 2000)
    same = [
        is_same_output(f"{float(a)!r}\n0.5", f"{float(b)!r}\n0.5", "allclose")
        for a, b in zip(printed, expected, strict=True)
    ]
    assert same == numpy.isclose(printed, expected).tolist()
    assert 0.3 < numpy.mean(same) < 0.7


VALUES = [  # JSON of a returned value, JSON of the expected one, close, exact
    ("0.30000000000000004", "0.3", 1, 0),
    ("[0.30000000000000004, 1]", "[0.3, 1.0]", 1, 0),
    ('{"a": [0.30000000000000004]}', '{"a": [0.3]}', 1, 0),
    ('{"0.30000000000000004": 1}', '{"0.3": 1}', 0, 0),
    ("0.3333333333333333", "0.33", 0, 0),
    ("1000001", "1000000", 0, 0),
    ("1000001.0", "1000000", 0, 0),
    ("1000001.0", "1000000.0", 1, 0),
    ("5.0", "5", 1, 1),
    ("4.9999999999", "5", 1, 0),
    ("-0.0", "0", 1, 1),
    ("NaN", "NaN", 1, 1),
    ("NaN", "0.0", 0, 0),
    ("Infinity", "Infinity", 1, 1),
    ("-Infinity", "Infinity", 0, 0),
    ("Infinity", "1e308", 0, 0),
    ("Infinity", "1e400", 1, 1),  # both are the infinity of Python's floats
    ("true", "1", 0, 0),
    ("1", "true", 0, 0),
    ("1.0", "true", 0, 0),
    ("false", "false", 1, 1),
    ("null", "null", 1, 1),
    ("null", "0", 0, 0),
    ('"0.30000000000000004"', '"0.3"', 0, 0),
    ('"0.3"', "0.3", 0, 0),
    ('"1"', "1", 0, 0),
    ("[]", "[null]", 0, 0),
    ("[1, [2]]", "[1, [2, 3]]", 0, 0),
    ("[[1], 2]", "[1, [2]]", 0, 0),
    ('[1, 0.1, "a", true, null, {"b": [2]}]', '[1, 0.1, "a", true, null, {"b": [2.0]}]', 1, 1),
    ('{"a": 1}', '{"b": 1}', 0, 0),
    (LONG, LONG, 1, 1),
    (LONG, LONG[:-1] + "8", 0, 0),
    (f"-{LONG}", LONG, 0, 0),
    (LONG, "7", 0, 0),
    ("Infinity", LONG, 0, 0),
    ("1e308", LONG, 0, 0),
    ("[" * 900 + "0.30000000000000004" + "]" * 900, "[" * 900 + "0.3" + "]" * 900, 1, 0),
    ('"not nested', "1", 0, 0),
]


@pytest.mark.parametrize("row", VALUES, ids=name_row)
def test_returned_values(row: tuple[str, str, int, int]) -> None:
    returned, expected, close, exact = row
    try:
        value = read_returned_value(returned)
    except ValueError:
        assert not close and not exact
        return
    label = read_long_json(expected)
    assert is_same_value(value, label, "close") is bool(close)
    assert is_same_value(value, label, "exact") is bool(exact)
    assert is_same_value(value, label, "allclose") is bool(exact)


def as_set(*items: Any) -> dict[str, Any]:
    """Return the object that the sandbox writes for a set of these items."""
    return {"\u2407set": list(items)}


SETS: list[tuple[Any, Any, bool]] = [
    (as_set(1), [1], True),
    (as_set(), [], True),
    (as_set(3, 1, 2), [2, 3, 1], True),
    (as_set(3, 1, 2), [2, 3, 4], False),
    (as_set(1, 2), [1, 2, 2], False),
    (as_set(1, 2), [1, 1], False),
    (as_set(0.30000000000000004, 0.1), [0.3, 0.1], True),
    (as_set(0.1, 0.30000000000000004, 0.3), [0.3, 0.1, 0.3], True),
    (as_set(1000001, 1000000), [1000000, 1000001], True),
    (as_set(1000001), [1000000], False),
    (as_set(2.0, 1), [1, 2], True),
    (as_set("b", "a"), ["a", "b"], True),
    (as_set("1"), [1], False),
    (as_set(True), [1], False),
    (as_set(None, True, 2, "x", 0.5), ["x", None, 0.5, True, 2], True),
    (as_set(float("nan"), 1), [1, float("nan")], True),
    (as_set([1, 2], [2, 1]), [[2, 1], [1, 2]], True),
    (as_set([1, 2], [2, 1]), [[1, 2], [1, 2]], False),
    # a tuple's order counts
    (as_set([1, 2]), [[2, 1]], False),
    # noise that would sort the tuples otherwise
    (as_set([0.30000000000000004, 1], [0.3, 2]), [[0.3, 1], [0.3, 2]], True),
    (as_set([1e-17, 1], [0.0, 2]), [[0, 1], [0, 2]], True),
    (as_set(as_set(2, 1), as_set(3)), [[3], [1, 2]], True),
    (as_set(as_set(2, 1), as_set(3)), [[2, 1], [4]], False),
    ([as_set(2, 1), 3], [[1, 2], 3], True),
    ({"a": as_set(2, 1)}, {"a": [1, 2]}, True),
    ([2, 1], [1, 2], False),
    ({"\u2407set": 1}, [1], False),
    ({"\u2407set": [1], "b": 2}, [1], False),
    (as_set(1), {"1": 1}, False),
    (as_set(1), "1", False),
    (as_set({"a": 1}, {"b": 2, "c": 3}), [{"b": 2, "c": 3}, {"a": 1}], True),
]


@pytest.mark.parametrize(("returned", "expected", "same"), SETS)
def test_a_returned_set_has_no_order(returned: Any, expected: Any, same: bool) -> None:
    value = read_returned_value(json.dumps(returned))
    assert is_same_value(value, expected, "close") is same
    is_plain = "\u2407set" not in json.dumps(returned, ensure_ascii=False)
    assert is_same_value(value, expected, "exact") is (same and is_plain)


def test_long_integers_are_read_and_written_whole() -> None:
    text = f'[1, -{LONG}, {{"a": {LONG}}}, 0.5, "{LONG}"]'
    value = read_long_json(text)
    assert value[0] == 1 and str(value[1]) == f"-{LONG}"
    assert write_long_json(value) == text
    assert write_long_json(read_long_json("9" * 4001)) == "9" * 4001
    assert type(read_long_json("9" * 4000)) is int
    with pytest.raises(TypeError, match="no value of JSON"):
        write_long_json({1, 2})


MILLION = 1_000_000
HOSTILE = [  # printed, expected
    ("9" * MILLION, "9" * (MILLION - 1) + "8"),
    ("9" * MILLION + ".5", "9" * MILLION + ".25"),
    ("0." + "9" * MILLION, "1"),
    ("1e-" + "9" * 17, "1e" + "9" * 17),
    ("1e" + "9" * MILLION, "1"),
    ("1." * (MILLION // 2), "1"),
    ("-" * MILLION + "1", "1"),
    ("9" * MILLION + "x", "9" * MILLION),
    ("[" * MILLION, "[" * (MILLION - 1)),
    ("inf" * (MILLION // 3), "inf"),
    (" " * MILLION + "1", "2"),
    ("\n" * MILLION + "1", "2"),
    ("1\n" * (MILLION // 2), "2"),
]


@pytest.mark.parametrize("rows", HOSTILE, ids=[f"{printed[:6]!r}" for printed, _ in HOSTILE])
def test_a_million_characters_are_compared_in_a_moment(rows: tuple[str, str]) -> None:
    """On this side of the sandbox no limit of time but that of the whole sample ends a comparison:
    the time must grow with the length, not with its square.
    """
    printed, expected = rows
    started = time.process_time()
    for rule in ("close", "exact", "allclose"):
        is_same_output(printed, expected, rule)
    if printed.isdigit():
        assert not is_same_value(read_returned_value(printed), read_long_json(expected), "close")
    assert time.process_time() - started < 1.0


def test_large_sets_are_compared_in_a_moment() -> None:
    items = [[number + 0.1, number % 7] for number in range(20_000)]
    value = read_returned_value(json.dumps(as_set(*items[::-1])))
    started = time.process_time()
    assert is_same_value(value, items, "close")
    assert not is_same_value(value, [*items[:-1], [0.5, 1]], "close")
    assert time.process_time() - started < 5.0
