"""Rows of data files, checked: a prompt (text or chat messages), a label, a source, and what else a
reward may read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from math import isfinite, isnan
from pathlib import Path
from typing import Any, TypeAlias

from rlhf_megatron.config.hub_data import parse_cached_dataset_name
from rlhf_megatron.data.extra_columns import ExtraColumnWriter
from rlhf_megatron.data.message_content import (
    drop_absent_entries,
    find_other_part_type,
    join_text_parts,
)
from rlhf_megatron.data.nesting import refuse_deep_nesting
from rlhf_megatron.data.row_files import describe_wrapped_rows, iterate_raw_rows

MAX_LISTED_PROBLEMS = 5  # problems that an error message lists
SOURCE_KEY = "data_source"
JSON_LABEL_KEY = "label_is_json"  # of `extra`: the label was no text, and is its JSON now


def default_source_name(path: Path) -> str:
    """Return the source name of rows that name none: their data set on a hub, or their file's
    stem.
    """
    return parse_cached_dataset_name(path) or path.stem


@dataclass(frozen=True)
class ChatMessage:
    role: str  # "system", "user", "assistant" or what the chat template knows
    content: str


Prompt: TypeAlias = str | tuple[ChatMessage, ...]


@dataclass(frozen=True)
class PromptRow:
    prompt: Prompt
    label: str  # what the reward compares with
    source: str  # value of data_source, or name of the file or task
    origin: str  # where a user finds it: "train.jsonl:12"
    extra: str = ""  # JSON object of what else a reward may read


@dataclass(frozen=True)
class TaskRows:
    """The rows of a generated task."""

    train: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]  # shares no problem with `train`


@dataclass(frozen=True)
class RowCounts:
    """Counts of the non-blank rows of all files."""

    num_rows: int
    num_bad: int  # skipped
    num_duplicates: int  # good rows whose prompt stood in an earlier row; they are kept


def read_prompt_rows(
    paths: Sequence[str | Path],
    prompt_key: str,
    label_key: str,
    skip_bad_rows: bool,
    extra_writer: ExtraColumnWriter | None = None,
) -> tuple[tuple[PromptRow, ...], RowCounts]:
    """Read the rows of all files and return them with their counts. `prompt_key` holds text or chat
    messages; `label_key` holds text or a number, or a list or an object, which become JSON.
    `extra_writer` chooses the other columns that rewards read, and counts those that it leaves out;
    without one, all that can be carried are.

    A key with points, such as reward_model.ground_truth, is looked up in nested objects. Raise
    ValueError for a missing file, for any bad row (unless `skip_bad_rows`), and when no good row is
    left.
    """
    extra_writer = extra_writer or ExtraColumnWriter()
    rows: list[PromptRow] = []
    problems: list[str] = []
    for path in map(Path, paths):
        # `extra` keeps the nulls of JSON: a reward may read them, and a run that is resumed is
        # known by the text of its rows.
        for number, value in iterate_raw_rows(path, keeps_nulls=True):
            origin = f"{path}:{number}"
            try:
                rows.append(
                    parse_prompt_row(
                        value,
                        prompt_key,
                        label_key,
                        default_source_name(path),
                        origin,
                        extra_writer,
                    )
                )
            except ValueError as error:
                problems.append(f"{origin}: {error}")
    num_rows = len(rows) + len(problems)
    raise_on_bad_rows(problems, len(rows), skip_bad_rows)
    if not rows:
        names = ", ".join(map(str, paths))
        raise ValueError(
            f"the dataset is empty: no rows in {names or 'no files'}; each line must be a JSON"
            " object, or the file an array of objects."
        )
    return tuple(rows), RowCounts(
        num_rows, len(problems), len(rows) - len({row.prompt for row in rows})
    )


def raise_on_bad_rows(problems: Sequence[str], num_good: int, skip_bad_rows: bool) -> None:
    """Raise ValueError that lists the bad rows. Do nothing if there are none, or if they are
    skipped and good rows are left.
    """
    if not problems or (skip_bad_rows and num_good):
        return
    listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED_PROBLEMS])
    more = (
        f"\n  and {len(problems) - MAX_LISTED_PROBLEMS} more"
        if len(problems) > MAX_LISTED_PROBLEMS
        else ""
    )
    fix = (
        "set data.skip_bad_rows=true to count and skip them"
        if num_good
        else "no usable row is left"
    )
    count = f"{len(problems)} of {num_good + len(problems)} rows cannot be used"
    raise ValueError(f"{count}:\n{listed}{more}\nCorrect them; {fix}.")


def check_row_encoding(row: PromptRow) -> PromptRow:
    """Return the row. Raise ValueError for half of a surrogate pair in one of its texts, which JSON
    can escape and a file or log cannot hold.
    """
    messages = () if isinstance(row.prompt, str) else row.prompt
    prompts = (
        [row.prompt]
        if isinstance(row.prompt, str)
        else [text for m in messages for text in (m.role, m.content)]
    )
    others = (("label", row.label), ("source", row.source), ("other keys", row.extra))
    for text_name, text in (*(("prompt", text) for text in prompts), *others):
        check_text_encoding(text, text_name)
    return row


def check_text_encoding(text: str, text_name: str = "text") -> None:
    """Raise ValueError where the text has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x} at character {error.start}"
        raise ValueError(
            f"its {text_name} has half of a surrogate pair ({found}); write it as UTF-8 text"
        ) from None


