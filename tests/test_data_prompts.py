"""Rows, tasks and the order of prompts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data import codec
from rlhf_megatron.data.arithmetic import FewShotParams, few_shot_addition
from rlhf_megatron.data.prompts import (
    PromptItem,
    PromptStream,
    encode_rows,
    load_prompts,
    majority_answer_accuracy,
    prompt_batch,
    supervised_batch,
)
from rlhf_megatron.data.rows import PromptRow, RowCounts, read_jsonl
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer

KEYS = ("prompt", "answer")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_character_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def written(path: Path, *rows: Any) -> Path:
    """A file of the rows: bytes as they are, anything else as JSON."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def items(count: int) -> list[PromptItem]:
    return [PromptItem((i,), str(i), str(i % 3), "test") for i in range(count)]


# rows


def test_good_rows(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b'{"prompt": "1+1=", "answer": 2, "other": []}', b"  ")
    second = written(tmp_path / "b.jsonl", {"prompt": "é\u2028", "answer": "0.50"}, {"prompt": "1+1=", "answer": 2.5})
    rows, counts = read_jsonl([first, second], *KEYS, skip_bad_rows=False)
    assert rows == (
        PromptRow("1+1=", "2", "a", f"{first}:1"),
        PromptRow("é\u2028", "0.50", "b", f"{second}:1"),
        PromptRow("1+1=", "2.5", "b", f"{second}:2"),
    )
    assert counts == RowCounts(num_rows=3, num_bad=0, num_duplicates=1)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b'{"prompt": "x", ', r"not JSON \(Expecting"),
        (b'{"prompt": "x", "answer": NaN}', r"not JSON \(NaN"),
        (b'{"prompt": "\xff", "answer": "1"}', r"not UTF-8 \(byte 0xff\)"),
        (["x"], "a JSON array, not an object"),
        ({"question": "x", "answer": "1"}, r"no key 'prompt' \(set data.prompt_key\); it has 'question', 'answer'"),
        ({"prompt": "x"}, r"no key 'answer' \(set data.label_key\); it has 'prompt'"),
        ({"prompt": " \n", "answer": "1"}, "'prompt' is empty"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'prompt' must be a string, not a JSON array"),
        ({"prompt": "x", "answer": True}, "'answer' must be a string or a number, not a JSON boolean"),
        ({"prompt": "x", "answer": None}, "'answer' must be a string or a number, not a JSON null"),
    ],
)
def test_a_bad_row(tmp_path: Path, row: Any, problem: str) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"}, row)
    with pytest.raises(
        ValueError, match=rf"1 of 2 rows cannot be used:\n  {path}:2: {problem}.*\n.*skip_bad_rows=true"
    ):
        read_jsonl([path], *KEYS, skip_bad_rows=False)
    rows, counts = read_jsonl([path], *KEYS, skip_bad_rows=True)
    assert [row.prompt for row in rows] == ["1"] and counts.num_bad == 1


def test_the_first_few_problems_are_listed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"}, *[[]] * 7)
    with pytest.raises(ValueError, match="7 of 8 rows") as caught:
        read_jsonl([path], *KEYS, skip_bad_rows=False)
    assert f"{path}:6: " in str(caught.value) and f"{path}:7: " not in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_nothing_usable_is_always_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 of 2 rows cannot be used.*\n.*\n.*\n.*no usable row is left"):
        read_jsonl([written(tmp_path / "a.jsonl", [], [])], *KEYS, skip_bad_rows=True)
    with pytest.raises(ValueError, match=r"the dataset is empty: no rows in .*b.jsonl"):
        read_jsonl([written(tmp_path / "b.jsonl", b"", b" ")], *KEYS, skip_bad_rows=True)
    with pytest.raises(ValueError, match=r"c.jsonl does not exist or is not a file"):
        read_jsonl([tmp_path / "c.jsonl"], *KEYS, skip_bad_rows=True)


# prompts over the limit


