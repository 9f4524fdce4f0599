"""The columns of a row that travel to rewards as the JSON text `extra`: which they are, what is
left out of them, and how a reward reads them.

JSON has no form for bytes or NaN, and a row has a limit. What cannot be carried is left out with a
note in its place, so that the row is used, and a reward that asks for the column fails with the
reason. Dates and times travel as ISO 8601 text, decimals as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from math import isfinite, isnan
from typing import Any

from rlhf_megatron.data.row_files import UnreadableValue

MAX_EXTRA_CHARACTERS = 65_536  # characters of a row's columns as JSON
EXTRA_SETTING = "data.extra_columns"
LEFT_OUT_KEY = "left_out_columns"  # of an object in `extra`: name -> why it is not in the object
TOO_LONG = f"too long: a row carries {MAX_EXTRA_CHARACTERS} characters"
NOT_NAMED = f"not named in {EXTRA_SETTING}"
PICTURE_COLUMNS = ("images", "videos")  # what a prompt shows, in the layout of verl
MAX_LISTED_COLUMNS = 5  # columns that a note lists


class LeftOutColumnError(ValueError):
    """A reward asks for a column that its row does not carry."""


class CarriedColumns(dict[str, Any]):
    """An object of `extra` that lacks some columns of the row. Asking for one of these raises
    LeftOutColumnError, also with `get`: the row has a value, and a reward must not take a default
    in its place.
    """

    def __init__(self, columns: Mapping[str, Any], left_out_columns: Mapping[str, str]) -> None:
        """Take the columns that are there, and the reason for each column that is not."""
        super().__init__(columns)
        self.left_out_columns = dict(left_out_columns)

    def __missing__(self, name: str) -> Any:
        """Raise LeftOutColumnError for a column that was left out, KeyError for any other name."""
        self._raise_if_left_out(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the column, or `default` where the row has none. Raise LeftOutColumnError for a
        column that was left out.
        """
        self._raise_if_left_out(name)
        return super().get(name, default)

    def _raise_if_left_out(self, name: str) -> None:
        """Raise LeftOutColumnError for a column that was left out."""
        reason = self.left_out_columns.get(name)
        if reason is None:
            return
        fix = "write it into the data as text, a number or null"
        if reason == NOT_NAMED:
            fix = "name it there"
        raise LeftOutColumnError(
            f"the column {name!r} of the row is not in extra ({reason}); {fix}."
        )


def parse_extra(text: str) -> dict[str, Any]:
    """Return the columns in a sample's `extra`, {} for an empty one. Objects that lack a column of
    their row are CarriedColumns.
    """
    if not text:
        return {}
    columns: dict[str, Any] = json.loads(text, object_hook=_restore_object)
    return columns


def _restore_object(columns: dict[str, Any]) -> dict[str, Any]:
    """Return an object of `extra` as CarriedColumns where some columns were left out of it."""
    reasons = _get_reasons(columns)
    if not reasons:
        return columns
    del columns[LEFT_OUT_KEY]
    return CarriedColumns(columns, reasons)


def _get_reasons(columns: Mapping[str, Any]) -> Mapping[str, str]:
    """Return name -> reason of what was left out of an object, {} where nothing was. A row may have
    an object with an entry of that name, which is then not of this form.
    """
    reasons = columns.get(LEFT_OUT_KEY)
    if not isinstance(reasons, dict) or not all(isinstance(text, str) for text in reasons.values()):
        return {}
    return reasons


@dataclass(frozen=True)
class LeftOutColumn:
    """A column of which some rows could not be carried, for one reason."""

    name: str  # with points where it stands in an object
    reason: str
    num_rows: int
    first_origin: str  # where a user finds the first of them: "train.jsonl:12"


