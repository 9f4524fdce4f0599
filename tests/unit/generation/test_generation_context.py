"""`generate` and `evaluate` on a model with a short context: the default length of responses gives
way, and a length that somebody has set is refused before an engine starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from table_samples import SMALL_LLAMA, random_state

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.schema import RolloutConfig, SGLangConfig
from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.jobs.generation.answer_file import read_answer_rows
from rlhf_megatron.jobs.generation.context_limit import (
    ContextLimit,
    find_context_limit,
    fit_response_length,
)

CONFIG = {**SMALL_LLAMA, "head_dim": 4, "vocab_size": 24, "max_position_embeddings": 16}
ONE_ENGINE = ("rollout.num_engines=1", "rollout.engine=local")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for 16 tokens, a token a character."""
    path = tmp_path_factory.mktemp("short") / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_state(CONFIG), path / "model.safetensors")
    write_character_tokenizer(path, 24)
    return path


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts of 4 and 10 tokens."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    prompts = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1111+2222=", "answer": "3333"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return path


@pytest.mark.parametrize(
    ("rollout", "hf_config", "expected"),
    [
        ({}, {"max_position_embeddings": 16}, ContextLimit(16, "max_position_embeddings")),
        (
            {"max_num_batched_tokens": 8},
            {"max_position_embeddings": 16},
            ContextLimit(8, "rollout.max_num_batched_tokens"),
        ),
        (
            {"engine": "sglang", "sglang": SGLangConfig(args={"context-length": 12})},
            {"max_position_embeddings": 16},
            ContextLimit(12, "rollout.sglang.args.context-length"),
        ),
        ({"engine": "sglang"}, {}, None),
    ],
)
def test_the_smallest_limit_counts(
    rollout: dict[str, Any], hf_config: dict[str, Any], expected: ContextLimit | None
) -> None:
    config = RolloutConfig(**({"engine": "local"} | rollout))
    assert find_context_limit(hf_config, config) == expected


@pytest.mark.parametrize(
    ("length", "is_default", "expected"), [(6, False, 6), (6, True, 6), (7, True, 6), (4, True, 4)]
)
def test_a_length_that_fits_stays(length: int, is_default: bool, expected: int) -> None:
    limit = ContextLimit(16, "max_position_embeddings")
    assert fit_response_length(limit, [4, 10], length, is_default) == expected
    assert fit_response_length(None, [4, 10], length, is_default) == length


def test_the_default_gives_way_to_the_context(
    model: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, as `mktemp` makes it, may be written to."""
    answers = Path("answers.jsonl")
    answers.touch()
    words = [str(model), str(rows), "--temperature", "0", "--out", str(answers), *ONE_ENGINE]
    assert main(["generate", *words]) == 0
    note = "responses have at most 6 tokens, which max_position_embeddings (16) leaves behind the"
    assert note in capsys.readouterr().err
    counts = [row["num_tokens"][0] for row in read_answer_rows(answers)]
    assert len(counts) == 2 and all(1 <= count <= 6 for count in counts)


@pytest.mark.parametrize("setting", [["--max-tokens", "7"], ["data.max_response_length=7"]])
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_length_that_was_set_is_refused_with_the_option(
    model: Path,
    rows: Path,
    setting: list[str],
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, str(model), str(rows), *setting, *ONE_ENGINE]) == 1
    assert (
        "--max-tokens (data.max_response_length) is 7, but max_position_embeddings (16) leaves 6"
        " tokens behind the longest prompt, which has 10; set it to 6 or less."
    ) in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl"], "nothing has started"


def test_a_prompt_without_room_for_a_response_is_named(
    model: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "1" * 16, "answer": "2"}) + "\n")
    assert main(["generate", str(model), str(rows), *ONE_ENGINE]) == 1
    error = capsys.readouterr().err
    assert "prompt 2 has 16 tokens, and max_position_embeddings (16) leaves no room" in error


def test_a_document_that_is_too_long_is_named(
    model: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_text(json.dumps({"prompt": "1" * 12, "answer": "2" * 8}) + "\n")
    assert main(["evaluate", str(model), "--loss", str(rows), *ONE_ENGINE]) == 1
    error = capsys.readouterr().err
    assert "document 0 has 21 tokens, more than max_position_embeddings (16)" in error


def test_a_file_with_words_of_others_is_not_overwritten(
    model: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("answers.jsonl").write_text("mine\n")
    words = [str(model), str(rows), "--max-tokens", "2", "--out", "answers.jsonl", *ONE_ENGINE]
    assert main(["generate", *words]) == 1
    assert "answers.jsonl exists and is not of this command" in capsys.readouterr().err
    assert Path("answers.jsonl").read_text() == "mine\n"