def test_prompts_over_the_limit(tokenizer: Tokenizer) -> None:
    rows = [PromptRow("1" * n, "1", "t", f"t.jsonl:{n}") for n in (2, 3, 4, 5)]
    assert [item.prompt_ids for item in encode_rows(rows[:2], tokenizer, 3, False)] == [(3, 3), (3, 3, 3)]
    with pytest.raises(
        ValueError,
        match=r"t.jsonl:4: the prompt has 4 tokens, over data.max_prompt_length \(3\), as have 2 of 4 prompts; "
        r"raise it to 5, or set data.filter_overlong_prompts=true",
    ):
        encode_rows(rows, tokenizer, 3, False)
    assert [item.prompt for item in encode_rows(rows, tokenizer, 3, True)] == ["11", "111"]
    with pytest.raises(ValueError, match=r"all 4 prompts are over data.max_prompt_length \(1\); the shortest has 2"):
        encode_rows(rows, tokenizer, 1, True)


def test_load_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"q": text, "a": 1} for text in ("1+1=", "1+1=", "2+2=", "12345+1=")]
    train = written(tmp_path / "train.jsonl", *rows, b"{")
    val = written(tmp_path / "val.jsonl", {"q": "2+2=", "a": 4}, {"q": "3+3=", "a": 6})
    config = DataConfig(
        train_files=(str(train),),
        val_files=(str(val),),
        prompt_key="q",
        label_key="a",
        max_prompt_length=4,
        filter_overlong_prompts=True,
        skip_bad_rows=True,
    )
    sets = load_prompts(config, tokenizer)
    assert [item.prompt for item in sets.train] == ["1+1=", "1+1=", "2+2="]
    assert sets.held_out[1] == PromptItem((5, 12, 5, 15), "3+3=", "6", "val")
    assert (sets.num_bad_rows, sets.num_overlong, sets.num_duplicates, sets.num_shared) == (1, 1, 1, 1)


def test_no_files_at_all(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"data.train_files names no file; name one, or set data.task"):
        load_prompts(DataConfig(), tokenizer)


# tasks


def test_addition(tokenizer: Tokenizer) -> None:
    sets = load_prompts(DataConfig(task="addition"), tokenizer)
    assert (len(sets.train), len(sets.held_out), sets.num_shared) == (8000, 2000, 0)
    problems = {item.prompt: item.label for item in (*sets.train, *sets.held_out)}
    assert len(problems) == 10_000
    assert problems["07+45="] == "052" and problems["99+99="] == "198" and problems["00+00="] == "000"
    assert load_prompts(DataConfig(task="addition"), tokenizer) == sets
    other = load_prompts(DataConfig(task="addition", task_params={"split_seed": 1}), tokenizer)
    assert other.held_out != sets.held_out


def test_the_majority_answer_of_addition(tokenizer: Tokenizer) -> None:
    """099 is the sum of 100 of 10,000 pairs."""
    sets = load_prompts(DataConfig(task="addition", task_params={"num_val": 1}), tokenizer)
    assert majority_answer_accuracy((*sets.train, *sets.held_out)) == 100 / 10_000
    assert majority_answer_accuracy(items(7)) == 3 / 7


@pytest.mark.parametrize(
    ("operation", "example", "answer"), [("add", "9+8=", "17"), ("sub", "11-4=", "7"), ("mul", "6*7=", "42")]
)
def test_few_shot(operation: str, example: str, answer: str) -> None:
    rows = few_shot_addition(FewShotParams(operation=operation))  # type: ignore[arg-type]
    assert (len(rows.train), len(rows.held_out)) == (61, 20)
    asked = {}
    for row in (*rows.train, *rows.held_out):
        *shots, question = row.prompt.split("\n")
        asked[question] = row.label
        assert len(shots) == 3
    assert len(asked) == 81 and asked[example] == answer
    for row in rows.held_out:
        *shots, question = row.prompt.split("\n")
        assert question + row.label not in shots
    for shot in shots:
        question, result = shot.split("=")
        assert asked[question + "="] == result