@refuse_deep_nesting
def parse_prompt_row(
    value: Any,
    prompt_key: str,
    label_key: str,
    default_source: str,
    origin: str,
    extra_writer: ExtraColumnWriter | None = None,
) -> PromptRow:
    """Return the prompt row that a raw value holds, as `read_prompt_rows` does. Raise ValueError
    that says what is wrong with the value, and the value itself if it is a ValueError.
    """
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {_name_json_type(value)}, not an object")
    prompt = parse_prompt(look_up_key(value, prompt_key, "data.prompt_key"), prompt_key)
    raw_label = look_up_key(value, label_key, "data.label_key")
    label = _parse_label(raw_label, label_key)
    source = parse_source_name(value, default_source)
    others = _drop_key({key: item for key, item in value.items() if key != prompt_key}, label_key)
    marks = {} if isinstance(raw_label, str) else {JSON_LABEL_KEY: True}
    extra_writer = extra_writer or ExtraColumnWriter()
    extra = extra_writer.encode_columns(others, marks)
    row = check_row_encoding(PromptRow(prompt, label, source, origin, extra))
    extra_writer.count_row(extra, origin)
    return row


def _parse_label(label: Any, label_key: str) -> str:
    """Return a row's label as text. Raise ValueError where it is no text, number, list or
    object.
    """
    if isinstance(label, float | Decimal):
        return _format_decimal(label, label_key)
    if isinstance(label, dict | list):  # such as several right answers
        return json.dumps(label, ensure_ascii=False, default=_format_label_part)
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise ValueError(
            f"{label_key!r} must be a string or a number, not a JSON {_name_json_type(label)}"
        )
    return str(label)


def _format_label_part(value: Any) -> str:
    """Return a date, a time or a decimal within a label as text. Raise ValueError for any other
    value that JSON does not have.
    """
    if not isinstance(value, date | time | Decimal):
        raise ValueError(f"the label holds {type(value).__name__}, which no answer can equal")
    return str(value)


def is_missing_value(value: Any) -> bool:
    """Return whether a value stands for none: null, or the NaN that tables have in its place."""
    return value is None or (isinstance(value, float) and isnan(value))


def parse_source_name(row: Mapping[str, Any], default_source: str) -> str:
    """Return the source that a row names, or the default where it names none; null and NaN, which
    tables have in place of a name, name none. Raise ValueError for anything but a name.
    """
    source = row.get(SOURCE_KEY)
    if is_missing_value(source):
        return default_source
    if not isinstance(source, str) or not source:
        raise ValueError(f"{SOURCE_KEY!r} must be a name, not {_describe_value(source)}")
    return source


def has_json_label(label: str, extra: str) -> bool:
    """Return whether a row's label is the JSON of a list or an object. It is JSON where `extra`
    begins with the mark JSON_LABEL_KEY; a text that happens to be JSON does not count.
    """
    return extra.startswith(f'{{"{JSON_LABEL_KEY}": true') and label[:1] in ("[", "{")


