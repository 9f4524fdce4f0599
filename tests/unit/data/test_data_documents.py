"""Rows as documents of a supervised job: what trains, weights, limits, pairs, and the order in
which they are drawn.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published_templates import write_published

from rlhf_megatron.cli.data_command import format_sample_lines
from rlhf_megatron.config.schema import DataConfig, DataSourceConfig, SFTConfig
from rlhf_megatron.data.assistant_turns import TokenDocument
from rlhf_megatron.data.document_samples import DocumentSample, InMemorySampleSet, gather_samples
from rlhf_megatron.data.document_sets import load_documents, load_held_out_samples
from rlhf_megatron.data.item_stream import ItemStream
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer

SUMS = [
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": "9=", "answer": "09", "w": 0.5, "data_source": "other"},
]
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {
        "messages": [
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "See you"},
        ],
        "weight": 2,
    },
]
PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    {
        "chosen": [{"role": "user", "content": "2="}, {"role": "assistant", "content": "2"}],
        "rejected": [{"role": "user", "content": "2="}, {"role": "assistant", "content": "33"}],
    },
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def digits(tmp_path: Path) -> Tokenizer:
    """Digits are 2..11, "+" is 12, "=" is 15, <eos> is 1."""
    write_character_tokenizer(tmp_path / "digits")
    return load_tokenizer(tmp_path / "digits")


@pytest.fixture
def sums(tmp_path: Path) -> DataConfig:
    return DataConfig(train_files=(write(tmp_path / "sums.jsonl", SUMS),))


def ids_and_spans(
    items: InMemorySampleSet,
) -> list[list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]]:
    return [[(d.token_ids, d.trained_spans) for d in sample.documents] for sample in items]


def test_prompt_and_answer(digits: Tokenizer, sums: DataConfig) -> None:
    """As RL asks the prompt; the answer and the end train."""
    sets = load_documents(sums, SFTConfig(), digits, is_pairs=False)
    items = sets.sources[0].items
    assert ids_and_spans(items) == [
        [((3, 12, 3, 15, 4, 1), ((4, 6),))],
        [((11, 15, 2, 11, 1), ((2, 5),))],
    ]
    assert [sample.source for sample in items] == ["sums", "other"]
    batch = items.make_batch([1, 0])
    assert batch.tokens.offsets.tolist() == [0, 5, 11] and batch.weights.tolist() == [1, 1]
    assert batch.tokens.response_mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_documents_to_be_scored_are_what_the_first_row_of_their_file_says(
    tmp_path: Path, digits: Tokenizer
) -> None:
    texts = [{"text": "1+1=2"}, {"text": "9"}, {"text": "23", "data_source": "other"}]
    data = DataConfig(val_files=(write(tmp_path / "texts.jsonl", texts),))
    first, second = load_held_out_samples(data, SFTConfig(), digits)
    assert first == DocumentSample((TokenDocument((3, 12, 3, 15, 4), ((1, 5),)),), "texts"), (
        "nothing predicts the first token"
    )
    assert second.source == "other" and second.documents[0].trained_spans == ((1, 2),), (
        "a single token has no loss"
    )
    sums = write(tmp_path / "sums.jsonl", SUMS)
    (sample, _) = load_held_out_samples(
        DataConfig(train_files=(sums,), val_files=(sums,)), SFTConfig(), digits
    )
    assert sample.documents == (TokenDocument((3, 12, 3, 15, 4, 1), ((4, 6),)),)
    both = write(tmp_path / "both.jsonl", [{**row, "text": "1"} for row in SUMS])
    (again, _) = load_held_out_samples(
        DataConfig(train_files=(both,), val_files=(both,)), SFTConfig(), digits
    )
    assert again.documents == sample.documents, (
        "prompts and answers count as that, whatever stands beside them"
    )
    chats = write(tmp_path / "chats.jsonl", CHATS)
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    found = load_held_out_samples(
        DataConfig(train_files=(chats,), val_files=(chats,)), SFTConfig(), tokenizer
    )
    assert [
        tokenizer.decode(s.documents[0].token_ids[slice(*s.documents[0].trained_spans[0])])
        for s in found
    ] == [
        "Hello!",
        "See you",
    ]
    with pytest.raises(ValueError, match="'text' must be a text, not int"):
        load_held_out_samples(
            DataConfig(val_files=(write(tmp_path / "bad.jsonl", [{"text": 3}]),)),
            SFTConfig(),
            digits,
        )


def test_conversations(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    files = (write(tmp_path / "chats.jsonl", CHATS),)
    data = DataConfig(train_files=files, val_files=files, apply_chat_template=True)
    sets = load_documents(data, SFTConfig(messages_key="messages"), tokenizer, is_pairs=False)
    assert (
        sets.counts.describe_counts() == ["4 conversations in one document"]
        and sets.held_out_sources[0].name == "chats"
    )
    shown = list(format_sample_lines(sets.sources, tokenizer, 1, ("[", "]")))
    own = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a"
        " helpful assistant.<|im_end|>\n"
    )
    assert (
        shown[1]
        == own + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello!<|im_end|>]"
    )
    assert shown[0].startswith("--- chats 1 of 2: ") and shown[0].endswith(" train")


@pytest.mark.parametrize(("family", "is_lost"), [("qwen25", False), ("llama3", True)])
def test_tools_that_a_template_does_not_write_are_told(
    family: str, is_lost: bool, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write_published(tmp_path, family))
    rows = [{**row, "tools": [{"type": "function", "function": {"name": "add"}}]} for row in CHATS]
    data = DataConfig(
        train_files=(write(tmp_path / "chats.jsonl", rows),), apply_chat_template=True
    )
    sets = load_documents(data, SFTConfig(messages_key="messages"), tokenizer, is_pairs=False)
    assert (
        "2 conversations whose tools the chat template leaves out" in sets.counts.describe_counts()
    ) == is_lost


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "[{role"}, "'messages' is text that is no JSON .*role"),
        ({"messages": []}, "'messages' must be a list of messages"),
        ({"messages": CHATS[0]["messages"], "tools": "f()"}, "'tools' is text that is no JSON .*f"),
        ({"messages": CHATS[0]["messages"], "tools": "[1]"}, "'tools' must be a list of objects"),
    ],
)
def test_bad_conversations(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    data = DataConfig(
        train_files=(write(tmp_path / "rows.jsonl", [row]),), apply_chat_template=True
    )
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: {problem}"):
        load_documents(data, SFTConfig(messages_key="messages"), tokenizer, is_pairs=False)


def test_pairs(digits: Tokenizer, tmp_path: Path) -> None:
    """The chosen document stands in front of the rejected one; whole conversations
    bring their prompt.
    """
    data = DataConfig(train_files=(write(tmp_path / "pairs.jsonl", PAIRS[:1]),))
    sets = load_documents(data, SFTConfig(loss_mode="dpo"), digits, is_pairs=True)
    one = [[((3, 12, 3, 15, 4, 1), ((4, 6),)), ((3, 12, 3, 15, 5, 1), ((4, 6),))]]
    assert ids_and_spans(sets.sources[0].items) == one
    assert sets.sources[0].items.make_batch([0]).tokens.offsets.tolist() == [0, 6, 12]
    tokenizer = load_tokenizer(write_published(tmp_path, "llama3"))
    data = replace(
        data, train_files=(write(tmp_path / "chats.jsonl", PAIRS[1:]),), apply_chat_template=True
    )
    shown = list(
        format_sample_lines(
            load_documents(data, SFTConfig(loss_mode="dpo"), tokenizer, True).sources, tokenizer, 1
        )
    )
    assert shown[1].endswith(
        "\n\n2=<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦2<|eot_id|>⟧"
    )
    assert shown[3].endswith("⟦33<|eot_id|>⟧") and "rejected" in shown[2]


CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": "é\n"}}}],
}
PARTS = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1="}]


def test_pairs_of_conversations_are_written_by_the_chat_template(tmp_path: Path) -> None:
    """With calls of tools in the prompt and as an answer; a prompt beside them may be a text, in
    parts or whole.
    """
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen3"))
    asked = [{"role": "user", "content": PARTS}, CALL, {"role": "tool", "content": "2"}]
    rows = [
        {"chosen": [*asked, CHATS[0]["messages"][1]], "rejected": [*asked, CALL]},
        {
            "prompt": "1+1=",
            "chosen": [CHATS[0]["messages"][1]],
            "rejected": [{**CALL, "content": "So:"}],
        },
    ]
    data = DataConfig(
        train_files=(write(tmp_path / "pairs.jsonl", rows),), apply_chat_template=True
    )
    sets = load_documents(data, SFTConfig(loss_mode="dpo"), tokenizer, is_pairs=True)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "é\\n"}}\n</tool_call><|im_end|>'
    thought = "<think>\n\n</think>\n\n"
    spelled = [
        [
            tokenizer.decode_with_special_tokens(document.token_ids[slice(*span)])
            for document in sample.documents
            for span in document.trained_spans
        ]
        for sample in sets.sources[0].items
    ]
    assert spelled == [
        [f"{thought}Hello!<|im_end|>", thought + call],
        [f"{thought}Hello!<|im_end|>", f"{thought}So:\n{call}"],
    ]
    for sample in sets.sources[0].items:
        begins = [
            tokenizer.decode_with_special_tokens(document.token_ids[: document.trained_spans[0][0]])
            for document in sample.documents
        ]
        assert begins[0] == begins[1] and begins[0].startswith("<|im_start|>user\n1+1=<|im_end|>\n")


@pytest.mark.parametrize(
    ("rejected", "problem"),
    [
        (CHATS[0]["messages"], "must differ in their last message only"),
        (PAIRS[1]["chosen"], "both answers are the same"),
        (
            [PAIRS[1]["chosen"][0], {"role": "user", "content": "3"}],
            "must end with messages of the assistant",
        ),
        (
            [PAIRS[1]["chosen"][0], {"role": "assistant", "content": [{"type": "image"}]}],
            "must have text, or parts",
        ),
        (
            [PAIRS[1]["chosen"][0], {"role": "assistant", "content": [{"type": "text"}]}],
            "must have text, or parts",
        ),
    ],
)
def test_bad_pairs_of_conversations(rejected: list[Any], problem: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    rows = [{"chosen": PAIRS[1]["chosen"], "rejected": rejected}]
    data = DataConfig(train_files=(write(tmp_path / "rows.jsonl", rows),), apply_chat_template=True)
    with pytest.raises(ValueError, match=problem):
        load_documents(data, SFTConfig(loss_mode="dpo"), tokenizer, is_pairs=True)


def test_weights(digits: Tokenizer, sums: DataConfig) -> None:
    with pytest.raises(ValueError, match="no key 'w'"):
        load_documents(sums, SFTConfig(weight_key="w"), digits, is_pairs=False)
    Path(sums.train_files[0]).write_text(json.dumps(SUMS[1]) + "\n")
    sets = load_documents(sums, SFTConfig(weight_key="w"), digits, is_pairs=False)
    assert sets.sources[0].items.make_batch([0]).weights.tolist() == [0.5]


def test_documents_over_the_limit(digits: Tokenizer, sums: DataConfig) -> None:
    """The first has 6 tokens, the second 5."""
    with pytest.raises(ValueError, match=r"has 6 tokens, over sft.max_length \(5\)"):
        load_documents(sums, SFTConfig(max_length=5), digits, is_pairs=False)
    dropped = load_documents(
        replace(sums, filter_overlong_prompts=True), SFTConfig(max_length=5), digits, False
    )
    assert dropped.num_train == 1 and dropped.counts.num_overlong == 1
    cut = load_documents(replace(sums, truncation="right"), SFTConfig(max_length=5), digits, False)
    assert ids_and_spans(cut.sources[0].items)[0] == [((3, 12, 3, 15, 4), ((4, 5),))]
    left = load_documents(replace(sums, truncation="left"), SFTConfig(max_length=2), digits, False)
    assert ids_and_spans(left.sources[0].items) == [[((4, 1), ((1, 2),))], [((11, 1), ((1, 2),))]]
    with pytest.raises(ValueError, match="no document is left"):
        load_documents(replace(sums, truncation="right"), SFTConfig(max_length=2), digits, False)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "2", "rejected": "3"}, "no key 'prompt'"),
        ({"prompt": "1=", "chosen": "2", "rejected": "2"}, "both answers are the same"),
        (
            {"chosen": PAIRS[1]["chosen"], "rejected": CHATS[0]["messages"]},
            "set data.apply_chat_template=true",
        ),
    ],
)
def test_bad_pairs(row: dict[str, Any], problem: str, digits: Tokenizer, tmp_path: Path) -> None:
    data = DataConfig(train_files=(write(tmp_path / "rows.jsonl", [PAIRS[0], row]),))
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: .*{problem}"):
        load_documents(data, SFTConfig(loss_mode="dpo"), digits, is_pairs=True)
    sets = load_documents(
        replace(data, skip_bad_rows=True), SFTConfig(loss_mode="dpo"), digits, is_pairs=True
    )
    assert sets.num_train == 1 and sets.counts.num_bad == 1


def test_the_digest_tells_what_trains() -> None:
    """It names the data in a checkpoint: other tokens, spans, weights or order are other data."""
    one = TokenDocument((3, 4, 5), ((1, 3),))
    two = TokenDocument((3, 4), ((1, 2),))
    digest = repr(InMemorySampleSet([DocumentSample((one,), "a"), DocumentSample((two,), "a")]))
    others = [
        [DocumentSample((two,), "a"), DocumentSample((one,), "a")],
        [
            DocumentSample((replace(one, trained_spans=((2, 3),)),), "a"),
            DocumentSample((two,), "a"),
        ],
        [DocumentSample((one,), "a", 2.0), DocumentSample((two,), "a")],
        [DocumentSample((one, two), "a")],
    ]
    assert digest == repr(
        InMemorySampleSet([DocumentSample((one,), "a"), DocumentSample((two,), "a")])
    )
    assert digest not in {repr(InMemorySampleSet(samples)) for samples in others}


def test_the_order_depends_on_the_step_alone(digits: Tokenizer, tmp_path: Path) -> None:
    """Two sources with shares 3 and 1: every step of 4 has 3 and 1; an epoch of the small one has
    each row once.
    """
    first = write(tmp_path / "a.jsonl", [{"prompt": f"{i}=", "answer": "1"} for i in range(10)])
    second = write(tmp_path / "b.jsonl", [{"prompt": f"{i}+", "answer": "1"} for i in range(3)])
    sources = (
        DataSourceConfig("a", 3.0, train_files=(first,)),
        DataSourceConfig("b", 1.0, train_files=(second,)),
    )
    sets = load_documents(DataConfig(sources=sources), SFTConfig(), digits, is_pairs=False)
    stream = ItemStream(sets.sources, 4, True, 7)
    steps = [stream.locate_batch_items(step) for step in range(1, 7)]
    assert ItemStream(sets.sources, 4, True, 7).locate_batch_items(5) == steps[4]
    assert sorted(index for step in steps[:3] for source, index in step if source == 1) == [0, 1, 2]
    batch = gather_samples(sets.sources, steps[0])
    assert sorted(batch.sources) == ["a", "a", "a", "b"] and len(batch.tokens) == 4
