"""The command line: exit codes, streams, overrides among options, and the generated reference."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.commands import COMMANDS, CliCommand
from rlhf_megatron.cli.main import main, parse_arguments
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.key_paths import list_setting_leaves
from rlhf_megatron.config.reference import render_settings_reference
from rlhf_megatron.config.schema import RunConfig

RUN = """
model: {path: gone}
data: {task: addition}
rollout: {engine: local}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_reference_is_printed_whole_or_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    whole = capsys.readouterr().out
    names = [leaf.key.rpartition(".")[2] for leaf in list_setting_leaves(RunConfig)]
    assert (
        whole == render_settings_reference()
        and [name for name in names if f"| `{name}` |" not in whole] == []
    )
    assert main(["config", "reference", "data.few_shot"]) == 0
    part = capsys.readouterr().out
    assert (
        part.startswith("## data.few_shot\n")
        and part in whole + "\n"
        and "num_shots" in part
        and len(part) < 700
    )
    assert main(["config", "reference", "zzz"]) == 1


def test_check(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(run_file), "--no-files"]) == 0
    assert (
        capsys.readouterr().out
        == f"{run_file}: ok (1 x 8 ranks, tp1 pp1, 256 x 8 samples a step)\n"
    )
    assert main(["config", "check", str(run_file), "actor.ppo_epoch=2", "trainer.seed=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"configuration {run_file}: 3 problem(s)",
        "  unknown key actor.ppo_epoch (2). Did you mean actor.ppo_epochs? [command line]",
        "  trainer.seed (x) must be a whole number; write digits only, such as 8. [command line]",
        (
            f"  model.path ({run_file.parent / 'gone'}) is not a directory; correct it, or make or"
            f" fetch the model first. [{run_file}:2]"
        ),
    ]


def test_show_prints_the_values_even_when_a_rule_is_broken(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", str(run_file), "rollout.top_p=0.5"]) == 2
    captured = capsys.readouterr()
    assert "rollout.top_p " in captured.out and "\x1b" not in captured.out
    assert "rollout.top_p (0.5) must be 1.0" in captured.err


def test_other_ranks_of_a_node_do_not_repeat_the_message(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave it to the node's first rank, and wait until that ends them: torchrun kills all
    when one has left.
    """
    waits: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", waits.append)
    assert main(["config", "check", str(run_file)]) == 2
    assert capsys.readouterr().err == "" and waits == [60.0]


def test_traceback_on_request(run_file: Path) -> None:
    for arguments in (
        ["--traceback", "config", "check", str(run_file)],
        ["config", "check", str(run_file), "--traceback"],
    ):
        with pytest.raises(ConfigError):
            main(arguments)


def test_overrides_stand_anywhere_among_the_options() -> None:
    args = parse_arguments(
        ["train", "run.yaml", "a=1", "--record", "b.c=[1, 2]", "--replay", "3", "d=x=y"]
    )
    assert args.config == Path("run.yaml") and args.overrides == ["a=1", "b.c=[1, 2]", "d=x=y"]
    assert args.record and args.replay == 3 and args.run == ".train_command:run_train_job_command"
    for wrong in (
        ["train", "run.yaml", "--recrod"],
        ["train", "run.yaml", "--record", "x"],
        ["train"],
        [],
    ):
        with pytest.raises(SystemExit) as stopped:
            parse_arguments(wrong)
        assert stopped.value.code == 2


def test_an_error_is_one_line_and_a_bug_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_part.py").write_text(
        "def value(args): raise ValueError('port 80 (in use) must be free; choose another.')\n"
        "def system(args): raise FileNotFoundError(2, 'No such file', 'x.jsonl')\n"
        "def bug(args): raise KeyError('x')\n"
        "def code(args): return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parts = tuple(
        CliCommand(name, "", lambda p: None, f"failing_part:{name}")
        for name in ("value", "system", "bug", "code")
    )
    monkeypatch.setattr("rlhf_megatron.cli.main.COMMANDS", (*COMMANDS, *parts))
    assert main(["value"]) == 1
    assert capsys.readouterr().err == "error: port 80 (in use) must be free; choose another.\n"
    assert main(["system"]) == 1
    assert capsys.readouterr().err == "error: [Errno 2] No such file: 'x.jsonl'\n"
    assert main(["code"]) == 3
    with pytest.raises(KeyError):
        main(["bug"])
    with pytest.raises(ValueError, match="port 80"):
        main(["value", "--traceback"])


def test_the_program_imports_nothing_heavy_and_survives_a_closed_pipe(run_file: Path) -> None:
    command = [sys.executable, "-m", "rlhf_megatron", "config", "show", str(run_file)]
    code = """if True:
        import sys
        from rlhf_megatron.cli.main import build_parser
        build_parser().format_help()
        assert not {"torch", "numpy", "aiohttp", "yaml"} & sys.modules.keys()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    piped = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert piped.stdout is not None and piped.stderr is not None
    piped.stdout.close()
    assert "Traceback" not in piped.stderr.read()
    piped.wait(30)
    piped.stderr.close()
