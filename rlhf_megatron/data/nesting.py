"""Rows that are nested so deep that Python cannot walk through them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

TOO_DEEP = "it is nested too deep, hundreds of lists or objects one in another; flatten it"


def refuse_deep_nesting(parse_row: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that does what `parse_row` does, and raises ValueError for a row that is
    nested too deep, in place of RecursionError.
    """

    @wraps(parse_row)
    def parse_shallow_row(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        """Call `parse_row`."""
        try:
            return parse_row(*arguments, **named)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None

    return parse_shallow_row
