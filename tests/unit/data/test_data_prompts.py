"""Rows and tasks as items: templates, solved rows in front, the limit on length, sources and
held-out sets.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_samples import written

from rlhf_megatron.config.schema import DataConfig, DataSourceConfig, FewShotConfig
from rlhf_megatron.data.data_rows import ChatMessage, PromptRow
from rlhf_megatron.data.prompt_items import (
    PromptFormat,
    PromptItem,
    PromptLimit,
    Truncation,
    draw_few_shot_examples,
    encode_prompt_rows,
    make_prompt_batch,
    truncate_ids,
)
from rlhf_megatron.data.prompts import load_prompt_sets
from rlhf_megatron.data.tasks.arithmetic import (
    FewShotAdditionParams,
    generate_few_shot_addition_rows,
)
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_character_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def items(count: int) -> list[PromptItem]:
    return [PromptItem((i,), str(i), str(i % 3), "test") for i in range(count)]


# prompts over the limit

PLAIN = PromptFormat()


def test_prompts_over_the_limit(tokenizer: Tokenizer) -> None:
    rows = [PromptRow("1" * n, "1", "t", f"t.jsonl:{n}") for n in (2, 3, 4, 5)]
    fitting = encode_prompt_rows(rows[:2], tokenizer, PLAIN, PromptLimit(3))
    assert [item.prompt_ids for item in fitting.items] == [(3, 3), (3, 3, 3)]
    with pytest.raises(
        ValueError,
        match=(
            r"t.jsonl:4: the prompt has 4 tokens, over data.max_prompt_length \(3\), as have 2 of 4"
            r" prompts; raise it to 5, or set data.filter_overlong_prompts=true to drop them, or"
            r" data.truncation to cut them"
        ),
    ):
        encode_prompt_rows(rows, tokenizer, PLAIN, PromptLimit(3))
    dropped = encode_prompt_rows(rows, tokenizer, PLAIN, PromptLimit(3, filter_overlong=True))
    assert [item.prompt for item in dropped.items] == ["11", "111"] and (
        dropped.num_dropped,
        dropped.num_cut,
    ) == (2, 0)
    with pytest.raises(
        ValueError, match=r"all 4 prompts are over data.max_prompt_length \(1\); the shortest has 2"
    ):
        encode_prompt_rows(rows, tokenizer, PLAIN, PromptLimit(1, filter_overlong=True))


@pytest.mark.parametrize(
    ("side", "length", "kept"),
    [
        ("left", 4, "3456"),
        ("right", 4, "0123"),
        ("middle", 4, "0156"),
        ("middle", 5, "01456"),
        ("left", 7, "0123456"),
    ],
)
def test_what_is_cut(tokenizer: Tokenizer, side: Truncation, length: int, kept: str) -> None:
    assert "".join(truncate_ids(tuple("0123456"), length, side)) == kept  # type: ignore[arg-type]
    rows = [PromptRow("0123456", "1", "t", "t:1", '{"k": 1}'), PromptRow("12", "1", "t", "t:2")]
    found = encode_prompt_rows(rows, tokenizer, PLAIN, PromptLimit(length, truncation=side))
    assert found.items[0] == PromptItem(tokenizer.encode(kept), kept, "1", "t", '{"k": 1}')
    assert found.items[1].prompt == "12" and (found.num_dropped, found.num_cut) == (
        0,
        int(length < 7),
    )


def test_the_text_of_a_cut_prompt_shows_special_tokens(tokenizer: Tokenizer) -> None:
    found = encode_prompt_rows(
        [PromptRow("12<eos>34", "1", "t", "t:1")],
        tokenizer,
        PLAIN,
        PromptLimit(3, truncation="left"),
    )
    assert found.items[0].prompt_ids == (1, 5, 6) and found.items[0].prompt == "<eos>34"


def test_a_prompt_without_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"t:1: the prompt '' has no tokens"):
        encode_prompt_rows([PromptRow("", "1", "t", "t:1")], tokenizer, PLAIN, PromptLimit(3))


# around and in front of a prompt


def test_the_template_is_around_each_prompt() -> None:
    """Nothing but {prompt} is special in it, and a prompt that looks like a field is left alone."""
    assert (
        PromptFormat(r"Q: {prompt} \\boxed{} {label}").format_prompt("1+{label}")
        == r"Q: 1+{label} \\boxed{} {label}"
    )
    assert (
        PromptFormat("A {prompt}", shots="solved ").format_prompt("x{prompt}")
        == "solved A x{prompt}"
    )


def test_a_list_of_messages_needs_a_chat() -> None:
    chat = (ChatMessage("user", "x"),)
    with pytest.raises(
        ValueError, match=r"list of chat messages; set data.apply_chat_template=true"
    ):
        PLAIN.format_prompt(chat)


ROWS = [PromptRow(f"{i}+1=", str(i + 1), "t", f"t:{i}") for i in range(8)]


def test_solved_rows_are_taken_out_of_training() -> None:
    # the first row of a prompt is the one that is shown
    rows = [*ROWS, PromptRow("3+1=", "four", "t", "t:8")]
    text, left, taken = draw_few_shot_examples(
        rows, FewShotConfig(num_shots=3, template="{prompt}{label};", seed=5), "({prompt})"
    )
    solved = text.split(";")
    assert len(taken) == 3 and solved.pop() == ""
    assert {f"({row.prompt}){row.label}" for row in ROWS if row.prompt in taken} == set(solved)
    assert [row for row in rows if row.prompt not in taken] == list(left)
    assert draw_few_shot_examples(rows, FewShotConfig(3, "{prompt}{label};", 5), "({prompt})") == (
        text,
        left,
        taken,
    )
    chosen = {
        draw_few_shot_examples(rows, FewShotConfig(3, seed=seed), "{prompt}")[2]
        for seed in range(20)
    }
    assert len(chosen) > 10, "another seed chooses other rows"


def test_fields_of_a_solved_row_are_filled_once() -> None:
    rows = [PromptRow("{label}", "{prompt}", "t", "t:1")] * 2 + [PromptRow("x", "y", "t", "t:2")]
    texts = {
        draw_few_shot_examples(rows, FewShotConfig(1, "<{prompt}|{label}>", seed), "{prompt}")[0]
        for seed in range(9)
    }
    assert texts == {"<{label}|{prompt}>", "<x|y>"}


def test_too_few_rows_to_solve() -> None:
    with pytest.raises(
        ValueError, match=r"few_shot.num_shots \(8\) must be below the number of different .* \(8\)"
    ):
        draw_few_shot_examples([*ROWS, *ROWS], FewShotConfig(8), "{prompt}")
    assert len(draw_few_shot_examples(ROWS, FewShotConfig(7), "{prompt}")[1]) == 1


def test_solved_rows_are_not_held_out_either(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(8)]
    train = written(tmp_path / "train.jsonl", *rows)
    val = written(tmp_path / "val.jsonl", *rows)
    shots = FewShotConfig(num_shots=2, template="{prompt}{label} ")
    config = DataConfig(train_files=(str(train),), val_files=(str(val),), few_shot=shots)
    sets = load_prompt_sets(config, tokenizer)
    assert (len(sets.train_items), len(sets.held_out_items), sets.num_held_out_in_train) == (
        6,
        6,
        6,
    )
    prefixes = {item.prompt[: -len("0+1=")] for item in (*sets.train_items, *sets.held_out_items)}
    (prefix,) = prefixes
    for item in sets.train_items:
        assert item.prompt[len(prefix) :] + item.label not in prefix
    alone = written(
        tmp_path / "alone.jsonl",
        *(row for row in rows if f"{row['prompt']}{row['answer']} " in prefix),
    )
    with pytest.raises(ValueError, match="every held-out prompt is used as a solved example"):
        load_prompt_sets(
            DataConfig(train_files=(str(train),), val_files=(str(alone),), few_shot=shots),
            tokenizer,
        )


# files


def test_load_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"q": text, "a": 1} for text in ("1+1=", "1+1=", "2+2=", "12345+1=")]
    train = written(tmp_path / "train.jsonl", *rows, b"{")
    val = written(
        tmp_path / "val.jsonl", {"q": "2+2=", "a": 4}, {"q": "3+3=", "a": "6", "level": 1}
    )
    config = DataConfig(
        train_files=(str(train),),
        val_files=(str(val),),
        prompt_key="q",
        label_key="a",
        max_prompt_length=4,
        filter_overlong_prompts=True,
        skip_bad_rows=True,
    )
    sets = load_prompt_sets(config, tokenizer)
    assert [item.prompt for item in sets.train_items] == ["1+1=", "1+1=", "2+2="]
    assert sets.held_out_items[1] == PromptItem((5, 12, 5, 15), "3+3=", "6", "val", '{"level": 1}')
    assert (
        sets.num_bad_rows,
        sets.num_overlong,
        sets.num_duplicates,
        sets.num_held_out_in_train,
    ) == (1, 1, 1, 1)


def test_no_files_at_all(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"data.train_files names no file; name one, or set data.task"
    ):
        load_prompt_sets(DataConfig(), tokenizer)


def test_a_held_out_set_a_file_or_data_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = written(tmp_path / "train.jsonl", {"prompt": "1", "answer": 1})
    easy = written(
        tmp_path / "easy.jsonl", {"prompt": "2", "answer": 1}, {"prompt": "3", "answer": 1}
    )
    named = [{"prompt": str(i), "answer": 1, "data_source": f"level{i % 2}"} for i in range(3)]
    mixed = written(tmp_path / "mixed.jsonl", *named)
    sets = load_prompt_sets(
        DataConfig(train_files=(str(train),), val_files=(str(easy), str(mixed))), tokenizer
    )
    found = {
        held_out.name: [item.prompt for item in held_out.items] for held_out in sets.held_out_sets
    }
    assert found == {"easy": ["2", "3"], "level0": ["0", "2"], "level1": ["1"]}
    assert [item.source for item in sets.held_out_items] == [
        "easy",
        "easy",
        "level0",
        "level0",
        "level1",
    ]
    source = DataSourceConfig("s", train_files=(str(train),), val_files=(str(easy), str(mixed)))
    sets = load_prompt_sets(DataConfig(sources=(source,)), tokenizer)
    assert [held_out.name for held_out in sets.held_out_sets] == ["s/easy", "s/level0", "s/level1"]
    assert {item.source for item in (*sets.train_items, *sets.held_out_items)} == {"s"}


# sources


def test_sources(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = written(
        tmp_path / "train.jsonl",
        {"prompt": "7", "answer": 1},
        {"prompt": "00+00=", "answer": 1},
        b"{",
    )
    val = written(
        tmp_path / "val.jsonl", {"prompt": "12345", "answer": 1}, {"prompt": "9", "answer": 1}
    )
    config = DataConfig(
        sources=(
            DataSourceConfig(
                "add", weight=3, task="addition", task_params={"num_digits": 1, "num_val": 10}
            ),
            DataSourceConfig(
                "own", train_files=(str(train),), val_files=(str(val),), prompt_template="{prompt}?"
            ),
            DataSourceConfig(
                "bare",
                task="addition",
                task_params={"num_digits": 2, "num_val": 1},
                prompt_template="{prompt}",
            ),
        ),
        prompt_template="{prompt} ",
        skip_bad_rows=True,
        filter_overlong_prompts=True,
        max_prompt_length=6,
    )
    sets = load_prompt_sets(config, tokenizer)
    assert [(source.name, source.weight, len(source.items)) for source in sets.sources] == [
        ("add", 3, 90),
        ("own", 1.0, 1),  # "00+00=?" has 7 tokens
        ("bare", 1.0, 9999),
    ]
    assert [(held_out.name, len(held_out.items)) for held_out in sets.held_out_sets] == [
        ("add", 10),
        ("own", 2),
        ("bare", 1),
    ]
    assert (
        sets.sources[0].items[0].prompt.endswith("= ") and sets.sources[1].items[0].prompt == "7?"
    )
    assert len(sets.sources[2].items[0].prompt) == 6
    assert {item.source for item in sets.sources[0].items} == {"add"}
    assert (
        sets.num_bad_rows,
        sets.num_overlong,
        len(sets.train_items),
        len(sets.held_out_items),
    ) == (1, 1, 10090, 13)


def test_few_shot_of_a_source(tokenizer: Tokenizer) -> None:
    digits = {"num_digits": 1, "num_val": 10}
    config = DataConfig(
        sources=(
            DataSourceConfig("with", task="addition", task_params=digits),
            DataSourceConfig(
                "without", task="addition", task_params=digits, few_shot=FewShotConfig(0)
            ),
        ),
        few_shot=FewShotConfig(2, "{prompt}{label} "),
    )
    sets = load_prompt_sets(config, tokenizer)
    assert [len(source.items) for source in sets.sources] == [88, 90]
    assert (
        sets.sources[0].items[0].prompt.count("=") == 3
        and sets.sources[1].items[0].prompt.count("=") == 1
    )


def test_what_is_wrong_with_a_source_names_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    good = DataSourceConfig("good", task="addition")
    for bad, problem in (
        (
            DataSourceConfig("bad", task="adition"),
            r"data.sources\[1\] \(bad\): unknown task 'adition'. Did you mean",
        ),
        (
            DataSourceConfig("bad"),
            r"data.sources\[1\] \(bad\): .*data.sources\[1\].train_files names no file",
        ),
        (
            DataSourceConfig("bad", task="addition", task_params={"num_val": 0}),
            r"data.sources\[1\].task_params.*num_val",
        ),
    ):
        with pytest.raises(ValueError, match=problem):
            load_prompt_sets(DataConfig(sources=(good, bad)), tokenizer)


# tasks


def test_addition(tokenizer: Tokenizer) -> None:
    sets = load_prompt_sets(DataConfig(task="addition"), tokenizer)
    assert (len(sets.train_items), len(sets.held_out_items), sets.num_held_out_in_train) == (
        8000,
        2000,
        0,
    )
    problems = {item.prompt: item.label for item in (*sets.train_items, *sets.held_out_items)}
    assert len(problems) == 10_000
    assert (
        problems["07+45="] == "052" and problems["99+99="] == "198" and problems["00+00="] == "000"
    )
    assert load_prompt_sets(DataConfig(task="addition"), tokenizer) == sets
    other = load_prompt_sets(DataConfig(task="addition", task_params={"split_seed": 1}), tokenizer)
    assert other.held_out_items != sets.held_out_items


def test_the_most_common_answer_of_addition(tokenizer: Tokenizer) -> None:
    """099 is the sum of 100 of 10,000 pairs."""
    sets = load_prompt_sets(DataConfig(task="addition", task_params={"num_val": 1}), tokenizer)
    assert Counter(item.label for item in (*sets.train_items, *sets.held_out_items)).most_common(
        1
    ) == [("099", 100)]


@pytest.mark.parametrize(
    ("operation", "example", "answer"),
    [("add", "9+8=", "17"), ("sub", "11-4=", "7"), ("mul", "6*7=", "42")],
)
def test_few_shot(operation: str, example: str, answer: str) -> None:
    rows = generate_few_shot_addition_rows(FewShotAdditionParams(operation=operation))  # type: ignore[arg-type]
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


def test_few_shot_of_several_operations() -> None:
    rows = generate_few_shot_addition_rows(
        FewShotAdditionParams(operation=("mul", "sub"), num_val=7)
    )
    alone = [
        generate_few_shot_addition_rows(FewShotAdditionParams(operation=operation, num_val=7))
        for operation in ("mul", "sub")
    ]  # type: ignore[arg-type]
    assert (
        rows.train == alone[0].train + alone[1].train
        and rows.held_out == alone[0].held_out + alone[1].held_out
    )
    assert Counter(row.source for row in rows.held_out) == {"few_shot_mul": 7, "few_shot_sub": 7}


def test_an_evaluation_set_an_operation(tokenizer: Tokenizer) -> None:
    config = DataConfig(
        task="few_shot_addition", task_params={"operation": ["add", "mul"], "num_shots": 0}
    )
    sets = load_prompt_sets(config, tokenizer)
    assert [(held_out.name, len(held_out.items)) for held_out in sets.held_out_sets] == [
        ("few_shot_add", 20),
        ("few_shot_mul", 20),
    ]
    assert len(sets.sources) == 1 and len(sets.train_items) == 122


@pytest.mark.parametrize(
    ("task", "params", "problem"),
    [
        ("adition", {}, "Did you mean 'addition'"),
        ("addition", {"num_vals": 3}, "num_val"),
        ("addition", {"num_val": 10_000}, r"num_val \(10000\) must be from 1 to 9999"),
        ("addition", {"num_digits": 4}, r"num_digits \(4\) must be 1, 2 or 3"),
        ("few_shot_addition", {"num_val": 79}, r"num_val \(79\) must be from 1 to 78"),
        (
            "few_shot_addition",
            {"operation": "div"},
            r"operation \('?div'?\) must be one of add, sub, mul",
        ),
        (
            "few_shot_addition",
            {"operation": ["add", "add"]},
            r"operation \(\['add', 'add'\]\) must name one or more",
        ),
        ("few_shot_addition", {"operation": []}, r"operation \(\[\]\) must name one or more"),
    ],
)
def test_wrong_tasks(tokenizer: Tokenizer, task: str, params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_prompt_sets(DataConfig(task=task, task_params=params), tokenizer)


def test_prompt_batch() -> None:
    batch = make_prompt_batch(items(3), first_group_id=10)
    assert batch.group_ids == (10, 11, 12) and batch.sources == ("test",) * 3
