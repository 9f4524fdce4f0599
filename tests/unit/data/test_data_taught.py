"""What a teacher told of conversations, from their own rows:
at the tokens that train, or refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from published_templates import write_published

from rlhf_megatron.config.schema import DataConfig, SFTConfig
from rlhf_megatron.data.document_samples import SampleSource, gather_samples
from rlhf_megatron.data.document_sets import load_documents
from rlhf_megatron.data.tokenizer import load_tokenizer

TOP_K = 2
SFT = SFTConfig("forward_kl", {"top_k": TOP_K}, messages_key="messages", teacher_key="teacher")


def chat(*answers: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": role, "content": said}
        for text in answers
        for role, said in zip(roles, ("Hi", text), strict=True)
    ]


def told(num_places: int, first: int) -> dict[str, list[list[float]]]:
    """Three tokens a place, the likeliest last: ids first, first + 1, .. tell which place it is."""
    places = range(first, first + num_places)
    return {"ids": [[7, 8, n] for n in places], "log_probs": [[-9.0, -2.0, -0.5] for _ in places]}


def load(tmp_path: Path, family: str, rows: list[dict[str, Any]], **more: Any) -> SampleSource:
    tokenizer = load_tokenizer(write_published(tmp_path, family))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train_files=(str(tmp_path / "rows.jsonl"),), apply_chat_template=True, **more)
    return load_documents(data, SFT, tokenizer, is_pairs=False).sources[0]


def num_trained(tmp_path: Path, family: str, messages: list[dict[str, str]]) -> int:
    """As the refusal of a row with none tells it."""
    with pytest.raises(ValueError, match="tokens of the row train") as caught:
        load(tmp_path, family, [{"messages": messages, "teacher": {"ids": [], "log_probs": []}}])
    return int(str(caught.value).split(" tokens")[0].rpartition(" ")[2])


@pytest.mark.parametrize("family", ["llama3", "qwen3"])  # one document; a document a turn
def test_places_stand_at_the_tokens_that_train(tmp_path: Path, family: str) -> None:
    chats = [chat("Hello!", "4"), chat("Yes")]
    counts = [num_trained(tmp_path, family, one) for one in chats]
    rows = [
        {"messages": one, "teacher": told(count, first)}
        for one, count, first in zip(chats, counts, (50, 50 + counts[0]), strict=True)
    ]
    source = load(tmp_path, family, rows)
    places = [(0, i) for i in reversed(range(len(source.items)))]  # last sample first
    batch = gather_samples([source], places)
    assert batch.teacher_columns is not None
    mask = batch.tokens.response_mask
    ids = batch.teacher_columns.teacher_ids
    log_probs = batch.teacher_columns.teacher_log_probs
    assert ids.shape == log_probs.shape == (batch.tokens.num_tokens, TOP_K)
    assert not ids[~mask].any() and not log_probs[~mask].any()
    assert bool((ids[mask][:, 1] == 8).all()), "the unlikeliest of three is left out"
    assert log_probs[mask].tolist() == [[-0.5, -2.0]] * sum(counts), "the likeliest first"
    starts = batch.tokens.offsets[:-1]
    first_of_each = [int(ids[start:][mask[start:]][0, 0]) for start in starts]
    assert sorted(first_of_each, reverse=True) == first_of_each, "the last document stands first"
    assert sorted(ids[mask][:, 0].tolist()) == list(range(50, 50 + sum(counts)))
    again = source.items.make_batch([0]).teacher_columns
    assert again is not None and torch.equal(
        again.teacher_ids[again.teacher_ids[:, 0] > 0][0], torch.tensor([50, 8])
    )


def test_another_teacher_is_other_data(tmp_path: Path) -> None:
    """A run that is resumed names its data by what trains."""
    count = num_trained(tmp_path, "llama3", chat("4"))
    digests = {
        repr(
            load(tmp_path, "llama3", [{"messages": chat("4"), "teacher": told(count, first)}]).items
        )
        for first in (50, 50, 51)
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"ids": [[1, 2]]},
            r"1 ids and \d+ log_probs, one for each place, but \d+ tokens of the row train",
        ),
        ({"ids": [[1]] * 2, "log_probs": [[-1.0]] * 2}, "place 0 .*top_k is 2"),
        ({"ids": [[1, 1]] * 2, "log_probs": [[-1.0, -2.0]] * 2}, "must have different tokens"),
        ({"ids": [[1, 2]] * 2, "log_probs": [[-0.1, -0.1]] * 2}, "at most 1 together"),
        (
            {"ids": [[1, 10**6]] * 2, "log_probs": [[-1.0, -2.0]] * 2},
            "1000000, which is no id below",
        ),
        (
            {"ids": [[1, 2]] * 2, "log_probs": [[-1.0, math.inf]] * 2},
            " has inf, which is no log-prob",
        ),
        (
            {"ids": [[1, 2]] * 2, "log_probs": [[-1.0, None]] * 2},
            "place 0 .* has None, which is no log-prob",
        ),
        (
            {"ids": [[1, 2, 3]] * 2, "log_probs": [[-1.0, -2.0, "-9"]] * 2},
            "'-9', which is no log-prob",
        ),
        ({"ids": [[1, 2]] * 2, "log_probs": [[True, -1.0]] * 2}, "True, which is no log-prob"),
        (
            {"ids": [[1, 2]] * 2, "log_probs": [[-1e999, -1.0]] * 2},
            "has -inf, which is no log-prob",
        ),
        ({"ids": "1"}, r'must be \{"ids": '),
    ],
)
def test_what_is_no_teacher(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    count = num_trained(tmp_path, "llama3", chat("4"))
    assert count == 2
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, "llama3", [{"messages": chat("4"), "teacher": told(count, 50) | change}])


def test_a_teacher_may_be_sure(tmp_path: Path) -> None:
    """The probabilities of its tokens may add up to 1."""
    sure = {"ids": [[1, 2]] * 2, "log_probs": [[math.log(0.5)] * 2] * 2}
    assert len(load(tmp_path, "llama3", [{"messages": chat("4"), "teacher": sure}]).items) == 1


def test_a_document_that_would_be_cut(tmp_path: Path) -> None:
    count = num_trained(tmp_path, "llama3", chat("4"))
    long = [
        {
            "messages": [{"role": "user", "content": "x" * 5000}, *chat("4")[1:]],
            "teacher": told(count, 50),
        }
    ]
    with pytest.raises(ValueError, match="what a teacher told of it is not cut"):
        load(tmp_path, "llama3", long, truncation="left")
