"""Rows of JSONL, parquet and saved datasets: what is read, what is refused, and how it is told."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_samples import written
from pyarrow import parquet

from rlhf_megatron.data import extra_columns as extra_module
from rlhf_megatron.data.data_rows import (
    ChatMessage,
    PromptRow,
    RowCounts,
    has_json_label,
    read_prompt_rows,
)
from rlhf_megatron.data.row_files import iterate_raw_rows

KEYS = ("prompt", "answer")
JSON = '{"label_is_json": true}'


def test_good_rows(tmp_path: Path) -> None:
    first = written(
        tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b'{"prompt": "1+1=", "answer": 2}', b"  "
    )
    second = written(
        tmp_path / "b.jsonl",
        {"prompt": "é\u2028", "answer": "0.50"},
        {"prompt": "1+1=", "answer": 2.5},
        {"prompt": "who", "answer": {"target": ["é", "b"]}},
    )
    rows, counts = read_prompt_rows([first, second], *KEYS, skip_bad_rows=False)
    assert rows == (
        PromptRow("1+1=", "2", "a", f"{first}:1", JSON),
        PromptRow("é\u2028", "0.50", "b", f"{second}:1"),
        PromptRow("1+1=", "2.5", "b", f"{second}:2", JSON),
        PromptRow("who", '{"target": ["é", "b"]}', "b", f"{second}:3", JSON),
    )
    assert [has_json_label(row.label, row.extra) for row in rows] == [False, False, False, True]
    assert counts == RowCounts(num_rows=4, num_bad=0, num_duplicates=1)


@pytest.mark.parametrize(
    ("number", "label"),
    [("72.0", "72"), ("-0.50", "-0.5"), ("1e16", "10000000000000000"), ("1e-7", "0.0000001")],
)
def test_a_number_is_written_as_people_write_it(tmp_path: Path, number: str, label: str) -> None:
    """A table with a missing value has whole numbers as 72.0, and no answer is that."""
    file = written(tmp_path / "a.jsonl", f'{{"prompt": "x", "answer": {number}}}'.encode())
    assert read_prompt_rows([file], *KEYS, skip_bad_rows=False)[0][0].label == label


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "x", "answer": True},
            "'answer' must be a string or a number, not a JSON boolean",
        ),
        (b'{"prompt": "x", ', r"not JSON \(Expecting"),
        (b'{"prompt": "x", "answer": NaN}', "'answer' must be a string or a number, not nan"),
        (b'{"prompt": "\xff", "answer": "1"}', r"not UTF-8 \(byte 0xff\)"),
        (["x"], "a JSON array, not an object"),
        (
            {"question": "x", "answer": "1"},
            r"no key 'prompt' \(set data.prompt_key\); it has 'question', 'answer'",
        ),
        ({"prompt": "x"}, r"no key 'answer' \(set data.label_key\); it has 'prompt'"),
        ({"prompt": " \n", "answer": "1"}, "'prompt' is empty"),
        (
            {"prompt": 3, "answer": "1"},
            "'prompt' must be a string or a list of messages, not a JSON number",
        ),
        (
            {"prompt": "x", "answer": True},
            "'answer' must be a string or a number, not a JSON boolean",
        ),
        ({"prompt": "x", "answer": None}, "'answer' is null, which counts as absent"),
        ({"prompt": None, "answer": "1"}, "'prompt' is null, which counts as absent"),
    ],
)
def test_a_bad_row(tmp_path: Path, row: Any, problem: str) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"}, row)
    with pytest.raises(
        ValueError,
        match=rf"1 of 2 rows cannot be used:\n  {path}:2: {problem}.*\n.*skip_bad_rows=true",
    ):
        read_prompt_rows([path], *KEYS, skip_bad_rows=False)
    rows, counts = read_prompt_rows([path], *KEYS, skip_bad_rows=True)
    assert [row.prompt for row in rows] == ["1"] and counts.num_bad == 1


def test_the_first_few_problems_are_listed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"}, *[[]] * 7)
    with pytest.raises(ValueError, match="7 of 8 rows") as caught:
        read_prompt_rows([path], *KEYS, skip_bad_rows=False)
    assert f"{path}:6: " in str(caught.value) and f"{path}:7: " not in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_nothing_usable_is_always_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"2 of 2 rows cannot be used.*\n.*\n.*\n.*no usable row is left"
    ):
        read_prompt_rows([written(tmp_path / "a.jsonl", [], [])], *KEYS, skip_bad_rows=True)
    with pytest.raises(ValueError, match=r"the dataset is empty: no rows in .*b.jsonl"):
        read_prompt_rows([written(tmp_path / "b.jsonl", b"", b" ")], *KEYS, skip_bad_rows=True)
    with pytest.raises(ValueError, match=r"c.jsonl does not exist or is not a file"):
        read_prompt_rows([tmp_path / "c.jsonl"], *KEYS, skip_bad_rows=True)


# what else stands in a row


def only(path: Path, prompt_key: str = "prompt", label_key: str = "answer") -> PromptRow:
    ((row,), counts) = read_prompt_rows([path], prompt_key, label_key, skip_bad_rows=False)
    assert counts == RowCounts(1, 0, 0)
    return row


def test_other_keys_travel_as_json(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl", {"prompt": "1", "answer": "1", "level": [3, None], "é": {"x": 0.5}}
    )
    assert only(path).extra == '{"level": [3, null], "é": {"x": 0.5}}'
    assert only(written(tmp_path / "b.jsonl", {"prompt": "1", "answer": "1"})).extra == ""
    row = only(written(tmp_path / "c.jsonl", {"prompt": "1", "answer": {"target": ["x"]}}))
    assert (row.label, row.extra) == ('{"target": ["x"]}', JSON)


def test_other_keys_have_a_limit(tmp_path: Path) -> None:
    most = extra_module.MAX_EXTRA_CHARACTERS - len('{"k": ""}')
    assert (
        len(
            only(
                written(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1", "k": "x" * most})
            ).extra
        )
        == 65_536
    )
    path = written(
        tmp_path / "b.jsonl", {"prompt": "1", "answer": "1", "j": 1, "k": "x" * (most + 1)}
    )
    assert json.loads(only(path).extra) == {
        "j": 1,
        "left_out_columns": {"k": "too long: a row carries 65536 characters"},
    }


def test_data_source_names_the_source(tmp_path: Path) -> None:
    row = only(written(tmp_path / "a.jsonl", {"prompt": "1", "answer": 1, "data_source": "gsm8k"}))
    assert row.source == "gsm8k" and json.loads(row.extra)["data_source"] == "gsm8k"
    with pytest.raises(ValueError, match="'data_source' must be a name, not a JSON number"):
        only(written(tmp_path / "b.jsonl", {"prompt": "1", "answer": 1, "data_source": 3}))


def test_nested_keys(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        {"p.q": "plain", "p": {"q": "nested"}, "r": {"truth": 7, "style": "rule"}},
    )
    row = only(path, "p.q", "r.truth")
    assert (row.prompt, row.label) == ("plain", "7"), (
        "a key that exists as it is written comes first"
    )
    assert json.loads(row.extra)["r"] == {"style": "rule"}
    with pytest.raises(
        ValueError, match=r"no key 'r.false' \(set data.label_key\); it has 'p.q', 'p', 'r'"
    ):
        only(path, "p.q", "r.false")


SYSTEM = {"role": "system", "content": "be short"}
USER = {"role": "user", "content": "1+1?"}


def test_chat_messages(tmp_path: Path) -> None:
    row = only(written(tmp_path / "a.jsonl", {"prompt": [SYSTEM, USER], "answer": 2}))
    assert row.prompt == (ChatMessage("system", "be short"), ChatMessage("user", "1+1?"))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "'prompt' is empty; it must end with what is to be answered"),
        (
            [USER, {"role": "assistant", "content": "2"}],
            "'prompt' ends with an assistant's or an empty message",
        ),
        (
            [{"role": "user", "content": " "}],
            "'prompt' ends with an assistant's or an empty message",
        ),
        (
            ["1+1?"],
            r'message 1 of .prompt. must be \{"role": ..., "content": ...\}, not a JSON string',
        ),
        (
            [USER | {"name": "x", "tool_calls": None}],
            "message 1 of 'prompt' has 'name'; only role and content are known",
        ),
        (
            [SYSTEM, {"role": "user"}],
            "message 2 of 'prompt' must have text as role and content, not 'user' and nothing",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image"}]}],
            "message 1 of 'prompt' has a part of the type 'image', and prompts are text",
        ),
        (
            [{"type": "image_url", "image_url": "x"}, {"type": "text", "text": "?"}],
            "'prompt' has a part of the type 'image_url', and prompts are text",
        ),
        (
            [{"role": "user", "content": None}],
            "message 1 of 'prompt' must have text as role and content, not 'user' and nothing",
        ),
    ],
)
def test_bad_messages(tmp_path: Path, messages: list[Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        only(written(tmp_path / "a.jsonl", {"prompt": messages, "answer": 2}))


# parquet


def parquet_file(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_parquet_and_jsonl_of_the_same_rows_are_the_same(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3, "data_source": "a" if i % 2 else "b"}
        for i in range(2500)
    ]
    lines = read_prompt_rows([written(tmp_path / "a.jsonl", *rows)], *KEYS, skip_bad_rows=False)
    table = read_prompt_rows(
        [parquet_file(tmp_path / "a.parquet", rows)], *KEYS, skip_bad_rows=False
    )
    assert lines[1] == table[1] == RowCounts(2500, 0, 0)
    for line, row in zip(lines[0], table[0], strict=True):
        assert (row.prompt, row.label, row.source, row.extra) == (
            line.prompt,
            line.label,
            line.source,
            line.extra,
        )
    assert table[0][2047].origin == f"{tmp_path / 'a.parquet'}:2048"


def saved_dataset(path: Path, *parts: Sequence[dict[str, Any]]) -> Path:
    """As `save_to_disk` of datasets 5.2 writes it: Arrow streams, and their names in order."""
    path.mkdir()
    names = [f"data-{number:05}-of-{len(parts):05}.arrow" for number in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pyarrow.Table.from_pylist(list(rows))
        with pyarrow.ipc.new_stream(path / name, table.schema) as stream:
            stream.write_table(table)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    return path


def test_a_saved_dataset_and_jsonl_of_the_same_rows_are_the_same(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 3 or None} for n in range(2500)
    ]
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows)
    )
    folder = saved_dataset(tmp_path / "a", rows[:1500], rows[1500:])
    assert [row for _, row in iterate_raw_rows(folder)] == [
        row for _, row in iterate_raw_rows(lines)
    ]
    assert [number for number, _ in iterate_raw_rows(folder)] == list(range(1, 2501))
    (folder / "data-00001-of-00002.arrow").write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=r"is not a saved dataset that pyarrow can read \(.*\); write it again"
    ):
        list(iterate_raw_rows(folder))
    with pytest.raises(
        ValueError, match=r"has no state.json: .*; of several splits name the folder of one"
    ):
        list(iterate_raw_rows(tmp_path))


def test_what_datasets_itself_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(30)]
    datasets.Dataset.from_list(rows).shuffle(seed=1).select(range(20)).save_to_disk(
        tmp_path / "a", num_shards=3
    )
    wanted = list(datasets.load_from_disk(tmp_path / "a"))
    assert [row for _, row in iterate_raw_rows(tmp_path / "a")] == wanted and len(wanted) == 20


def test_the_layout_of_verl(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"ground_truth": "72", "style": "rule"},
        "extra_info": {"index": 0, "split": "train", "answer": None},
    }
    other = row | {
        "prompt": [SYSTEM, USER],
        "extra_info": {"index": 1, "split": "train", "answer": "x"},
    }
    path = parquet_file(tmp_path / "train.parquet", [row, other])
    (first, second), _ = read_prompt_rows(
        [path], "prompt", "reward_model.ground_truth", skip_bad_rows=False
    )
    assert (first.prompt, first.label, first.source) == (
        (ChatMessage("user", "1+1?"),),
        "72",
        "openai/gsm8k",
    )
    assert json.loads(first.extra) == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule"},  # a label is no other key, however long it is
        "extra_info": {"index": 0, "split": "train"},  # what is null in parquet is absent in JSONL
    }
    assert second.prompt == (ChatMessage("system", "be short"), ChatMessage("user", "1+1?"))


def test_bad_rows_of_parquet(tmp_path: Path) -> None:
    path = parquet_file(
        tmp_path / "a.parquet", [{"prompt": "1", "answer": "1"}, {"prompt": None, "answer": "2"}]
    )
    with pytest.raises(
        ValueError, match=r"1 of 2 rows cannot be used:\n  .*a.parquet:2: no key 'prompt'"
    ):
        read_prompt_rows([path], *KEYS, skip_bad_rows=False)
    rows, counts = read_prompt_rows([path], *KEYS, skip_bad_rows=True)
    assert len(rows) == 1 and counts == RowCounts(2, 1, 0)
    image = parquet_file(
        tmp_path / "b.parquet", [{"prompt": "1", "answer": "1", "images": [b"\x89PNG"]}]
    )
    with pytest.raises(
        ValueError, match=r"b.parquet:1: it has images, and prompts are text: remove that column"
    ):
        read_prompt_rows([image], *KEYS, skip_bad_rows=False)


def test_what_is_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text('{"prompt": "1", "answer": "1"}')
    with pytest.raises(
        ValueError,
        match=r"a.parquet is not a parquet file that pyarrow can read .*; write it again",
    ):
        read_prompt_rows([path], *KEYS, skip_bad_rows=True)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet_file(tmp_path / "a.parquet", [{"prompt": "1", "answer": "1"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ValueError,
        match=r"a.parquet: parquet files need pyarrow; install the extra \(pip install -e '.\[",
    ):
        read_prompt_rows([path], *KEYS, skip_bad_rows=False)