@dataclass
class ExtraColumnWriter:
    """Makes `extra` of rows, and counts what is left out of it while rows are read."""

    named_columns: Sequence[str] | None = None  # what to carry; None: all that can be carried
    # column that must be carried -> the setting that names it
    required_columns: Mapping[str, str] = field(default_factory=dict)
    _counts: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    _missing_names: set[str] = field(default_factory=set)
    _num_rows: int = 0

    def __post_init__(self) -> None:
        """Begin with all named columns as missing."""
        self._missing_names = set(self.named_columns or ())

    def encode_columns(self, columns: Mapping[str, Any], marks: Mapping[str, Any]) -> str:
        """Return a row's columns as the JSON of `extra`, behind `marks`; "" where there are none.
        Raise ValueError for a column that must be carried and cannot be, and for pictures, which a
        prompt of text would lack.
        """
        if LEFT_OUT_KEY in columns:
            raise ValueError(
                f"it has a column {LEFT_OUT_KEY!r}, a name that extra itself uses; rename it"
            )
        if self.named_columns is None:
            selected = dict(columns)
        else:
            selected = self._select_named_columns(columns)
        if not selected and not marks:
            return ""
        text = _try_encode({**marks, **selected})
        if text is None:
            carried = _carry_object(selected)
            _drop_longest_entries(carried, MAX_EXTRA_CHARACTERS - len(json.dumps(dict(marks))))
            self._check_left_out_columns(carried)
            text = json.dumps({**marks, **carried}, ensure_ascii=False, allow_nan=False)
        return text

    def count_row(self, text: str, origin: str) -> None:
        """Count what the `extra` of a row lacks. `origin`: where a user finds the row."""
        self._num_rows += 1
        if LEFT_OUT_KEY not in text:
            return
        for name, reason in _iterate_left_out(json.loads(text)):
            if reason != NOT_NAMED:
                count = self._counts.setdefault((name, reason), [0, origin])
                count[0] += 1

    def list_left_out_columns(self) -> tuple[LeftOutColumn, ...]:
        """Return the columns that some counted rows could not carry."""
        return tuple(
            LeftOutColumn(name, reason, num_rows, first_origin)
            for (name, reason), (num_rows, first_origin) in self._counts.items()
        )

    def check_named_columns(self) -> None:
        """Raise ValueError for a named column that none of the counted rows has."""
        if self._num_rows and self._missing_names:
            raise ValueError(
                f"{EXTRA_SETTING} names {', '.join(map(repr, sorted(self._missing_names)))}, which"
                f" none of the {self._num_rows} rows has; correct the name."
            )

    def _select_named_columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the named columns of a row, in objects as in the row, with the names of all others
        as left out.
        """
        selected: dict[str, Any] = {}
        names = [*(self.named_columns or ()), *self.required_columns]
        for name in names:
            path = [name] if name in columns else name.split(".")
            value = _look_up_path(columns, path)
            if value is None:
                continue
            self._missing_names.discard(name)
            place = selected
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = value
        return _mark_unnamed_columns(columns, selected)

    def _check_left_out_columns(self, carried: Mapping[str, Any]) -> None:
        """Raise ValueError where a column that must be carried is left out, in part or as a whole,
        and for pictures.
        """
        for name, reason in _iterate_left_out(carried):
            if reason == NOT_NAMED:
                continue
            if self.named_columns is not None or name in self.required_columns:
                setting = self.required_columns.get(name, EXTRA_SETTING)
                raise ValueError(
                    f"its column {name!r}, which {setting} names, cannot be carried ({reason});"
                    " write it as text or numbers, or name only columns that can be carried"
                )
            if name.partition(".")[0] in PICTURE_COLUMNS:
                raise ValueError(describe_picture_refusal(name.partition(".")[0]))


def describe_picture_refusal(name: str) -> str:
    """Return why a row with pictures or videos in the column `name` is refused."""
    return f"it has {name}, and prompts are text: remove that column, or the row"


def find_picture_column(row: Mapping[str, Any]) -> str | None:
    """Return the name of a column of pictures or videos that holds their bytes, or None."""
    for name in PICTURE_COLUMNS:
        if name in row and any(_iterate_left_out(_carry_object({name: row[name]}))):
            return name
    return None


def describe_left_out_columns(columns: Sequence[LeftOutColumn]) -> str:
    """Return a note on the columns that rewards cannot read, for people; "" where there are
    none.
    """
    if not columns:
        return ""
    phrases = [
        f"{column.name!r} of {column.num_rows} {'row' if column.num_rows == 1 else 'rows'}"
        f" ({column.reason}; first {column.first_origin})"
        for column in columns[:MAX_LISTED_COLUMNS]
    ]
    if len(columns) > MAX_LISTED_COLUMNS:
        phrases.append(f"{len(columns) - MAX_LISTED_COLUMNS} more columns")
    return (
        f"left out of extra, so that no reward can read them: {', '.join(phrases)}."
        f" {EXTRA_SETTING} names the columns that are carried"
    )


class _UncarriedValueError(Exception):
    """A value has no form in JSON; the text says of what kind it is."""


def _try_encode(columns: Mapping[str, Any]) -> str | None:
    """Return columns as JSON; None where they are no values of JSON, or too long."""
    try:
        text = json.dumps(columns, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= MAX_EXTRA_CHARACTERS else None


def _carry_object(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the entries that JSON can hold, and under LEFT_OUT_KEY the reason for
    each entry that it cannot.
    """
    carried: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, value in columns.items():
        if name == LEFT_OUT_KEY and _get_reasons(columns):
            reasons |= value
            continue
        try:
            _check_surrogates(name)
            carried[name] = _carry_value(value)
        except _UncarriedValueError as error:
            reasons[name.encode(errors="backslashreplace").decode()] = str(error)
        except RecursionError:
            reasons[name] = "nested too deeply"
    return carried | ({LEFT_OUT_KEY: reasons} if reasons else {})


