"""Every command line that a document or a header prints is one that works: its words are parsed,
its settings are read, and with a shipped configuration all rules and the placement are checked.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from documented_commands import (
    NOT_RUN,
    DocumentedCommand,
    list_documented_commands,
    list_unknown_lines,
)
from places import ROOT

from rlhf_megatron.cli.commands import COMMANDS
from rlhf_megatron.cli.main import main, parse_arguments
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config, read_run_config

DOCUMENTED = list_documented_commands()
JOBS = ("train", "sft", "reward-model")
# Commands that read the settings of a run, and so say what is wrong with them.
READ_RUNS = (*JOBS, "check", "plan", "simulate", "doctor", "engine", "serve-rewards", "config")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*$")


def name_of(command: DocumentedCommand) -> str:
    return f"{command.place}: {command.text[:100]}"


def list_by_program(*programs: str) -> list[DocumentedCommand]:
    return [command for command in DOCUMENTED if command.split()[1] in programs]


def parse_words(
    words: list[str], is_mention: bool, capsys: pytest.CaptureFixture[str]
) -> dict[str, object] | None:
    """The parsed arguments; None where the text only names a command, or has a placeholder in the
    place of one of several fixed words.
    """
    try:
        return vars(parse_arguments(words))
    except SystemExit as error:
        if error.code == 0:  # --help, --version
            return None
        message = capsys.readouterr().err.splitlines()[-1]
        names = {command.name for command in COMMANDS}
        if is_mention and words[0] in names and "arguments are required" in message:
            return None
        wrong = re.search(r"'([^']*)' is unknown|invalid \w+(?: value)?: '([^']*)'", message)
        if wrong and PLACEHOLDER.match(wrong[1] or wrong[2]):
            return None
        raise AssertionError(message) from error


def check_run_settings(command_name: str, config: Path, overrides: list[str]) -> None:
    """All rules that need no files, for a shipped configuration; else keys and types."""
    shipped = ROOT / config
    if not shipped.is_file():
        read_run_config(ROOT / "configs" / "quickstart.yaml", overrides)
    elif command_name in READ_RUNS:
        load_run_config(shipped, overrides, with_files=False)


def check_line(
    words: list[str], is_mention: bool, capsys: pytest.CaptureFixture[str]
) -> dict[str, object] | None:
    arguments = parse_words(words, is_mention, capsys)
    if arguments is None:
        return None
    settings = arguments.get("overrides", arguments.get("words", []))
    overrides = [word for word in settings if "=" in word]  # type: ignore[union-attr]
    config = arguments.get("config", arguments.get("source"))
    try:
        check_run_settings(words[0], Path(str(config)), overrides)
    except ConfigError as error:
        raise AssertionError("\n".join(error.problems)) from error
    return arguments


@pytest.mark.parametrize("command", list_by_program("rlhf-megatron"), ids=name_of)
def test_command_lines_are_accepted(
    command: DocumentedCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()[2]
    if words and not PLACEHOLDER.match(words[0]):
        check_line(words, command.is_mention, capsys)


LAUNCHES = list_by_program("torchrun.sh", "sbatch")


@pytest.mark.parametrize("command", LAUNCHES, ids=name_of)
def test_launch_lines_start_a_run_that_has_a_place(
    command: DocumentedCommand,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables, program, words = command.split()
    num_nodes = int(variables.get("NNODES", "1"))
    if program == "sbatch":
        scripts = [word for word in words if word.endswith(".sbatch")]
        if not scripts and command.is_mention:  # an option of sbatch alone
            return
        assert (ROOT / scripts[0]).is_file(), f"{scripts[0]} is not there"
        place = words.index(scripts[0])
        nodes = re.search(r"--nodes[= ](\d+)", " ".join(words[:place]))
        num_nodes = int(nodes[1]) if nodes else 1
        words = words[place + 1 :]
    arguments = check_line([variables.get("JOB", "train"), *words], command.is_mention, capsys)
    if arguments is None or variables.get("JOB", "train") not in JOBS:
        return
    config = ROOT / str(arguments["config"])
    if not config.is_file():
        return
    overrides = list(arguments["overrides"])  # type: ignore[call-overload]
    monkeypatch.chdir(ROOT)
    assert main(["plan", "placement", str(config), *overrides]) == 0, capsys.readouterr()
    machines = re.findall(r"^machine +(\d+)", capsys.readouterr().out, re.MULTILINE)
    assert num_nodes == len(machines), f"the line starts {num_nodes} nodes of {len(machines)}"


@pytest.mark.parametrize("command", list_by_program("python"), ids=name_of)
def test_python_lines_name_what_is_there(command: DocumentedCommand) -> None:
    words = command.split()[2]
    if words[:1] == ["-m"]:
        assert words[1] in ("pip", "venv") or importlib.util.find_spec(words[1]), words[1]
    elif words and words[0].endswith(".py") and "/" in words[0]:
        assert (ROOT / words[0]).is_file(), f"{words[0]} is not there"


def test_every_line_of_a_shell_block_is_run_or_has_a_reason() -> None:
    assert not list_unknown_lines()
    programs = {command.split()[1] for command in DOCUMENTED}
    tested = {"rlhf-megatron", "sbatch", "torchrun.sh", "python"}
    other_scripts = {"ray_cluster.sh", "slurm.sbatch", "slurm_ray.sbatch"}
    assert programs <= {*tested, *other_scripts, *NOT_RUN}
    assert set(NOT_RUN) & tested == set()


def test_documents_print_commands() -> None:
    """A change of the marks that the search relies on would leave nothing to test."""
    assert len(list_by_program("rlhf-megatron")) > 150
    assert len(LAUNCHES) > 15
