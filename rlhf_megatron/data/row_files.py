"""Files of rows: JSON lines, arrays of JSON, and parquet and saved datasets of Hugging Face where
pyarrow is installed. A row is read as it stands; what its columns must hold is for `data_rows`.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_megatron.install_hints import format_install_command

DATASET_STATE_FILE = "state.json"
ARROW_BATCH_ROWS = 1024  # rows that are held as Python objects at once

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEAD_BYTES = 65_536  # of a file, by which its format is told; also the first piece of a row
MAX_PARSED_OBJECT_BYTES = 1 << 26  # of an object over several lines, whose keys an error lists

# A text (in which no bracket counts), a bracket, a comma, or a quote that no other one closes.
_JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},"]', re.DOTALL)

_OTHER_FORMATS = {
    ".csv": "a table of text; write its rows as JSONL or parquet",
    ".tsv": "a table of text; write its rows as JSONL or parquet",
    ".xlsx": "a spreadsheet; write its rows as JSONL or parquet",
    ".arrow": "a part of a saved dataset; name the folder with its state.json",
    ".gz": "compressed; unpack it first",
    ".zst": "compressed; unpack it first",
    ".bz2": "compressed; unpack it first",
    ".xz": "compressed; unpack it first",
}


@dataclass(frozen=True)
class UnreadableValue:
    """The place of a value of a table that Python has no object for."""

    kind: str  # such as "timestamp[ns] that Python cannot hold"


def iterate_raw_rows(path: Path, keeps_nulls: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield (number counted from 1, value) of each row; a row that cannot be read has a ValueError
    as its value. A column that is null is left out of its row unless `keeps_nulls`.

    `*.parquet` is read as parquet, a folder as a dataset that `save_to_disk` of Hugging Face
    datasets wrote. Anything else is JSON: an array of rows, or one row a line, blank lines left
    out. The number is that of the line, or in an array that of the row. Raise ValueError for a file
    that is missing or malformed as a whole, for a format that is not read, and where pyarrow is
    needed and not installed.
    """
    if path.is_dir():
        return _iterate_arrow_rows(path, _iterate_saved_dataset_batches)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist or is not a file; check data.train_files and data.val_files."
        )
    _refuse_other_formats(path)
    if path.suffix == ".parquet":
        return _iterate_arrow_rows(path, _iterate_parquet_batches)
    rows = ((number, value) for number, _, value in iterate_json_rows(path))
    if keeps_nulls:
        return rows
    return ((number, drop_null_columns(value)) for number, value in rows)


def _refuse_other_formats(path: Path) -> None:
    """Raise ValueError with advice for a file whose name says that it is no file of rows."""
    advice = _OTHER_FORMATS.get(path.suffix.lower())
    if advice is not None:
        raise ValueError(f"{path} is {advice}.")


def drop_null_columns(row: Any) -> Any:
    """Return a row without the columns that are null; a value that is no object is returned
    unchanged. What a column holds inside may be null, as a value of a tool's arguments may.
    """
    if not isinstance(row, dict):
        return row
    return {name: value for name, value in row.items() if value is not None}


# JSON


def iterate_json_rows(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, byte at which the row begins, value) of each row of JSON lines or of an array,
    as `iterate_raw_rows` does with `keeps_nulls`.
    """
    _refuse_other_formats(path)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        if _begins_array(head, path.suffix):
            yield from _iterate_array_rows(path, file, head.index(b"["))
            return
        file.seek(0)
        begin = 0
        for number, line in enumerate(file, start=1):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                row = _parse_json_row(line)
                if number == 1 and isinstance(row, ValueError):
                    _raise_on_object_over_lines(path, file)
                yield number, begin, row
            begin += len(line)


def _begins_array(head: bytes, suffix: str) -> bool:
    """Return whether a file that begins with these bytes is an array of rows. JSON lines may begin
    with an array too, which is then a bad row; an array of rows begins with an object.
    """
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    return text.startswith(b"[") and (text[1:].lstrip().startswith(b"{") or suffix == ".json")


def _iterate_array_rows(
    path: Path, file: BinaryIO, array_begin: int
) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, byte at which the row begins, value) of each item of the array that begins at
    a byte of the file. Only the item that is being read is held. Raise ValueError where the array
    is not closed, or is not all of the file.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        number = 0
        item_begin = array_begin + 1
        for item_end, is_last in _iterate_item_ends(text, array_begin):
            item = text[item_begin:item_end]
            if item.strip() or number or not is_last:  # an array without items has none
                number += 1
                blank_bytes = len(item) - len(item.lstrip())
                yield number, item_begin + blank_bytes, _parse_json_row(item)
            item_begin = item_end + 1
            if is_last:
                if text[item_begin:].strip():
                    raise ValueError(
                        f"{path} goes on behind its array of rows, which ends at byte {item_end};"
                        " write one array with all rows, or one row a line."
                    )
                return
    raise ValueError(
        f"{path} begins an array of rows and does not end it: the file is cut off, or a row behind"
        f" the first {number} has a quote or a bracket too few; write the file again."
    )


def _iterate_item_ends(text: mmap.mmap, array_begin: int) -> Iterator[tuple[int, bool]]:
    """Yield (byte behind the item, whether the array ends there) of each item of the array that
    begins at a byte of the text. Stop where the array is not closed.
    """
    depth = 0
    for token in _JSON_TOKEN.finditer(text, array_begin):
        symbol = token[0]
        if symbol in (b"[", b"{"):
            depth += 1
        elif symbol in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                yield token.start(), True
                return
        elif symbol == b"," and depth == 1:
            yield token.start(), False
        elif symbol == b'"':
            return


def _find_object_end(text: bytes | mmap.mmap) -> int | None:
    """Return the byte behind the object that begins a text of JSON; None where the text has no
    such byte.
    """
    depth = 0
    for token in _JSON_TOKEN.finditer(text):
        symbol = token[0]
        if symbol in (b"[", b"{"):
            depth += 1
        elif symbol in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                return token.end()
        elif symbol == b'"':
            return None
    return None


def read_json_row_at(file: BinaryIO, byte_offset: int) -> Any:
    """Return the object that begins at a byte of an open file, be it a line or an item of an array;
    a ValueError where the object cannot be read.
    """
    file.seek(byte_offset)
    text = file.read(HEAD_BYTES)
    while (end := _find_object_end(text)) is None:
        more = file.read(len(text))
        if not more:
            break
        text += more
    return _parse_json_row(text[:end])


def _raise_on_object_over_lines(path: Path, file: BinaryIO) -> None:
    """Raise ValueError where a file whose first line is no JSON begins with an object over several
    lines, which names the keys of the object. Leave the place in the file unchanged.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = _find_object_end(text)
        if end is None or end > MAX_PARSED_OBJECT_BYTES or b"\n" not in text[:end].strip():
            return
        row = _parse_json_row(text[:end])
    if not isinstance(row, dict):
        return
    raise ValueError(
        f"{path} begins with an object over several lines (its keys: {', '.join(map(repr, row))});"
        " rows are one object a line, or one array of objects."
        + (describe_wrapped_rows(row) or " Write each object as one line: jq -c . FILE.")
    )


