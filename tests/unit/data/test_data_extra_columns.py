"""The columns that travel to rewards: what JSON cannot hold does not make a row unusable, and no
reward reads a default in its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_samples import written
from pyarrow import parquet

from rlhf_megatron.data.data_rows import PromptRow, read_prompt_rows
from rlhf_megatron.data.extra_columns import (
    MAX_EXTRA_CHARACTERS,
    ExtraColumnWriter,
    LeftOutColumn,
    LeftOutColumnError,
    describe_left_out_columns,
    parse_extra,
)

QUESTION = {"prompt": "1+1?", "answer": "2"}
TOO_LONG = "too long: a row carries 65536 characters"


def parquet_file(path: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist([QUESTION | row for row in rows]), path)
    return path


def read(
    path: Path, named_columns: Sequence[str] | None = None
) -> tuple[tuple[PromptRow, ...], ExtraColumnWriter]:
    writer = ExtraColumnWriter(named_columns)
    rows, _ = read_prompt_rows([path], "prompt", "answer", False, writer)
    return rows, writer


@pytest.mark.parametrize(
    ("value", "carried"),
    [
        (datetime(2024, 1, 2, 3, 4, 5, 600), "2024-01-02T03:04:05.000600"),
        (datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "2024-01-02T03:04:05+00:00"),
        (date(2024, 1, 2), "2024-01-02"),
        (time(3, 4, 5), "03:04:05"),
        (Decimal("1.10"), "1.10"),
    ],
)
def test_dates_times_and_decimals_travel_as_text(tmp_path: Path, value: Any, carried: str) -> None:
    (row,), writer = read(parquet_file(tmp_path / "a.parquet", {"x": value, "in": {"x": value}}))
    assert json.loads(row.extra) == {"x": carried, "in": {"x": carried}}
    assert writer.list_left_out_columns() == ()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\x89PNG", "bytes"),
        ([b"\x89PNG"], "bytes"),
        (float("nan"), "NaN"),
        ([1.0, float("inf")], "an infinite number"),
        (datetime(2024, 1, 2) - datetime(2024, 1, 1), "timedelta"),
        ("y" * 70_000, TOO_LONG),
    ],
)
def test_what_cannot_travel_is_left_out_and_counted(
    tmp_path: Path, value: Any, reason: str
) -> None:
    path = parquet_file(
        tmp_path / "a.parquet",
        {"x": None, "level": 1},
        {"x": value, "level": 2},
        {"x": value, "level": 3},
    )
    rows, writer = read(path)
    assert [json.loads(row.extra) for row in rows] == [
        {"level": 1},
        {"level": 2, "left_out_columns": {"x": reason}},
        {"level": 3, "left_out_columns": {"x": reason}},
    ]
    columns = writer.list_left_out_columns()
    assert columns == (LeftOutColumn("x", reason, 2, f"{path}:2"),)
    assert f"'x' of 2 rows ({reason}; first {path}:2)" in describe_left_out_columns(columns)
    assert "data.extra_columns" in describe_left_out_columns(columns)


def test_of_an_object_only_an_entry_is_left_out(tmp_path: Path) -> None:
    path = parquet_file(
        tmp_path / "a.parquet",
        {"extra_info": {"index": 3, "raw": b"x", "tests": [{"in": 1, "score": float("nan")}]}},
    )
    (row,), writer = read(path)
    extra = parse_extra(row.extra)
    assert extra["extra_info"] == {"index": 3, "tests": [{"in": 1}]}
    assert [column.name for column in writer.list_left_out_columns()] == [
        "extra_info.raw",
        "extra_info.tests.score",
    ]
    for ask in (
        lambda: extra["extra_info"]["raw"],
        lambda: extra["extra_info"].get("raw"),
        lambda: extra["extra_info"]["tests"][0]["score"],
    ):
        with pytest.raises(
            LeftOutColumnError, match=r"the column '\w+' of the row is not in extra"
        ):
            ask()
    assert extra["extra_info"].get("other", 7) == 7
    with pytest.raises(KeyError):
        extra["extra_info"]["other"]


def test_the_longest_values_make_room_for_the_others(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        QUESTION | {"a": "x" * 40_000, "b": {"c": "x" * 50_000, "d": "short"}, "e": "x" * 20_000},
    )
    (row,), _ = read(path)
    extra = json.loads(row.extra)
    assert extra.keys() == {"a", "b", "e"} and len(extra["a"]) == 40_000
    assert extra["b"] == {"d": "short", "left_out_columns": {"c": TOO_LONG}}
    assert len(row.extra) <= MAX_EXTRA_CHARACTERS


def test_nan_and_half_characters_of_json_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        b'{"prompt": "1", "answer": 1, "score": NaN, "ok": [null, 2]}',
        b'{"prompt": "1", "answer": "1", "text": "\\ud800", "\\ud801": 1}',
    )
    rows, _ = read(path)
    assert [row.extra for row in rows] == [
        '{"label_is_json": true, "ok": [null, 2], "left_out_columns": {"score": "NaN"}}',
        '{"left_out_columns": {"text": "text with half of a surrogate pair",'
        ' "\\\\ud801": "text with half of a surrogate pair"}}',
    ]


def test_named_columns(tmp_path: Path) -> None:
    """Exactly they are carried. A reward that asks for another column of the row learns why it is
    not there.
    """
    row = {"rubric": "be kind", "id": 7, "raw": b"x", "extra_info": {"index": 1, "raw": b"x"}}
    path = parquet_file(tmp_path / "a.parquet", row)
    (good,), writer = read(path, ("rubric", "extra_info.index"))
    extra = parse_extra(good.extra)
    assert extra == {"rubric": "be kind", "extra_info": {"index": 1}}
    assert writer.list_left_out_columns() == (), "the user chose what to carry"
    for ask in (lambda: extra.get("id"), lambda: extra["extra_info"]["raw"]):
        with pytest.raises(LeftOutColumnError, match=r"not named in data.extra_columns"):
            ask()
    assert extra.get("other") is None
    assert read(path, ())[0][0].extra.startswith('{"extra_info": {"left_out_columns"')
    for names, problem in (
        (("raw",), "its column 'raw', which data.extra_columns names, cannot be carried .bytes."),
        (("extra_info",), "its column 'extra_info.raw', which data.extra_columns names, cannot"),
    ):
        with pytest.raises(ValueError, match=rf"a.parquet:1: {problem}"):
            read(path, names)
    _, writer = read(path, ("rubric", "typo", "extra_info.typo"))
    with pytest.raises(
        ValueError, match=r"names 'extra_info.typo', 'typo', which none of the 1 rows has"
    ):
        writer.check_named_columns()


def test_pictures_are_not_left_out(tmp_path: Path) -> None:
    """A prompt whose pictures are left out would be another question."""
    path = parquet_file(tmp_path / "a.parquet", {"images": [{"bytes": b"\x89PNG", "path": None}]})
    with pytest.raises(ValueError, match=r"a.parquet:1: it has images, and prompts are text"):
        read(path)
    (row,), _ = read(parquet_file(tmp_path / "b.parquet", {"images": [], "image": b"x"}))
    assert json.loads(row.extra) == {"images": [], "left_out_columns": {"image": "bytes"}}


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", QUESTION | {"left_out_columns": {}})
    with pytest.raises(ValueError, match=r"a column 'left_out_columns', a name that extra itself"):
        read(path)


def test_labels_and_sources_of_tables(tmp_path: Path) -> None:
    """A decimal is a number; null and NaN name no source."""
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "x", "answer": Decimal("72.50")}]), path
    )
    (row,), _ = read(path)
    assert (row.label, row.source) == ("72.5", "a")
    lines = written(
        tmp_path / "b.jsonl",
        QUESTION | {"data_source": None},
        b'{"prompt": "x", "answer": "1", "data_source": NaN}',
        QUESTION | {"data_source": "gsm8k"},
    )
    assert [row.source for row in read(lines)[0]] == ["b", "b", "gsm8k"]
