"""One row in all the forms that programs write: with nulls, with columns that nothing reads, with
text in parts, as lines, as an array and as a table. All are the same sample, in every job.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from places import MODEL
from published_templates import write_published
from pyarrow import parquet

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.schema import DataConfig, ModelConfig, SFTConfig
from rlhf_megatron.controller.observe.run_summary import describe_run_start
from rlhf_megatron.data.data_rows import ChatMessage, read_prompt_rows
from rlhf_megatron.data.document_sets import load_documents, load_held_out_samples
from rlhf_megatron.data.prompts import load_prompt_sets
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer

USER = {"role": "user", "content": "1+1="}
TWO = {"role": "assistant", "content": "2"}
NULLS = {"name": None, "tool_calls": None, "reasoning_content": None}
PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
UNREAD = {
    "created": datetime(2024, 1, 2),
    "picture": b"\x89PNG",
    "score": float("nan"),
    "cost": Decimal("1.10"),
    "page": "x" * 70_000,
}
FORMS = ["lines", "array", "pretty", "table"]


def write(folder: Path, form: str, *rows: dict[str, Any]) -> str:
    """A file of the rows in this form. Columns that JSON cannot hold are in the table alone."""
    if form == "table":
        path = folder / "sums.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{**row, **UNREAD} for row in rows]), path)
        return str(path)
    unread = {"score": float("nan"), "page": UNREAD["page"], "half": "\ud800", "gone": None}
    full = [{**row, **unread} for row in rows]
    path = folder / ("sums.jsonl" if form == "lines" else "sums.json")
    if form == "lines":
        path.write_text("".join(json.dumps(row) + "\r\n" for row in full))
    else:
        path.write_text(json.dumps(full, indent=1 if form == "pretty" else None))
    return str(path)


def write_plain(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "plain" / "sums.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_published(tmp_path, "qwen25"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "prompt",
    [[USER | NULLS], [USER | {"tool_calls": []}], [USER | {"content": PARTS}]],
    ids=["nulls", "empty lists", "parts"],
)
def test_prompts_of_rl(tmp_path: Path, form: str, prompt: Any) -> None:
    row = {"prompt": prompt, "answer": "2", "data_source": None}
    path = write(tmp_path, form, row, row | {"data_source": "gsm8k"})
    rows, counts = read_prompt_rows([path], "prompt", "answer", skip_bad_rows=False)
    assert [(row.prompt, row.label, row.source) for row in rows] == [
        ((ChatMessage("user", "1+1="),), "2", "sums"),
        ((ChatMessage("user", "1+1="),), "2", "gsm8k"),
    ]
    assert counts.num_bad == 0


def test_a_prompt_in_parts_is_a_text(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    files = write_plain(tmp_path, {"prompt": PARTS, "answer": "2"}, {"prompt": "1+1=", "answer": 2})
    data = DataConfig(train_files=(files,), apply_chat_template=True)
    first, second = load_prompt_sets(data, chat_tokenizer).train_items
    assert first.prompt_ids == second.prompt_ids
    plain = load_prompt_sets(replace(data, apply_chat_template=False), chat_tokenizer)
    assert [item.prompt for item in plain.train_items] == ["1+1=", "1+1="]


def test_left_out_columns_are_told_at_start(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    path = write(tmp_path, "table", *[{"prompt": "1+1=", "answer": "2"}] * 3)
    data = DataConfig(train_files=(path,), val_files=(path,))
    sets = load_prompt_sets(data, chat_tokenizer)
    text = describe_run_start("run", ModelConfig(path="m"), "pools", "1 fake", sets)
    assert "; left out of extra, so that no reward can read them: 'picture' of 6 rows" in text
    assert f"(bytes; first {path}:1), 'score' of 6 rows (NaN; first {path}:1)" in text
    assert "'page' of 6 rows (too long: a row carries 65536 characters" in text
    assert json.loads(sets.train_items[0].extra)["created"] == "2024-01-02T00:00:00"
    named = load_prompt_sets(replace(data, extra_columns=("cost",)), chat_tokenizer)
    assert named.left_out_columns == ()
    with pytest.raises(ValueError, match=r"data.extra_columns names 'typo', which none of the 6"):
        load_prompt_sets(replace(data, extra_columns=("cost", "typo")), chat_tokenizer)
    with pytest.raises(ValueError, match=r"sums.parquet:1: its column 'score', which data.extra_c"):
        load_prompt_sets(replace(data, extra_columns=("score",)), chat_tokenizer)


def test_data_show_names_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "pretty", {"prompt": "1+1=", "answer": "2"})
    run = tmp_path / "run.yaml"
    files = f"train_files: [{path}], val_files: [{path}]"
    data = f"{{{files}, max_prompt_length: 8, max_response_length: 8}}"
    run.write_text(f"model: {{path: {MODEL}, init_seed: 1}}\ndata: {data}\n")
    assert main(["data", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "1+1=⟦2<eos>⟧" in shown
    assert f"'score' of 2 rows (NaN; first {path}:1), 'half' of 2 rows (text with half" in shown
    assert main(["data", "show", str(run), "data.extra_columns=[half]"]) != 0
    assert f"{path}:1: its column 'half', which data.extra_columns" in capsys.readouterr().err


# supervised jobs

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}],
}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer", "default": None}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


def load_chats(
    path: str, tokenizer: Tokenizer, **settings: Any
) -> list[tuple[tuple[int, ...], Any, str]]:
    data = DataConfig(train_files=(path,), apply_chat_template=True)
    sft = SFTConfig(messages_key="messages", **settings)
    items = load_documents(data, sft, tokenizer, is_pairs=False).sources[0].items
    return [
        (document.token_ids, document.trained_spans, items[index].source)
        for index in range(len(items))
        for document in items[index].documents
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_memory", [True, False])
def test_conversations(
    tmp_path: Path, chat_tokenizer: Tokenizer, form: str, in_memory: bool
) -> None:
    """In memory, and streamed where the form can be streamed."""
    rows = [
        {"messages": [USER | NULLS, TWO | NULLS], "tools": None, "data_source": None},
        {"messages": [USER | {"content": PARTS} | NULLS, TWO | NULLS], "tools": None},
    ]
    wanted = load_chats(write_plain(tmp_path, *[{"messages": [USER, TWO]}] * 2), chat_tokenizer)
    assert {source for _, _, source in wanted} == {"sums"} and len(wanted) == 2
    if form == "table":
        # a column of a table has one type
        rows = [rows[0]] * 2
        in_memory = True
    path = write(tmp_path, form, *rows)
    assert load_chats(path, chat_tokenizer, in_memory=in_memory) == wanted


def test_nulls_among_arguments_and_in_schemas_stay(
    tmp_path: Path, chat_tokenizer: Tokenizer
) -> None:
    row = {"messages": [USER, CALL | NULLS | {"tool_calls": CALL["tool_calls"]}], "tools": TOOLS}
    for form in ("lines", "array"):
        (document,) = load_chats(write(tmp_path, form, row), chat_tokenizer)
        text = chat_tokenizer.decode_with_special_tokens(document[0])
        assert '{"name": "add", "arguments": {"a": 1, "b": null}}' in text
        assert '"default": null' in text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": None}, "'messages'"),
        ({"messages": [USER, TWO | {"content": "\ud800"}]}, "has half of a surrogate pair"),
        (
            {
                "messages": [
                    USER,
                    CALL | {"tool_calls": [{"function": {"arguments": float("nan")}}]},
                ]
            },
            "message 2 of 'messages' has NaN or Infinity",
        ),
        ({"messages": [USER, TWO], "tools": [{"x": float("nan")}]}, "'tools' has NaN"),
        (
            {"messages": [USER, TWO | {"content": [{"type": "image"}]}]},
            "message 2 of 'messages' must have text, or parts of text, as content",
        ),
    ],
)
def test_what_a_conversation_is_still_refused_for(
    tmp_path: Path, chat_tokenizer: Tokenizer, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=f"sums.jsonl:1: .*{problem}"):
        load_chats(write_plain(tmp_path, row), chat_tokenizer)


def test_pictures_beside_a_conversation(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"messages": [USER, TWO], "images": [b"\x89PNG"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r"a.parquet:1: it has images, and prompts are text"):
        load_chats(str(path), chat_tokenizer)


@pytest.mark.parametrize("form", FORMS)
def test_pairs_and_texts_and_answers(tmp_path: Path, form: str) -> None:
    """Pairs, plain texts whose loss is asked for, and rows of prompt and answer with a weight."""
    write_character_tokenizer(tmp_path)
    digits = load_tokenizer(tmp_path)
    answer = "2" if form == "table" else PARTS[:1]
    pair = {"prompt": "1+1=", "chosen": answer, "rejected": "3", "w": 0.5, "text": "1+1=2"}
    path = write(tmp_path, form, pair)
    data = DataConfig(train_files=(path,), val_files=(path,))
    pairs = load_documents(data, SFTConfig(loss_mode="dpo", weight_key="w"), digits, is_pairs=True)
    chosen = (3, 12, 3, 15, 4, 1) if form == "table" else (3, 12, 3, 15, 3, 12, 1)
    assert pairs.sources[0].items[0].documents[0].token_ids == chosen
    assert pairs.sources[0].items[0].weight == 0.5
    (text,) = load_held_out_samples(replace(data, prompt_key="question"), SFTConfig(), digits)
    assert text.documents[0].token_ids == digits.encode("1+1=2")
    data = replace(data, label_key="rejected")
    answers = load_documents(data, SFTConfig(weight_key="w"), digits, is_pairs=False)
    assert answers.sources[0].items[0].documents[0].token_ids == (3, 12, 3, 15, 5, 1)
    assert answers.sources[0].items[0].weight == 0.5


def test_a_weight_that_is_no_number(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    digits = load_tokenizer(tmp_path)
    row = {"prompt": "1+1=", "answer": "2", "w": float("nan")}
    data = DataConfig(train_files=(write_plain(tmp_path, row),))
    with pytest.raises(ValueError, match=r"its column 'w', which sft.weight_key names, cannot be"):
        load_documents(data, SFTConfig(weight_key="w"), digits, is_pairs=False)
    table = tmp_path / "a.parquet"
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "w": Decimal("0.50")}
    parquet.write_table(pyarrow.Table.from_pylist([pair]), table)
    sft = SFTConfig(loss_mode="dpo", weight_key="w")
    sets = load_documents(DataConfig(train_files=(str(table),)), sft, digits, is_pairs=True)
    assert sets.sources[0].items[0].weight == 0.5
