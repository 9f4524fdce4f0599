"""Right and wrong programs from end to end, each in a real sandbox: what programs of contests
print, read and return, with decimals, long integers, sets and modules.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.code_tests import CodeParams, get_process_sandbox, score_code

CLOSE = CodeParams(test_timeout_s=2.0)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    try:
        get_process_sandbox(CLOSE).start_guardian()
    except ValueError as error:
        pytest.skip(str(error))
    yield
    get_process_sandbox(CLOSE).close()
    get_process_sandbox.cache_clear()


def score(program: str, label: Any, params: CodeParams = CLOSE, **row: Any) -> RewardResult:
    """Score the program in a block of Python against the label, which is written as JSON."""
    response = f"```python\n{program}\n```"
    extra = json.dumps(row) if row else ""
    return score_code(RewardSample("q", response, json.dumps(label), "s", "stop", 9, extra), params)


def printed(expected: str, stdin: str = "") -> dict[str, Any]:
    return {"inputs": [stdin], "outputs": [expected]}


def returned(arguments: list[Any], expected: Any) -> dict[str, Any]:
    return {"fn_name": "f", "inputs": [arguments], "outputs": [expected]}


RECURSION = "def f(n): return 0 if n == 0 else 1 + f(n - 1)"

PROGRAMS: list[tuple[str, str, Any, float]] = [
    ("six digits", "print(round(1/3, 6))", printed("0.333333333333\n"), 1),
    ("a sum's last bits", "print(0.1+0.2)", printed("0.3\n"), 1),
    ("too few digits of the label", "print(1/3)", printed("0.33\n"), 0),
    ("too few digits of the answer", "print(0.33)", printed("0.333333333333\n"), 0),
    ("float for an integer", "print(5.0)", printed("5\n"), 1),
    ("nearly an integer", "print(4.9999999999)", printed("5\n"), 1),
    ("another integer", "print(1000001)", printed("1000000\n"), 0),
    ("another integer as a float", "print(1000001.0)", printed("1000000\n"), 0),
    ("decimals in words", "print('Case #1:', 0.1+0.2)", printed("Case #1: 0.3\n"), 1),
    ("decimals in a list", "print([0.1+0.2, 1.0])", printed("[0.3, 1.0]\n"), 1),
    ("decimals of two lines", "print(0.1+0.2, 7)\nprint(2/3)", printed("0.3 7\n0.666666667"), 1),
    ("trailing blank", "print(' '.join(map(str, [1, 2, 3])), '')", printed("1 2 3\n"), 1),
    ("no last line end", "import sys; sys.stdout.write('1\\n2')", printed("1\n2\n"), 1),
    ("bytes out", "import sys; sys.stdout.buffer.write(b'7\\n')", printed("7\n"), 1),
    (
        "bytes in",
        "import sys; d = sys.stdin.buffer.read().split(); print(int(d[0]) + int(d[1]))",
        printed("3", "1 2"),
        1,
    ),
    ("open(0)", "print(sum(map(int, open(0).read().split())))", printed("3", "1 2\n"), 1),
    ("input without line end", "print(input())", printed("abc", "abc"), 1),
    ("CRLF in", "n = int(input()); print(input())", printed("abc", "1\r\nabc\r\n"), 1),
    ("CRLF in the label", "print('a'); print('b')", printed("a\r\nb\r\n"), 1),
    ("another case", "print('Yes')", printed("YES"), 0),
    ("length of 6,021 digits", "print(len(str(2**20000)))", printed("6021"), 1),
    ("6,021 digits", "print(2**20000)", printed(str(10**4000)[1:]), 0),
    (
        "recursion",
        f"import sys\nsys.setrecursionlimit(10**6)\n{RECURSION}\nprint(f(50000))",
        printed("50000"),
        1,
    ),
    (
        "a thread's stack",
        "import sys, threading\nthreading.stack_size(2**27)\nsys.setrecursionlimit(10**6)\n"
        f"{RECURSION}\nt = threading.Thread(target=lambda: print(f(50000)))\nt.start(); t.join()",
        printed("50000"),
        1,
    ),
    (
        "main guard",
        "def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()",
        printed("8", "4"),
        1,
    ),
    ("exit()", "print(3)\nexit()", printed("3"), 1),
    ("sys.exit(0)", "import sys\nprint(3)\nsys.exit(0)", printed("3"), 1),
    ("stderr", "import sys\nprint('x', file=sys.stderr)\nprint(3)", printed("3"), 1),
    ("blank lines", "print(1); print(); print(2)", printed("1\n\n2"), 1),
    ("value", "def f(x): return x + 0.2", returned([0.1], 0.3), 1),
    ("value, too far", "def f(x): return x + 0.2", returned([0.1], 0.30001), 0),
    ("list", "def f(x): return [x + 0.2, 1.0]", returned([0.1], [0.3, 1]), 1),
    ("dict of tuples", "def f(x): return {'a': (x + 0.2, 1)}", returned([0.1], {"a": [0.3, 1]}), 1),
    ("tuple", "def f(x): return (x, 2)", returned([1], [1, 2]), 1),
    ("method", "class Solution:\n    def f(self, x): return x + 1", returned([1], 2), 1),
    (
        "annotated method",
        "from typing import *\nclass Solution:\n"
        "    def f(self, x: List[int]) -> int: return sum(x)",
        returned([[1, 2]], 3),
        1,
    ),
    ("prints too", "def f(x):\n    print('debug')\n    return x", returned([1], 1), 1),
    ("integer keys", "def f(x): return {1: 2}", returned([1], {"1": 2}), 1),
    ("set", "def f(x): return {1}", returned([1], [1]), 1),
    ("set in another order", "def f(x): return {3, 1, 2}", returned([1], [2, 3, 1]), 1),
    ("frozenset of floats", "def f(x): return frozenset({x + 0.2})", returned([0.1], [0.3]), 1),
    ("sets in a list", "def f(x): return [{1, 2}, set()]", returned([1], [[2, 1], []]), 1),
    ("a smaller set", "def f(x): return {1}", returned([1], [1, 1]), 0),
    ("text of a number", "def f(x): return '0.3'", returned([1], 0.3), 0),
    ("two texts of numbers", "def f(x): return '0.30'", returned([1], "0.3"), 0),
    ("true for 1", "def f(x): return True", returned([1], 1), 0),
    ("complex", "def f(x): return 0.3 + 0j", returned([1], 0.3), 0),
    ("decimal", "def f(x): return decimal.Decimal('0.30')", returned([1], 0.3), 1),
    ("whole decimal", "def f(x): return decimal.Decimal(2)", returned([1], 2), 1),
    ("fraction", "def f(x): return fractions.Fraction(6, 3)", returned([1], 2), 1),
    ("one third", "def f(x): return fractions.Fraction(1, 3)", returned([1], 0.33333333), 1),
    ("deque", "def f(x): return deque([x])", returned([1], [1]), 0),
    ("nan", "def f(x): return float('nan')", returned([1], 0.3), 0),
    ("infinity", "def f(x): return float('inf')", returned([1], 1e308), 0),
    ("unicode", "print('é😀')", printed("é😀"), 1),
    ("loop", "while True: pass", printed("3"), 0),
    ("exponent", "print(1e9)", printed("1000000000"), 1),
    ("minus zero", "print(-0.0)", printed("0.0"), 1),
    ("printed nan", "print(float('nan'))", printed("nan"), 1),
    ("underscore", "print('1_000')", printed("1000"), 0),
    (
        "lists of lines",
        "print(input()); print(input())",
        {"inputs": [["a", "b"]], "outputs": [["a", "b"]]},
        1,
    ),
]


@pytest.mark.parametrize(
    ("program", "label", "right"), [row[1:] for row in PROGRAMS], ids=[row[0] for row in PROGRAMS]
)
def test_programs_of_contests(program: str, label: Any, right: float) -> None:
    assert score(program, label).score == right


def test_tests_of_livecodebench_have_the_tolerance_too() -> None:
    called = [{"input": "0.1\n0.2", "output": "0.3", "testtype": "functional"}]
    metadata = json.dumps({"func_name": "add"})
    adds = "class Solution:\n    def add(self, a, b): return a + b"
    assert score(adds, called, metadata=metadata).score == 1
    read = [{"input": "0.1 0.2\n", "output": "0.3\n", "testtype": "stdin"}]
    assert score("print(sum(map(float, input().split())))", read).score == 1


def test_exact_and_allclose_as_the_graders_whose_rules_they_are() -> None:
    exact = dataclasses.replace(CLOSE, compare="exact")
    allclose = dataclasses.replace(CLOSE, compare="allclose")
    try:
        for program, label, by_exact, by_allclose in (
            ("print(0.1+0.2)", printed("0.3"), 0, 1),
            ("print(0.1+0.2, 1)", printed("0.3 1"), 0, 0),
            ("print(1e1, '+2')", printed("10 2.00"), 1, 0),
            ("print(1.000009)", printed("1.0"), 0, 1),
            ("def f(x): return x + 0.2", returned([0.1], 0.3), 0, 0),
            ("def f(x): return {x}", returned([1], [1]), 0, 0),
            ("def f(x): return 2.0", returned([1], 2), 1, 1),
        ):
            assert score(program, label, exact).score == by_exact, program
            assert score(program, label, allclose).score == by_allclose, program
    finally:
        get_process_sandbox(exact).close()
        get_process_sandbox(allclose).close()


DIGITS = "7" * 3000 + "0" * 3000


def score_long(program: str, label: Any) -> RewardResult:
    """Score against a label whose JSON has an integer of 6,000 digits in place of LONG."""
    text = json.dumps(label).replace('"LONG"', DIGITS)
    response = f"```python\n{program}\n```"
    return score_code(RewardSample("q", response, text, "s", "stop", 9), CLOSE)


def test_integers_of_more_digits_than_python_writes() -> None:
    prints = "print(int('7' * 3000) * 10**3000)"
    assert score(prints, printed(DIGITS)).score == 1
    assert score(prints, printed(DIGITS[:-1] + "1")).score == 0
    assert score("print(int(input()) + 1)", printed(DIGITS[:-1] + "1", DIGITS)).score == 1
    assert score_long("def f(x): return x", returned(["LONG"], "LONG")).score == 1
    assert score_long("def f(x): return [x + 0]", returned([["LONG"]], ["LONG"])).score == 0
    assert score_long("def f(x): return x + 1", returned(["LONG"], "LONG")).score == 0
    assert score_long("def f(x): return float('inf')", returned([1], "LONG")).score == 0
    in_texts = {"fn_name": "f", "inputs": [DIGITS + "\n1"], "outputs": [DIGITS[:-1] + "1"]}
    assert score("def f(x, y): return x + y", in_texts).score == 1
    assert score("x = " + DIGITS + "\nprint(x)", printed(DIGITS)).score == 1


def test_long_integers_keep_to_the_limit_of_time() -> None:
    """Writing an integer of n digits takes time that grows as n squared, in one call that no
    signal of Python's interrupts.
    """
    started = time.monotonic()
    result = score("print(10**3_000_000 // 7)", printed("1"))
    assert result == RewardResult(0.0, "timeout", {"passed": 0.0})
    assert time.monotonic() - started < 60


VFORK_OF_A_SIBLING = """
import ctypes
libc = ctypes.CDLL(None)
if libc.syscall(56, 0x4000 | 0x8000 | 17, 0, 0, 0, 0) == 0:
    libc.sleep({seconds})
    libc._exit(0)
