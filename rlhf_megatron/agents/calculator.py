"""A tool that computes arithmetic on numbers. It runs no Python code of the model's."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_EXPRESSION_CHARS = 500
MAX_DIGITS = 4_000  # of a number; computing with larger ones would take too long
MAX_EXPONENT = 10_000

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression, such as (12 + 34) * 5.

    Args:
        expression: Numbers with + - * / // % ** and brackets.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(
            f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARS} are"
            " computed."
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression.") from None
    return format_number(_compute(tree.body))


def format_number(value: float) -> str:
    """Return a number as people write it: 4.0 is 4."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _compute(node: ast.expr) -> float:
    """Return the value of a part of an expression. Raise ValueError for anything but arithmetic on
    numbers, and for numbers that are too large.
    """
    if isinstance(node, ast.Constant):
        # a bool is an int of Python's, and no number of a calculator's
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return _check_size(node.value)
        raise ValueError(f"{node.value!r:.50} is no number.")
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_compute(node.operand))
    if not isinstance(node, ast.BinOp):
        raise ValueError(f"{ast.unparse(node)[:50]!r} is no arithmetic on numbers.")
    left = _compute(node.left)
    right = _compute(node.right)
    if isinstance(node.op, ast.Pow):
        return _check_size(_raise_to_power(left, right))
    if type(node.op) not in _BINARY:
        raise ValueError(f"{ast.unparse(node)[:50]!r} is no arithmetic on numbers.")
    return _check_size(_BINARY[type(node.op)](left, right))


def _raise_to_power(base: float, exponent: float) -> float:
    """Return base ** exponent. Raise ValueError before a power takes long, and for complex ones."""
    is_large = abs(exponent) > MAX_EXPONENT
    if is_large or (base and math.log10(abs(base)) * exponent > MAX_DIGITS):
        raise ValueError("a power is too large.")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError(f"{base} ** {exponent} is no real number.")
    return float(value) if isinstance(value, float) else int(value)


def _check_size(value: float) -> float:
    """Return the number. Raise ValueError where it is too large."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is too large.")
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits.")
    return value
