"""The environments that rows name are checked before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from game_of_chance import GAME_OF_CHANCE, register_game_of_chance
from places import MODEL

from rlhf_megatron.agents.row_environments import list_row_environments, read_row_environment
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import DataConfig, ModelConfig
from rlhf_megatron.controller.scheduler.algorithm_setup import load_run_prompts
from rlhf_megatron.data.prompt_items import PromptItem


@pytest.fixture(autouse=True)
def game_of_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    register_game_of_chance(monkeypatch)


def make_items(*columns: Any) -> list[PromptItem]:
    texts = [json.dumps({"environment": value}) if value is not None else "" for value in columns]
    return [PromptItem((1,), f"row {i}", "4", "games", text) for i, text in enumerate(texts)]


def test_each_environment_of_a_mixture_is_listed_once() -> None:
    game = {"name": "guess_number", "params": {"highest": 5}}
    found = list_row_environments(make_items(game, None, {"name": GAME_OF_CHANCE}, game), False)
    assert [(one.name, dict(one.params)) for one in found] == [
        ("guess_number", {"highest": 5}),
        (GAME_OF_CHANCE, {}),
    ]
    assert read_row_environment("") is None and read_row_environment('{"environments": 1}') is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "guess_number",
            r"row 'row 0' \(\"guess_number\"\) must be an object with name and params",
        ),
        ({"name": "guess_number", "parms": {}}, "must be an object with name and params"),
        ({"name": "guess_numbr"}, "row 'row 0': .*guess_number"),
        ({"name": "guess_number", "params": {"highst": 5}}, "row 'row 0'.*highst.*highest"),
        ({"name": "guess_number", "params": {"highest": 0}}, "highest .0. must be between 1"),
        ({"name": GAME_OF_CHANCE, "params": {"highest": 5}}, "has no params; remove them"),
    ],
)
def test_what_is_wrong_with_the_column_of_a_row(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list_row_environments(make_items(value), False)


def test_a_deterministic_run_takes_no_row_of_chance() -> None:
    rows = make_items({"name": "guess_number"}, {"name": GAME_OF_CHANCE})
    with pytest.raises(
        ConfigError, match=f"trainer.deterministic .true. cannot hold .* {GAME_OF_CHANCE}"
    ):
        list_row_environments(rows, True)


def test_the_column_travels_whatever_columns_rewards_read(tmp_path: Path) -> None:
    """`data.extra_columns` names another column; a run with episodes keeps this one too."""
    rows = tmp_path / "rows.jsonl"
    column = {"name": "guess_number", "params": {"highest": 5}}
    row = {"prompt": "1+1=", "answer": "2", "level": 3, "environment": column}
    rows.write_text(json.dumps(row) + "\n")
    data = DataConfig(train_files=(str(rows),), extra_columns=("level",), max_prompt_length=8)
    model = ModelConfig(path=str(MODEL))
    with_episodes = load_run_prompts(model, data, keeps_messages=True)[0].train_items[0]
    assert read_row_environment(with_episodes.extra) == column
    assert json.loads(with_episodes.chat) == [{"role": "user", "content": "1+1="}]
    without = load_run_prompts(model, data)[0].train_items[0]
    assert read_row_environment(without.extra) != column and without.chat == ""


def test_rows_cannot_name_code_that_runs(tmp_path: Path) -> None:
    """Data of strangers would run whatever it names."""
    made = tmp_path / "made"
    (tmp_path / "code.py").write_text(f"open({str(made)!r}, 'w')\ndef f(x: int): return x\n")
    value = {"name": "tools", "params": {"functions": [f"{tmp_path}/code.py:f"]}}
    with pytest.raises(ConfigError, match="tools may not be named by rows of data"):
        list_row_environments(make_items(value), False)
    assert not made.exists()


def test_a_row_cannot_make_the_check_compute_for_ever() -> None:
    value = {"name": "guess_number", "params": {"num_digits": 10**9}}
    with pytest.raises(ConfigError, match=r"num_digits .* must be between 1 and 18"):
        list_row_environments(make_items(value), False)
