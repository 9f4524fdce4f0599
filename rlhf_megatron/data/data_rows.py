"""Rows of data files, checked: a prompt (text or chat messages), a label, a source, and what else a
reward may read.

Files are JSONL, or parquet and saved datasets of Hugging Face where pyarrow is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from rlhf_megatron.config.hub_data import parse_cached_dataset_name

DATASET_STATE_FILE = "state.json"
ARROW_BATCH_ROWS = 1024  # rows that are held as Python objects at once

MAX_LISTED_PROBLEMS = 5  # problems that an error message lists
MAX_EXTRA_CHARACTERS = 65_536  # characters of a row's other keys as JSON
SOURCE_KEY = "data_source"
JSON_LABEL_KEY = "label_is_json"  # of `extra`: the label was no text, and is its JSON now


def iterate_raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number counted from 1, value) of each row; a row that cannot be read has a ValueError
    as its value.

    `*.parquet` is read as parquet, a folder as a dataset that `save_to_disk` of Hugging Face
    datasets wrote, anything else as JSONL: one JSON value a line, blank lines left out. Raise
    ValueError for a file that is missing or malformed as a whole, and where pyarrow is needed and
    not installed.
    """
    if path.is_dir():
        return _iterate_arrow_rows(path, _iterate_saved_dataset_batches)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist or is not a file; check data.train_files and data.val_files."
        )
    return (
        _iterate_arrow_rows(path, _iterate_parquet_batches)
        if path.suffix == ".parquet"
        else _iterate_numbered_json_rows(path)
    )


def _iterate_numbered_json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the rows of JSON lines."""
    return ((number, value) for number, _, value in iterate_json_rows(path))


def iterate_json_rows(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, byte at which the line begins, value) of each row of JSON lines, as
    `iterate_raw_rows` does.
    """
    begin = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, begin, _parse_json_line(line)
            begin += len(line)


def read_json_row_at(file: BinaryIO, byte_offset: int) -> Any:
    """Return the value of the line that begins at a byte of an open file; a ValueError where the
    line cannot be read.
    """
    file.seek(byte_offset)
    return _parse_json_line(file.readline())