def _carry_value(value: Any) -> Any:
    """Return a value as JSON can hold it. Raise _UncarriedValueError where it has no such form; of
    a list that holds such a value, as a list cannot lack an item.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        _check_surrogates(value)
        return value
    if isinstance(value, float | Decimal) and not isfinite(value):
        raise _UncarriedValueError("NaN" if isnan(value) else "an infinite number")
    if isinstance(value, float):
        return value
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return _carry_object(value)
    if isinstance(value, list | tuple):
        return [_carry_value(item) for item in value]
    raise _UncarriedValueError(
        value.kind if isinstance(value, UnreadableValue) else type(value).__name__
    )


def _check_surrogates(text: str) -> None:
    """Raise _UncarriedValueError for a text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _UncarriedValueError("text with half of a surrogate pair") from None


def _drop_longest_entries(carried: dict[str, Any], max_characters: int) -> None:
    """Leave the longest entries out of an object, and out of the objects in it, until the rest has
    at most `max_characters` as JSON.
    """
    excess = len(json.dumps(carried, ensure_ascii=False)) - max_characters
    entries = sorted(_iterate_entry_lengths(carried), key=lambda entry: -entry[0])
    for length, place, name in entries:
        if excess <= 0:
            return
        del place[name]
        place.setdefault(LEFT_OUT_KEY, {})[name] = TOO_LONG
        excess -= length


def _iterate_entry_lengths(carried: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield (characters as JSON, object, name) of each entry that is no object itself, of an object
    and of the objects in it.
    """
    for name, value in carried.items():
        if name == LEFT_OUT_KEY:
            continue
        if isinstance(value, dict):
            yield from _iterate_entry_lengths(value)
        else:
            yield len(json.dumps({name: value}, ensure_ascii=False)), carried, name


def _iterate_left_out(carried: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name with points, reason) of everything that was left out of an object and of what it
    holds.
    """
    if isinstance(carried, dict):
        for name, reason in _get_reasons(carried).items():
            yield path + name, reason
        for name, value in carried.items():
            if name != LEFT_OUT_KEY:
                yield from _iterate_left_out(value, f"{path}{name}.")
    elif isinstance(carried, list):
        for item in carried:
            yield from _iterate_left_out(item, path)


def _look_up_path(columns: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path of names through objects, or None where there is none."""
    value: Any = columns
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _mark_unnamed_columns(columns: Mapping[str, Any], selected: dict[str, Any]) -> dict[str, Any]:
    """Return the selected columns, with the names of the row's other columns as left out. Objects
    are gone into: a reward gets every object, and misses what it lacks only when it asks for it.
    """
    marked: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, value in columns.items():
        if value is None:
            continue
        if name in selected and value is selected[name]:
            marked[name] = value
        elif isinstance(value, Mapping):
            marked[name] = _mark_unnamed_columns(value, selected.get(name, {}))
        else:
            reasons[name] = NOT_NAMED
    return marked | ({LEFT_OUT_KEY: reasons} if reasons else {})
