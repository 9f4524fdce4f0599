"""What a supervised job's own rows are asked,
where `generate` and `evaluate` are given no prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_templates import write_published

from rlhf_megatron.config.rules.run_rules import learns_from_pairs
from rlhf_megatron.config.schema import DataConfig, RunConfig, SFTConfig
from rlhf_megatron.data.document_sets import load_held_out_samples
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.jobs.generation.answer_generation_job import load_questions

USER = {"role": "user", "content": "1+1="}
TWO = {"role": "assistant", "content": "2"}
THOUGHT = [USER, {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"}]
CHAT = {
    "messages": [
        USER,
        TWO,
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes"},
    ]
}
PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "data_source": "sums"},
    {
        "chosen": [USER, TWO],
        "rejected": [USER, {"role": "assistant", "content": "3"}],
        "data_source": "sums",
    },
]
PROMPT = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
DPO = SFTConfig(loss_mode="dpo")


@pytest.mark.parametrize(
    ("rows", "sft", "asked"),
    [
        (PAIRS, DPO, [(PROMPT, "2")] * 2),
        ([CHAT], SFTConfig(messages_key="messages"),
         [(PROMPT, "2"),
          (PROMPT + "2<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
           "Yes")]),
        ([{"messages": THOUGHT}], SFTConfig(messages_key="messages"), [(PROMPT, "2")]),
        ([{"prompt": "1+1=", "answer": "2", "chosen": "9"}], DPO, [(PROMPT, "2")]),
    ],
)  # fmt: skip
def test_rows_are_asked_for_what_they_train(
    rows: list[dict[str, Any]], sft: SFTConfig, asked: list[tuple[str, str]], tmp_path: Path
) -> None:
    """A file of prompts and labels counts as that, whatever the job learned from."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    data = DataConfig(train_files=(str(path),), val_files=(str(path),), apply_chat_template=True)
    train, held_out, _ = load_questions(
        data, sft, learns_from_pairs(RunConfig(job="sft", data=data, sft=sft)), tokenizer
    )
    assert [
        (item.prompt[item.prompt.index("<|im_start|>user") :], item.label) for item in held_out
    ] == asked
    assert train == held_out and {item.source for item in train} == {"sums"}
    assert all(
        tokenizer.decode_with_special_tokens(item.prompt_ids) == item.prompt for item in train
    )


def test_the_better_answer_of_a_pair_has_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    data = DataConfig(train_files=(str(path),), val_files=(str(path),), apply_chat_template=True)
    for sample in load_held_out_samples(data, DPO, tokenizer, is_pairs=True):
        document = sample.documents[0]
        assert [
            tokenizer.decode_with_special_tokens(document.token_ids[b:e])
            for b, e in document.trained_spans
        ] == ["2<|im_end|>"]