@pytest.mark.parametrize(
    ("task", "params", "problem"),
    [
        ("adition", {}, "Did you mean 'addition'"),
        ("addition", {"num_vals": 3}, "num_val"),
        ("addition", {"num_val": 10_000}, r"num_val \(10000\) must be from 1 to 9999"),
        ("addition", {"num_digits": 4}, r"num_digits \(4\) must be 1, 2 or 3"),
        ("few_shot_addition", {"num_val": 79}, r"num_val \(79\) must be from 1 to 78"),
        ("few_shot_addition", {"operation": "div"}, "div"),
    ],
)
def test_wrong_tasks(tokenizer: Tokenizer, task: str, params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_prompts(DataConfig(task=task, task_params=params), tokenizer)


# the stream


def test_without_shuffling_the_order_is_that_of_the_items() -> None:
    stream = PromptStream(items(5), batch_size=3, shuffle=False, seed=0)
    first, second = stream.next(1), stream.next(2)
    assert first.prompts == ("0", "1", "2") and first.group_ids == (0, 1, 2)
    assert second.prompts == ("3", "4", "0") and second.group_ids == (3, 4, 5)
    assert second.prompt_ids == ((3,), (4,), (0,)) and second.labels == ("0", "1", "0")


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    stream = PromptStream(items(50), batch_size=20, shuffle=True, seed=3)
    drawn = [prompt for step in range(1, 6) for prompt in stream.next(step).prompts]
    assert set(drawn[:50]) == set(drawn[50:]) == {str(i) for i in range(50)}
    assert drawn[:50] != drawn[50:] and drawn[:50] != [str(i) for i in range(50)]


def test_a_batch_depends_on_seed_and_step_only() -> None:
    stream = PromptStream(items(50), batch_size=20, shuffle=True, seed=3)
    forward = [stream.next(step) for step in range(1, 9)]
    again = PromptStream(items(50), batch_size=20, shuffle=True, seed=3)
    assert [again.next(step) for step in range(8, 0, -1)] == forward[::-1]
    assert PromptStream(items(50), batch_size=20, shuffle=True, seed=4).next(1) != forward[0]
    assert forward[0].prompts[:4] == ("47", "42", "5", "26")  # pinned: the order must not change between versions


def test_group_ids_are_unique_even_when_a_batch_repeats_prompts() -> None:
    stream = PromptStream(items(2), batch_size=5, shuffle=True, seed=0)
    ids = [group for step in range(1, 5) for group in stream.next(step).group_ids]
    assert ids == list(range(20))
    assert sorted(Counter(stream.next(1).prompts).values()) == [2, 3]


def test_the_cursor_travels_and_knows_its_stream() -> None:
    stream = PromptStream(items(5), batch_size=2, shuffle=True, seed=0)
    stream.next(3)
    cursor = codec.decode(codec.encode(stream.state()))
    assert cursor.num_drawn == 6
    resumed = PromptStream(items(5), batch_size=2, shuffle=True, seed=0)
    resumed.restore(cursor)
    assert resumed.state() == cursor
    with pytest.raises(ValueError, match=r"data.train_batch_size \(3\) must be 2"):
        PromptStream(items(5), batch_size=3, shuffle=True, seed=0).restore(cursor)
    for other in (
        PromptStream(items(6), batch_size=2, shuffle=True, seed=0),
        PromptStream(items(5), batch_size=2, shuffle=True, seed=1),
        PromptStream(items(5), batch_size=2, shuffle=False, seed=0),
    ):
        with pytest.raises(ValueError, match="the prompts or their order differ"):
            other.restore(cursor)


def test_an_empty_stream_and_a_wrong_step() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        PromptStream([], 1, True, 0)
    with pytest.raises(ValueError, match=r"data.train_batch_size \(0\)"):
        PromptStream(items(1), 0, True, 0)
    with pytest.raises(ValueError, match=r"step \(0\)"):
        PromptStream(items(1), 1, True, 0).next(0)


def test_prompt_batch() -> None:
    batch = prompt_batch(items(3), first_group_id=10)
    assert batch.group_ids == (10, 11, 12) and batch.sources == ("test",) * 3


def test_supervised_batch(tokenizer: Tokenizer) -> None:
    """Digits are 2..11, "+" is 12, "=" is 15, <eos> is 1."""
    pair = encode_rows([PromptRow("1+1=", "2", "", ""), PromptRow("9=", "09", "", "")], tokenizer, 9, False)
    batch = supervised_batch(pair, tokenizer)
    assert batch.offsets.tolist() == [0, 6, 11]
    assert batch.token_ids.tolist() == [3, 12, 3, 15, 4, 1, 11, 15, 2, 11, 1]
    assert batch.response_mask.int().tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