def _format_decimal(number: float | Decimal, label_key: str) -> str:
    """Return the number as people write it: tables have 72.0 where 72 is meant. Raise ValueError
    for a number that is not finite.
    """
    if not isfinite(number):
        raise ValueError(
            f"{label_key!r} must be a string or a number, not {number}, which stands for a missing"
            " one in tables"
        )
    text = format(Decimal(str(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _drop_key(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `row` without the entry that `look_up_key` finds."""
    if key in row or "." not in key:
        return {name: value for name, value in row.items() if name != key}
    first, _, rest = key.partition(".")
    return {name: _drop_key(value, rest) if name == first else value for name, value in row.items()}


def look_up_key(row: Mapping[str, Any], key: str, setting: str) -> Any:
    """Return the value of a key; a key with points is looked up in nested objects too. Raise
    ValueError where there is none, or a null, which counts as none; `setting` is the setting that
    the message names.
    """
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or name not in value:
            columns = ", ".join(map(repr, row)) or "none"
            raise ValueError(
                f"no key {key!r} (set {setting}); it has {columns}{_describe_rows_inside(row, key)}"
            )
        value = value[name]
    if value is None:
        raise ValueError(f"{key!r} is null, which counts as absent (set {setting})")
    return value


def _describe_rows_inside(row: Mapping[str, Any], key: str) -> str:
    """Return advice on a row that lacks the key and holds a list of rows that have it; "" for any
    other row.
    """
    lists = (value for value in row.values() if isinstance(value, list) and value)
    if any(isinstance(rows[0], dict) and key.split(".")[0] in rows[0] for rows in lists):
        return f".{describe_wrapped_rows(dict(row))}"
    return ""


def parse_prompt(value: Any, key: str) -> Prompt:
    """Return the prompt that a row's value holds: text, also in parts, or chat messages. Raise
    ValueError for anything else, for empty text, and for messages that do not end with something to
    answer.
    """
    value = join_text_parts(value)
    if isinstance(value, list):
        return _parse_chat_messages(value, key)
    if not isinstance(value, str):
        raise ValueError(
            f"{key!r} must be a string or a list of messages, not a JSON {_name_json_type(value)}"
        )
    if not value.strip():
        raise ValueError(f"{key!r} is empty")
    return value


def _parse_chat_messages(values: list[Any], key: str) -> tuple[ChatMessage, ...]:
    """Return the messages of a prompt. Raise ValueError for a malformed list, and for one that does
    not end with something to answer.
    """
    _refuse_other_parts(values, repr(key))
    messages = []
    for number, value in enumerate(values, start=1):
        place = f"message {number} of {key!r}"
        if not isinstance(value, dict):
            raise ValueError(
                f'{place} must be {{"role": ..., "content": ...}}, not a'
                f" JSON {_name_json_type(value)}"
            )
        entries = drop_absent_entries(value)
        other = [name for name in entries if name not in ("role", "content")]
        if other:
            raise ValueError(
                f"{place} has {', '.join(map(repr, other))}; only role and content are known:"
                " remove the rest, or make it null"
            )
        role = value.get("role")
        content = join_text_parts(value.get("content"))
        _refuse_other_parts(content, place)
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise ValueError(
                f"{place} must have text as role and content, not {_describe_value(role)}"
                f" and {_describe_value(content)}"
            )
        messages.append(ChatMessage(role, content))
    if not messages or messages[-1].role == "assistant" or not messages[-1].content.strip():
        end = "is empty" if not messages else "ends with an assistant's or an empty message"
        raise ValueError(f"{key!r} {end}; it must end with what is to be answered")
    return tuple(messages)


def _refuse_other_parts(content: Any, place: str) -> None:
    """Raise ValueError for content with a part that is no text, such as an image."""
    part_type = find_other_part_type(content)
    if part_type is not None:
        raise ValueError(
            f"{place} has a part of the type {part_type!r}, and prompts are text; remove the part"
        )


def _describe_value(value: Any) -> str:
    """Return a value as an error message names it."""
    if value is None:
        return "nothing"
    if not isinstance(value, str):
        return f"a JSON {_name_json_type(value)}"
    return repr(value)


def _name_json_type(value: Any) -> str:
    """Return JSON's name of a value's type, such as "object"."""
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
    }
    return names.get(type(value), "null" if value is None else type(value).__name__)
