"""Words that are no command: the error names the command that was meant."""

from __future__ import annotations

import pytest

from rlhf_megatron.cli.command_parser import COMMAND_BY_OTHER_NAME, suggest_word
from rlhf_megatron.cli.commands import COMMANDS
from rlhf_megatron.cli.main import main

COMMAND_NAMES = [command.name for command in COMMANDS]


def read_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian", "run.yaml"], "train"),
        (["Train", "run.yaml"], "train"),
        (["run", "run.yaml"], "train"),
        (["grpo"], "train"),
        (["expot", "runs/a"], "export"),
        (["serve_rewards"], "serve-rewards"),
        (["loadtest", "http://127.0.0.1:1"], "load-test"),
        (["eval", "runs/a"], "evaluate"),
        (["plan", "memry"], "memory"),
        (["config", "chek"], "check"),
        (["config", "verl"], "from-verl"),
        (["plan", "layout", "--gpu", "h100"], "h100-80g"),
    ],
)
def test_the_nearest_word_is_named(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_error(words, capsys).endswith(f"is unknown; did you mean {meant}? -h lists all")


def test_without_a_near_word_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    error = read_error(["xyzzy"], capsys)
    assert "did you mean" not in error and all(name in error for name in COMMAND_NAMES)


def test_other_names_lead_to_commands() -> None:
    assert set(COMMAND_BY_OTHER_NAME.values()) <= set(COMMAND_NAMES)
    assert not set(COMMAND_BY_OTHER_NAME) & set(COMMAND_NAMES), "a command needs no other name"
    assert suggest_word("train", COMMAND_NAMES) == "train"


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["train"], "RUN.yaml"),
        (["config", "check"], "RUN.yaml"),
        (["config", "from-verl"], "FILE"),
        (["generate"], "SOURCE"),
        (["evaluate"], "SOURCE"),
    ],
)
def test_settings_behind_a_file_are_not_required(
    words: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = read_error(words, capsys)
    assert error.endswith(f"the following arguments are required: {missing}")