def describe_wrapped_rows(row: dict[str, Any]) -> str:
    """Return advice, as a sentence with a space in front, on an object that holds rows as the list
    under one of its keys; "" for any other object.
    """
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return (
                f" Its key {name!r} has a list of objects: if they are the rows, write that list"
                f" alone: jq -c '.[\"{name}\"][]' FILE > rows.jsonl."
            )
    return ""


def _parse_json_row(text: bytes) -> Any:
    """Return the value of a row, or a ValueError (not raised) that says why the row cannot be
    read. NaN and Infinity, which JSON does not have and Python writes, are read as numbers.
    """
    repeated_names: list[str] = []

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object, and note the names that it has twice. The row is made last of all."""
        made = dict(pairs)
        repeated_names.clear()
        if len(made) < len(pairs):
            repeated_names.extend(name for name, value in pairs if made[name] != value)
        return made

    if not text.strip(b"\0 \t\r\n") and b"\0" in text:
        return ValueError(
            "only NUL bytes, as a crash leaves them behind; remove them: tr -d '\\000' < FILE"
        )
    try:
        row = json.loads(text.decode("utf-8-sig"), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        return ValueError(
            f"not UTF-8 (byte {text[error.start] if error.start < len(text) else 0:#04x})"
        )
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")
    if isinstance(row, dict) and repeated_names:
        return ValueError(
            f"the key {repeated_names[0]!r} stands in the row twice, with different values; keep"
            " one of them"
        )
    return row


# tables of Arrow


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
            f"{path}: {kind} need pyarrow; install the extra"
            f" ({format_install_command('parquet')}), or convert the rows to JSONL."
        ) from None
    number = 0
    try:
        for batch in open_batches(path):
            for start in range(0, len(batch), ARROW_BATCH_ROWS):
                for row in _convert_batch_rows(batch.slice(start, ARROW_BATCH_ROWS)):
                    number += 1
                    yield number, _drop_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "a parquet file" if path.is_file() else "a saved dataset"
        raise ValueError(
            f"{path} is not {kind} that pyarrow can read ({error}); write it again."
        ) from error


# What pyarrow raises for a time that Python cannot hold, or a time zone that it does not know.
_CONVERSION_ERRORS = (ValueError, KeyError, OverflowError, TypeError)


def _convert_batch_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch as dicts, with an UnreadableValue in place of each value
    that has no object of Python.
    """
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except _CONVERSION_ERRORS:
        columns = [_convert_column(batch.column(index)) for index in range(batch.num_columns)]
        names = batch.schema.names
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return rows


def _convert_column(column: Any) -> list[Any]:
    """Return the values of a column, with an UnreadableValue in place of each that has no object of
    Python.
    """
    try:
        values: list[Any] = column.to_pylist()
    except _CONVERSION_ERRORS:
        values = [_convert_value(value) for value in column]
    return values


def _convert_value(value: Any) -> Any:
    """Return a value of a column as an object of Python, or an UnreadableValue. Of an object or a
    list only the parts that cannot be read become unreadable.
    """
    try:
        return value.as_py()
    except _CONVERSION_ERRORS:
        pass
    if hasattr(value, "items"):  # a struct
        return {name: _convert_value(part) for name, part in value.items()}
    if hasattr(value, "values"):  # a list
        return [_convert_value(part) for part in value.values]
    return UnreadableValue(f"{value.type} that Python cannot hold")


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
    Arrow's tables, at all depths, and absent in JSON.
    """
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value