def _parse_json_line(line: bytes) -> Any:
    """Return the value of a line, or a ValueError (not raised) that says why the line cannot be
    read.
    """
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        return ValueError(
            f"not UTF-8 (byte {line[error.start] if error.start < len(line) else 0:#04x})"
        )
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def _reject_constant(text: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{text} is not JSON")


def _iterate_arrow_rows(
    path: Path, open_batches: Callable[[Path], Iterator[Any]]
) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the rows of Arrow record batches, without nulls. Raise ValueError
    where pyarrow is missing or cannot read the file.
    """
    try:
        import pyarrow
    except ImportError:
        kind = "saved datasets" if path.is_dir() else "parquet files"
        raise ValueError(
            f"{path}: {kind} need pyarrow; install the extra (pip install '.[parquet]'), or"
            " convert the rows to JSONL."
        ) from None
    number = 0
    try:
        for batch in open_batches(path):
            for start in range(0, len(batch), ARROW_BATCH_ROWS):
                for row in batch.slice(start, ARROW_BATCH_ROWS).to_pylist():
                    number += 1
                    yield number, _drop_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "a parquet file" if path.is_file() else "a saved dataset"
        raise ValueError(
            f"{path} is not {kind} that pyarrow can read ({error}); write it again."
        ) from error


def _iterate_parquet_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a parquet file."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ARROW_BATCH_ROWS)


def _iterate_saved_dataset_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of the files that state.json names, in that order, mapped into
    memory. Raise ValueError for a folder without state.json.
    """
    import pyarrow

    if not (path / DATASET_STATE_FILE).is_file():
        raise ValueError(
            f"{path} has no {DATASET_STATE_FILE}: it is no dataset that save_to_disk of Hugging"
            " Face datasets wrote; of several splits name the folder of one."
        )
    state = json.loads((path / DATASET_STATE_FILE).read_text(encoding="utf-8"))
    for file in state["_data_files"]:
        with pyarrow.memory_map(str(path / file["filename"])) as source:
            yield from pyarrow.ipc.open_stream(source)


def _drop_nulls(value: Any) -> Any:
    """Return the value without null entries of objects: columns that a row leaves open are null in
    parquet, and absent in JSONL.
    """
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


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
    paths: Sequence[str | Path], prompt_key: str, label_key: str, skip_bad_rows: bool
) -> tuple[tuple[PromptRow, ...], RowCounts]:
    """Read the rows of all files and return them with their counts. `prompt_key` holds text or chat
    messages; `label_key` holds text or a number, or a list or an object, which become JSON.

    A key with points, such as reward_model.ground_truth, is looked up in nested objects. Raise
    ValueError for a missing file, for any bad row (unless `skip_bad_rows`), and when no good row is
    left.
    """
    rows: list[PromptRow] = []
    problems: list[str] = []
    for path in map(Path, paths):
        for number, value in iterate_raw_rows(path):
            origin = f"{path}:{number}"
            try:
                rows.append(
                    parse_prompt_row(
                        value, prompt_key, label_key, default_source_name(path), origin
                    )
                )
            except ValueError as error:
                problems.append(f"{origin}: {error}")
    num_rows = len(rows) + len(problems)
    raise_on_bad_rows(problems, len(rows), skip_bad_rows)
    if not rows:
        names = ", ".join(map(str, paths))
        raise ValueError(
            f"the dataset is empty: no rows in {names or 'no files'}; each line must be a"
            " JSON object."
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
    for what, text in (*(("prompt", text) for text in prompts), *others):
        check_text_encoding(text, what)
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


def parse_prompt_row(
    value: Any, prompt_key: str, label_key: str, default_source: str, origin: str
) -> PromptRow:
    """Return the prompt row that a raw value holds. Raise ValueError that says what is wrong with
    the value, and the value itself if it is a ValueError.
    """
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {_name_json_type(value)}, not an object")
    prompt = parse_prompt(look_up_key(value, prompt_key, "data.prompt_key"), prompt_key)
    label = look_up_key(value, label_key, "data.label_key")
    is_text = isinstance(label, str)
    if isinstance(label, float):
        label = _format_decimal(label, label_key)
    elif isinstance(label, dict | list):  # such as several right answers
        label = json.dumps(label, ensure_ascii=False, default=str)
    elif isinstance(label, bool) or not isinstance(label, str | int):
        raise ValueError(
            f"{label_key!r} must be a string or a number, not a JSON {_name_json_type(label)}"
        )
    source = value.get(SOURCE_KEY, default_source)
    if not isinstance(source, str) or not source:
        raise ValueError(f"{SOURCE_KEY!r} must be a name, not {_describe_value(source)}")
    others = _drop_key({key: item for key, item in value.items() if key != prompt_key}, label_key)
    extra = _encode_extra(others if is_text else {JSON_LABEL_KEY: True} | others)
    return check_row_encoding(PromptRow(prompt, str(label), source, origin, extra))


def has_json_label(label: str, extra: str) -> bool:
    """Return whether a row's label is the JSON of a list or an object. It is JSON where `extra`
    begins with the mark JSON_LABEL_KEY; a text that happens to be JSON does not count.
    """
    return extra.startswith(f'{{"{JSON_LABEL_KEY}": true') and label[:1] in ("[", "{")


def _format_decimal(number: float, label_key: str) -> str:
    """Return the number as people write it: tables have 72.0 where 72 is meant. Raise ValueError
    for a number that is not finite.
    """
    if not isfinite(number):
        raise ValueError(
            f"{label_key!r} must be a string or a number, not {number}, which stands for a missing"
            " one in tables"
        )
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _drop_key(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `row` without the entry that `look_up_key` finds."""
    if key in row or "." not in key:
        return {name: value for name, value in row.items() if name != key}
    first, _, rest = key.partition(".")
    return {name: _drop_key(value, rest) if name == first else value for name, value in row.items()}


def look_up_key(row: Mapping[str, Any], key: str, setting: str) -> Any:
    """Return the value of a key; a key with points is looked up in nested objects too. Raise
    ValueError where there is none; `setting` is the setting that the message names.
    """
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(
                f"no key {key!r} (set {setting}); it has {', '.join(map(repr, row)) or 'none'}"
            )
        value = value[name]
    return value


def parse_prompt(value: Any, key: str) -> Prompt:
    """Return the prompt that a row's value holds: text or chat messages. Raise ValueError for
    anything else, for empty text, and for messages that do not end with something to answer.
    """
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
    messages = []
    for number, value in enumerate(values, start=1):
        where = f"message {number} of {key!r}"
        if not isinstance(value, dict):
            raise ValueError(
                f'{where} must be {{"role": ..., "content": ...}}, not a'
                f" JSON {_name_json_type(value)}"
            )
        other = [name for name in value if name not in ("role", "content")]
        if other:
            raise ValueError(
                f"{where} has {', '.join(map(repr, other))}; only role and content are known"
            )
        role = value.get("role")
        content = value.get("content")
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise ValueError(
                f"{where} must have text as role and content, not {_describe_value(role)}"
                f" and {_describe_value(content)}"
            )
        messages.append(ChatMessage(role, content))
    if not messages or messages[-1].role == "assistant" or not messages[-1].content.strip():
        end = "is empty" if not messages else "ends with an assistant's or an empty message"
        raise ValueError(f"{key!r} {end}; it must end with what is to be answered")
    return tuple(messages)


def _encode_extra(extra_values: Mapping[str, Any]) -> str:
    """Return the row's other keys as JSON, or "" where there are none. Raise ValueError where they
    are not JSON values or too long.
    """
    if not extra_values:
        return ""
    try:
        text = json.dumps(extra_values, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"its other keys ({', '.join(extra_values)}) cannot be written as JSON ({error});"
            " remove them"
        ) from None
    if len(text) > MAX_EXTRA_CHARACTERS:
        raise ValueError(
            f"its other keys ({', '.join(extra_values)}) have {len(text)} characters as JSON, over"
            f" {MAX_EXTRA_CHARACTERS}; remove those that no reward reads"
        )
    return text


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
