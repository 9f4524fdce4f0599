"""The columns of a row of answers that is to be scored: checked, and completed where another
program has left out what has an obvious value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from rlhf_megatron.config.token_ids import is_count, shorten_value
from rlhf_megatron.data.data_rows import check_text_encoding

UNKNOWN_FINISH_REASON = "stop"  # of a response whose end nobody noted
UNKNOWN_NUM_TOKENS = 0
LARGEST_NUMBER = 1e300  # of a label that is a number


def complete_answer_row(row: Mapping[str, Any], place: str, default_source: str) -> dict[str, Any]:
    """Return a row of answers with all columns that scoring reads. `finish_reasons`, `num_tokens`,
    `source` and `extra` may be absent or null, and `extra` may be an object instead of the JSON of
    one. Raise ValueError, with `place` and the key, for anything else that is missing or wrong.
    """
    responses = row["responses"]
    count = len(responses)
    check_texts = _make_list_check(_is_text, count, "texts")
    columns: dict[str, Any] = {
        "prompt": _read_text(row, "prompt", place),
        "answer": _read_label(row, place),
        "source": _read_column(
            row, "source", place, default_source, _is_name, "the name of a data source"
        ),
        "extra": _read_extra(row, place),
        "responses": _read_column(row, "responses", place, None, *check_texts),
        "finish_reasons": _read_column(
            row, "finish_reasons", place, [UNKNOWN_FINISH_REASON] * count, *check_texts
        ),
        "num_tokens": _read_column(
            row,
            "num_tokens",
            place,
            [UNKNOWN_NUM_TOKENS] * count,
            *_make_list_check(_is_whole_number, count, "numbers of tokens"),
        ),
    }
    columns["num_tokens"] = [int(number) for number in columns["num_tokens"]]
    if row.get("episodes") is not None:
        columns["episodes"] = _read_column(
            row, "episodes", place, None, *_make_list_check(_is_episode, count, "episodes")
        )
    for name in ("prompt", "answer", "source", "extra"):
        _check_encoding(columns[name], name, place)
    for text in (*responses, *columns["finish_reasons"]):
        _check_encoding(text, "responses", place)
    return {**row, **columns}


def _read_column(
    row: Mapping[str, Any],
    name: str,
    place: str,
    default: Any,
    is_right: Callable[[Any], bool],
    rule: str,
) -> Any:
    """Return the value of a column, or the default where the row has none or a null. Raise
    ValueError for a value that is not right, with the rule.
    """
    value = row.get(name)
    if value is None:
        value = default
    if not is_right(value):
        raise ValueError(f"{place}: {name!r} ({shorten_value(value)}) must be {rule}.")
    return value


def _make_list_check(
    is_right: Callable[[Any], bool], count: int, items_name: str
) -> tuple[Callable[[Any], bool], str]:
    """Return (whether a value is a list of `count` right items, that rule in words)."""

    def is_right_list(value: Any) -> bool:
        """Return whether a value is such a list."""
        return isinstance(value, list) and len(value) == count and all(map(is_right, value))

    return is_right_list, f"a list of {count} {items_name}, one for each of the responses"


def _read_text(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text of a column. Raise ValueError where the row lacks it."""
    value = row.get(name)
    if value is None:
        raise ValueError(
            f"{place} has no {name!r}; it has {', '.join(map(repr, row))}. Write it, or leave out"
            " 'index', and the row is read by data.prompt_key and data.label_key."
        )
    if not _is_text(value):
        raise ValueError(f"{place}: {name!r} ({shorten_value(value)}) must be a text.")
    return str(value)


def _read_label(row: Mapping[str, Any], place: str) -> str:
    """Return the label as text; a number is written as people write it. Raise ValueError where the
    row lacks a label.
    """
    value: Any = row.get("answer")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) <= LARGEST_NUMBER:
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return _read_text(row, "answer", place)


def _read_extra(row: Mapping[str, Any], place: str) -> str:
    """Return the other columns of the prompt's row as JSON, "" where there are none. Raise
    ValueError where the column is neither an object nor the JSON of one.
    """
    value = row.get("extra")
    if value is None or value == "":
        return ""
    try:
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        parsed = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{place}: 'extra' ({shorten_value(value)}) must be an object, or the JSON of one."
        )
    return str(value)


def _check_encoding(text: str, name: str, place: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair."""
    try:
        check_text_encoding(text, repr(name))
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None


def _is_episode(value: Any) -> bool:
    """Return whether a value describes an episode as `generate` writes it: its end, its status, and
    numbers for its rewards.
    """
    if not isinstance(value, dict):
        return False
    rewards = value.get("turn_rewards")
    reward = value.get("reward")
    return (
        isinstance(value.get("end"), str)
        and isinstance(value.get("status"), str)
        and is_count(value.get("num_turns"))
        and (reward is None or _is_finite_number(reward))
        and isinstance(rewards, list)
        and all(map(_is_finite_number, rewards))
    )


def _is_finite_number(value: Any) -> bool:
    """Return whether a value is a number that a score can be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    """Return whether a value is a text that is not empty."""
    return isinstance(value, str) and value != ""


def _is_whole_number(value: Any) -> bool:
    """Return whether a value is a whole number, also as a float, as tables have them."""
    if isinstance(value, float):
        return math.isfinite(value) and value == int(value) and value >= 0
    return is_count(value)
