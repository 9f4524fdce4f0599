"""JSON with integers of any number of digits, in a time that grows with the number of digits.

Python refuses to read and write integers of more than 4,300 digits, because its time grows with
the square of that number. A long integer is a Decimal here, which is read, written and compared
digit by digit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

MAX_INT_DIGITS = 4000  # of an integer that is a Python integer; those that have more are Decimals
LONG_MARK = (
    "\ue000long integer "  # begins a text that stands for a long integer while it is written
)
WRITTEN_MARK = re.compile(rf'"\\ue000{LONG_MARK[1:]}(-?[0-9]+)"')


def read_long_json(text: str, make_object: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value of a JSON text. An integer of more than MAX_INT_DIGITS digits is a Decimal.
    `make_object` makes a value of each object's dict. Raise ValueError for text that is no JSON,
    RecursionError for text that is nested too deeply.
    """
    return json.loads(text, parse_int=_read_integer, object_hook=make_object)


def _read_integer(digits: str) -> int | Decimal:
    """Return the integer of these digits, as a Decimal where it is long."""
    return int(digits) if len(digits) <= MAX_INT_DIGITS else Decimal(digits)


def write_long_json(value: Any) -> str:
    """Return the value as JSON. A Decimal must be an integer; all its digits are written. Raise
    TypeError for a value that JSON does not have.
    """
    return WRITTEN_MARK.sub(r"\1", json.dumps(value, default=_mark_long_integer))


def _mark_long_integer(value: object) -> str:
    """Return the text that stands for a long integer. Raise TypeError for another value."""
    if not isinstance(value, Decimal):
        raise TypeError(f"{value!r:.80} is no value of JSON")
    return f"{LONG_MARK}{value:f}"