print(1)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of clone(2)")
@pytest.mark.parametrize("seconds", [5, 1000])
def test_waiting_for_a_child_of_another_parent_does_not_stop_the_clock(seconds: int) -> None:
    """The program is in state D, as one that waits for a disk, and has no child."""
    started = time.monotonic()
    result = score(VFORK_OF_A_SIBLING.format(seconds=seconds), printed("1"))
    assert result == RewardResult(0.0, "timeout", {"passed": 0.0})
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("million", ["9" * 1_000_000, "9." + "9" * 999_998, "9e" + "9" * 999_998])
def test_comparing_a_million_digits_is_cheap(million: str) -> None:
    """Were they made integers, each would take seconds, and the program spent none."""
    started = time.process_time()
    prints = f"print({million[:2]!r} + '9' * 999_998)"
    assert score(prints, printed("9" * 999_999 + "8")).score == 0
    write = "import os\ndef f(x):\n    os.write(3, b'9' * 1_000_000)\n    os._exit(0)"
    assert score_long(write, returned([1], "LONG")).score == 0
    assert time.process_time() - started < 1.5


def test_a_hint_names_a_module_that_is_not_preloaded() -> None:
    result = score("import no_such_module.part as x\nprint(1)", printed("1"))
    assert result.score == 0
    assert "imports no_such_module" in result.error
    assert "reward.params.preload" in result.error
    assert score("from no_such_module import x", printed("1"), CLOSE).error == result.error
    tries = "try:\n    import no_such_module\nexcept ImportError:\n    print(2)"
    assert score(tries, printed("1")).error == ""
    assert score("print(2)", printed("1")).error == ""


def test_numbers_and_arrays_of_numpy_where_numpy_is_preloaded() -> None:
    params = CodeParams(test_timeout_s=4.0, preload=("numpy",))
    pytest.importorskip("numpy")
    try:
        get_process_sandbox(params).start_guardian()
        for program, label, right in (
            ("print(np.sum([1, 2]))", printed("3"), 1),
            ("def f(x): return np.float32(0.1) + np.float32(0.2)", returned([1], 0.3), 1),
            ("def f(x): return np.array(x) + 0.2", returned([[0.1]], [0.3]), 1),
            ("def f(x): return [np.int64(3), np.bool_(True)]", returned([1], [3, True]), 1),
            ("def f(x): return {np.int64(3), np.int64(1)}", returned([1], [1, 3]), 1),
            ("def f(x): return np.int64(1000001)", returned([1], 1000000), 0),
            ("def f(x): return np.complex128(0.3)", returned([1], 0.3), 0),
        ):
            found = score(f"import numpy as np\n{program}", label, params).score
            assert found == right, program
        part = score("import numpy.no_such_part", printed("1"), params)
        assert "imports numpy.no_such_part" in part.error and "now numpy" in part.error
    finally:
        get_process_sandbox(params).close()
