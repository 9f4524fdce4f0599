"""Files that are larger than memory: the same batches as if they were held, in few bytes,
from any step on.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_templates import write_published

from rlhf_megatron.config.schema import DataConfig, DataSourceConfig, SFTConfig
from rlhf_megatron.data.batch import iterate_columns
from rlhf_megatron.data.document_samples import DocumentSampleBatch, gather_samples
from rlhf_megatron.data.document_sets import DocumentSets, load_documents
from rlhf_megatron.data.item_stream import ItemStream
from rlhf_megatron.data.tokenizer import load_tokenizer

CHATS = SFTConfig(messages_key="messages", max_length=800, weight_key="w")
BATCH = 3


def chat(number: int, num_turns: int = 2) -> dict[str, Any]:
    turns = [{"role": role,
              "content": f"{role} {number} é\u2028 {turn}"} for turn in range(num_turns)
             for role in ("user", "assistant")]  # fmt: skip
    return {"messages": turns, "w": 1.0 + number}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": "yes " * (number + 1), "rejected": "no", "w": 0.5}


def sets_of(
    tmp_path: Path, rows: list[list[Any]], sft: SFTConfig, **more: Any
) -> tuple[DocumentSets, DocumentSets]:
    """Streamed, and held. Each list of rows is a file and a source; a text is a line as it is."""
    sources = []
    for index, of_file in enumerate(rows):
        path = tmp_path / f"{index}.jsonl"
        lines = [
            row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in of_file
        ]
        path.write_bytes("\r\n".join(lines).encode())
        sources.append(DataSourceConfig(f"s{index}", weight=1.0 + index, train_files=(str(path),)))
    data = DataConfig(
        sources=tuple(sources), apply_chat_template=sft.messages_key is not None, **more
    )
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen3"))
    is_pairs = sft.loss_mode == "dpo"
    streamed = load_documents(data, replace(sft, in_memory=False), tokenizer, is_pairs)
    return streamed, load_documents(data, sft, tokenizer, is_pairs)


def same(one: DocumentSampleBatch, other: DocumentSampleBatch) -> bool:
    columns = [
        {name: value for name, _, value in iterate_columns(batch.tokens)} for batch in (one, other)
    ]
    equal = all(torch.equal(columns[0][name], value) for name, value in columns[1].items())
    return equal and one.sources == other.sources and torch.equal(one.weights, other.weights)


@pytest.mark.parametrize("kind", ["chats", "pairs"])
def test_batches_are_those_of_documents_that_are_held(tmp_path: Path, kind: str) -> None:
    """Two weighted sources over several epochs; turns that are documents of their own, bad rows,
    long rows, pairs.
    """
    sft = CHATS if kind == "chats" else SFTConfig("dpo", weight_key="w", max_length=40)
    row = chat if kind == "chats" else pair
    files = [[row(0), "", "{bad", row(1), "   ", row(2)], [row(n) for n in range(3, 12)]]
    if kind == "chats":
        files[1].append(chat(99, num_turns=60))  # over max_length
    streamed, held = sets_of(tmp_path, files, sft, skip_bad_rows=True, filter_overlong_prompts=True)
    assert (
        streamed.counts == held.counts
        and streamed.counts.num_bad == 1
        and streamed.counts.num_overlong > 0
    )
    assert [len(source.items) for source in streamed.sources] == [
        len(source.items) for source in held.sources
    ]
    orders = [ItemStream(sets.sources, BATCH, shuffle=True, seed=5) for sets in (streamed, held)]
    for step in range(1, 16):
        assert orders[0].locate_batch_items(step) == orders[1].locate_batch_items(step)
        assert same(
            *(
                gather_samples(sets.sources, orders[0].locate_batch_items(step))
                for sets in (streamed, held)
            )
        ), step
    assert streamed.num_train > 8 and streamed.sources[1].items[3] == held.sources[1].items[3]


def test_a_run_goes_on_in_the_middle_of_a_file(tmp_path: Path) -> None:
    rows = [[chat(n) for n in range(9)]]
    streamed, _ = sets_of(tmp_path, rows, CHATS)
    first = ItemStream(streamed.sources, BATCH, shuffle=True, seed=5)
    wanted = [
        gather_samples(streamed.sources, first.locate_batch_items(step)) for step in (1, 2, 3, 4)
    ]
    first.locate_batch_items(2)
    again, _ = sets_of(tmp_path, rows, CHATS)
    stream = ItemStream(again.sources, BATCH, shuffle=True, seed=5)
    stream.restore_cursor(first.make_cursor())
    assert stream.num_drawn == 2 * BATCH
    assert all(
        same(gather_samples(again.sources, stream.locate_batch_items(step)), wanted[step - 1])
        for step in (3, 4)
    )
    other, _ = sets_of(tmp_path, [[chat(n) for n in (0, 1, 2, 3, 4, 5, 6, 8, 7)]], CHATS)
    with pytest.raises(ValueError, match="the prompts or their order differ"):
        ItemStream(other.sources, BATCH, shuffle=True, seed=5).restore_cursor(first.make_cursor())


def test_no_token_is_held(tmp_path: Path) -> None:
    rows = [[{"messages": [{"role": "user", "content": "ab " * 2000}, *chat(n)["messages"][1:2]],
              "w": 1} for n in
             range(60)]]  # fmt: skip
    sft = replace(CHATS, max_length=10_000)
    streamed, held = sets_of(tmp_path, rows, sft)
    num_bytes = 5 * held.sources[0].items.make_batch(range(60)).tokens.num_tokens
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen3"))
    data = DataConfig(train_files=(str(tmp_path / "0.jsonl"),), apply_chat_template=True)
    tracemalloc.start()
    kept = load_documents(data, replace(sft, in_memory=False), tokenizer, is_pairs=False)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(kept.sources[0].items) == len(streamed.sources[0].items) == 60
    assert used < num_bytes / 4, (used, num_bytes)


def test_a_file_that_changes_is_told(tmp_path: Path) -> None:
    streamed, _ = sets_of(tmp_path, [[chat(n) for n in range(3)]], CHATS)
    streamed.sources[0].items.make_batch([0])
    path = tmp_path / "0.jsonl"
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match=r"0\.jsonl has changed since the run began to read it"):
        streamed.sources[0].items.make_batch([1])


def test_other_files_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen3"))
    data = DataConfig(train_files=(str(tmp_path),), apply_chat_template=True)
    with pytest.raises(ValueError, match=r"is no file of JSON, which sft\.in_memory: false reads"):
        load_documents(data, replace(CHATS, in_memory=False), tokenizer, is_pairs=False)
