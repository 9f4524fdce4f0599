"""Rows that are nested too deep, and halves of surrogate pairs: errors that name file and row, in
every job that reads rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_megatron.cli.main import main
from rlhf_megatron.data.data_rows import read_prompt_rows
from rlhf_megatron.data.tokenizer import write_character_tokenizer

JOBS = {
    "rl": "",
    "prompts": "job: sft\n",
    "conversations": "job: sft\nsft: {messages_key: messages, tools_key: tools}\n",
    "streamed": "job: sft\nsft: {messages_key: messages, tools_key: tools, in_memory: false}\n",
    "pairs": "job: sft\nsft: {loss_mode: dpo}\n",
    "reward model": "job: reward-model\nsft: {loss_mode: bradley_terry}\n",
}
QUESTION = '{"role": "user", "content": "1"}'
ANSWER = '{"role": "assistant", "content": %s}'
# Of each kind of row a good row, where % stands for "7".
PROMPT_ROWS = (
    '{"prompt": "1+1=", "answer": %}',
    '{"prompt": %, "answer": "2"}',
    '{"prompt": [{"role": "user", "content": %}], "answer": "2"}',
)
CONVERSATION_ROWS = (
    f'{{"messages": [{QUESTION}, {ANSWER % "%"}]}}',
    f'{{"messages": [{QUESTION}, {ANSWER % "%"}], "tools": []}}',
)
PAIR_ROWS = (
    '{"prompt": "1", "chosen": %, "rejected": "2"}',
    f'{{"chosen": [{QUESTION}, {ANSWER % "%"}], "rejected": [{QUESTION}, {ANSWER % "3"}]}}'.replace(
        '"content": 3', '"content": "3"'
    ),
)
ROWS = {
    "rl": PROMPT_ROWS,
    "prompts": PROMPT_ROWS,
    "conversations": CONVERSATION_ROWS,
    "streamed": CONVERSATION_ROWS,
    "pairs": PAIR_ROWS,
    "reward model": PAIR_ROWS,
}
TOO_DEEP = "[" * 50_000 + "]" * 50_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration and tokenizer of a tiny model that reads all of ASCII."""
    directory = tmp_path_factory.mktemp("model")
    write_character_tokenizer(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for character in ("<unk>", *map(chr, range(32, 127))):
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer["model"]["unk_token"] = "<unk>"
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}"
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    sizes |= {"vocab_size": 128, "max_position_embeddings": 65_536}
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    return directory


def show_rows(tmp_path: Path, model: Path, job: str, *rows: str) -> int:
    """The exit code of `data show` with the rows as training and held-out rows."""
    (tmp_path / "rows.jsonl").write_text("".join(row + "\n" for row in rows))
    files = f"train_files: [{tmp_path}/rows.jsonl], val_files: [{tmp_path}/rows.jsonl]"
    is_rl = not JOBS[job]
    (tmp_path / "run.yaml").write_text(
        JOBS[job]
        + f"model: {{path: {model}, init_seed: 1}}\n"
        + f"data: {{{files}, train_batch_size: 1, apply_chat_template: true}}\n"
        + ("rollout: {engine: local, n: 2}\nactor: {mini_batch_size: 2}\n" if is_rl else "")
        + "trainer: {n_gpus_per_node: 1, runtime: inline, total_training_steps: 1}\n"
    )
    return main(["data", "show", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("job", JOBS)
def test_a_row_that_is_nested_too_deep_is_named(
    tmp_path: Path, model: Path, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = ROWS[job][0].replace("%", '"7"')
    assert show_rows(tmp_path, model, job, good) == 0
    for row in ROWS[job]:
        assert show_rows(tmp_path, model, job, good, row.replace("%", TOO_DEEP)) == 1
        text = capsys.readouterr().err
        assert f"{tmp_path}/rows.jsonl:2: " in text and "1 of 2 rows" in text


@pytest.mark.parametrize("job", JOBS)
def test_half_of_a_surrogate_pair_is_named_with_its_row(
    tmp_path: Path, model: Path, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = ROWS[job][0].replace("%", '"7"')
    for row in ROWS[job]:
        for text in ('"\\ud800"', '"1\\ude00 2"'):
            assert show_rows(tmp_path, model, job, good, row.replace("%", text)) == 1
            said = capsys.readouterr().err
            assert f"{tmp_path}/rows.jsonl:2: " in said and "half of a surrogate pair" in said


@pytest.mark.parametrize(
    "row",
    [
        f'{{"messages": [{QUESTION}, {ANSWER % 2}], "tools": %}}'.replace("2}]", '"2"}]'),
        f'{{"messages": %, "x": {QUESTION}}}',
        f'{{"messages": [{QUESTION}, {{"role": "assistant", "content": "2", "tool_calls":'
        ' [{"function": {"name": "f", "arguments": %}}]}]}',
    ],
)
def test_text_that_holds_deep_json(
    tmp_path: Path, model: Path, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = CONVERSATION_ROWS[0].replace("%", '"7"')
    code = show_rows(tmp_path, model, "conversations", good, row.replace("%", json.dumps(TOO_DEEP)))
    text = capsys.readouterr().err
    assert code == 1 and f"{tmp_path}/rows.jsonl:2: " in text


def test_a_row_that_the_parser_can_read_and_nothing_else_is_named(tmp_path: Path) -> None:
    """Deep enough to be read, and too deep for what comes after it, at some depth or other."""
    path = tmp_path / "rows.jsonl"
    for depth in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit(), 5):
        deep = "[" * depth + "]" * depth
        path.write_text(f'{{"prompt": "1", "answer": "2"}}\n{{"prompt": "1", "answer": {deep}}}\n')
        try:
            rows, _ = read_prompt_rows([path], "prompt", "answer", False)
        except ValueError as error:
            assert f"{path}:2: " in str(error)
        else:
            assert rows[1].label == deep
