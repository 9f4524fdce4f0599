"""Files of rows as other programs leave them: arrays of JSON, nulls, NaN, byte order marks, and
values that Python has no object for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_samples import written
from pyarrow import parquet

from rlhf_megatron.data import row_files
from rlhf_megatron.data.row_files import (
    UnreadableValue,
    iterate_json_rows,
    iterate_raw_rows,
    read_json_row_at,
)

ROWS = [
    {"prompt": 'a "quoted" ] text, {with} [brackets', "answer": "1\\"},
    {"prompt": "é\u2028\n", "answer": [{"x": [1, 2]}, {}]},
    {"prompt": "third", "answer": 3},
]


def read(path: Path) -> list[tuple[int, Any]]:
    return list(iterate_raw_rows(path))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_an_array_has_the_rows_of_its_lines(
    tmp_path: Path, suffix: str, indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(ROWS, indent=indent, ensure_ascii=is_ascii)
    path = tmp_path / f"a{suffix}"
    for content in (
        text.encode(),
        b"\xef\xbb\xbf\r\n" + text.replace("\n", "\r\n").encode() + b"\r\n\r\n",
    ):
        path.write_bytes(content)
        assert read(path) == list(enumerate(ROWS, start=1))


def test_a_row_is_read_again_at_its_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lines and of arrays, also where a row is longer than the first piece that is read."""
    monkeypatch.setattr(row_files, "HEAD_BYTES", 16)
    lines = written(tmp_path / "lines.jsonl", b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode(), b"")
    with lines.open("ab") as file:
        file.write(json.dumps(ROWS[1]).encode() + b"\r\n" + json.dumps(ROWS[2]).encode())
    array = tmp_path / "array.json"
    array.write_text(json.dumps(ROWS, indent=2))
    for path in (lines, array):
        places = [(begin, row) for _, begin, row in iterate_json_rows(path)]
        assert [row for _, row in places] == ROWS
        with path.open("rb") as file:
            for begin, row in reversed(places):
                assert read_json_row_at(file, begin) == row


def test_bad_items_of_an_array(tmp_path: Path) -> None:
    """A bad item is a bad row; an array that is cut off, or is not all of the file, is an error."""
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {bad}, 3, {"a": 4},]')
    rows = read(path)
    assert [number for number, _ in rows] == [1, 2, 3, 4, 5]
    assert (rows[0][1], rows[2][1], rows[3][1]) == ({"a": 1}, 3, {"a": 4})
    assert "not JSON (Expecting property name" in str(rows[1][1])
    assert "not JSON (Expecting value" in str(rows[4][1])
    path.write_text(" [ ]\n")
    assert read(path) == []
    for text in ('[{"a": 1}, {"a": "cut of', '[{"a": 1}, {"a": 2}', '[{"a": 1}, '):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a.json begins an array of rows and does not end it"):
            read(path)
    path.write_text('[{"a": 1}]\n[{"a": 2}]\n')
    with pytest.raises(ValueError, match=r"goes on behind its array of rows, which ends at byte 9"):
        read(path)


def test_lines_that_are_arrays_stay_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ["x"], {"a": 1})
    assert read(path) == [(1, ["x"]), (2, {"a": 1})]


def test_an_object_around_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))
    with pytest.raises(ValueError) as caught:
        read(path)
    assert "begins with an object over several lines (its keys: 'version', 'data')" in str(
        caught.value
    )
    assert "jq -c '.[\"data\"][]' FILE > rows.jsonl" in str(caught.value)
    path.write_text(json.dumps({"prompt": "1", "answer": "1"}, indent=1))
    with pytest.raises(ValueError, match=r"Write each object as one line: jq -c . FILE"):
        read(path)


def test_a_broken_first_line_is_a_bad_row(tmp_path: Path) -> None:
    for line in (b'{"a": 1, ', b"{bad", b'{"a": }'):
        path = written(tmp_path / "a.jsonl", line, {"a": 2})
        (_, problem), second = read(path)
        assert "not JSON" in str(problem) and second == (2, {"a": 2})


def test_marks_blanks_and_nulls(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        b"\xef\xbb\xbf",
        b'{"a": 1, "b": null, "c": {"d": null}}\r',
        b" \t\r",
        b'{"a": NaN, "b": -Infinity}',
        b"\0\0\0",
    )
    rows = read(path)
    assert rows[0] == (2, {"a": 1, "c": {"d": None}}), "what a column holds may be null"
    assert str(rows[1]) == "(4, {'a': nan, 'b': -inf})"
    assert rows[2][0] == 5 and "only NUL bytes" in str(rows[2][1]) and len(rows) == 3
    assert next(iterate_raw_rows(path, keeps_nulls=True))[1]["b"] is None


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        b'{"a": 1, "a": 2}',
        b'{"a": 1, "a": 1}',
        b'{"a": {"b": 1, "b": 2}, "c": 3}',
    )
    rows = [row for _, row in iterate_raw_rows(path)]
    assert str(rows[0]).startswith("the key 'a' stands in the row twice, with different values")
    assert rows[1:] == [{"a": 1}, {"a": {"b": 2}, "c": 3}]


def test_times_that_python_cannot_hold(tmp_path: Path) -> None:
    """A time of nanoseconds, alone and in an object, does not keep the other columns from being
    read.
    """
    seconds = pyarrow.array([1_000_000_000, 1_000_000_001], pyarrow.timestamp("ns"))
    table = pyarrow.table(
        {
            "prompt": ["x", "y"],
            "time": seconds,
            "info": pyarrow.StructArray.from_arrays([seconds, [1, 2]], ["time", "index"]),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (_, first), (_, second) = read(tmp_path / "a.parquet")
    assert first["time"].isoformat() == "1970-01-01T00:00:01"
    if not isinstance(second["time"], UnreadableValue):
        return  # pandas is installed, and holds nanoseconds
    assert second == {
        "prompt": "y",
        "time": UnreadableValue("timestamp[ns] that Python cannot hold"),
        "info": {
            "time": UnreadableValue("timestamp[ns] that Python cannot hold"),
            "index": 2,
        },
    }


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a.csv", "a table of text; write its rows as JSONL"),
        ("a.jsonl.gz", "compressed; unpack it first"),
        ("data-00000-of-00001.arrow", "name the folder with its state.json"),
    ],
)
def test_formats_that_are_not_read(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=advice):
        iterate_raw_rows(tmp_path / name)
