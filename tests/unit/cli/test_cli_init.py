"""`rlhf-megatron init`: what it writes is a run that can start, from any folder, also out of an
installed package.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.load import load_run_config


@pytest.mark.parametrize("kind", ["quickstart", "grpo", "ppo", "async", "sft"])
def test_a_starter_for_a_cpu_passes_every_check(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", kind, str(tmp_path / "new" / "run"), "--gpus", "0"]) == 0
    monkeypatch.chdir(tmp_path)
    config = load_run_config("new/run/run.yaml").config
    assert config.model.path == str(tmp_path / "new" / "run" / "model"), (
        "beside the file, wherever one stands"
    )
    assert main(["config", "check", "new/run/run.yaml"]) == 0


def test_options_may_stand_between_the_words(tmp_path: Path) -> None:
    assert main(["init", "ppo", "--gpus", "8", str(tmp_path)]) == 0
    assert "adv_estimator: gae" in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize("words", [("grpo",), ("gpro", "my_run"), ("grpo", "my_run", "more")])
def test_a_folder_and_one_kind_are_named(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) == 1
    expected = (
        f"`init {' '.join(words)}` must name a folder, and before it one of quickstart,"
        " grpo, ppo, async, sft"
    )
    assert expected in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "gpus", "ranks"), [("grpo", 1, 1), ("ppo", 8, 8), ("async", 2, 1), ("async", 8, 6)]
)
def test_a_starter_for_gpus(kind: str, gpus: int, ranks: int, tmp_path: Path) -> None:
    """An asynchronous run leaves a quarter of the GPUs to its engines."""
    assert main(["init", kind, str(tmp_path), "--gpus", str(gpus)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    config = load_run_config(tmp_path / "run.yaml", with_files=False).config
    assert (config.rollout.engine, config.trainer.n_gpus_per_node) == ("sglang", ranks)
    assert config.rollout.num_engines == gpus - (ranks if kind == "async" else 0)


@pytest.mark.parametrize(("gpus", "tp"), [(1, 1), (8, 2)])
def test_a_supervised_starter_for_gpus(gpus: int, tp: int, tmp_path: Path) -> None:
    assert main(["init", "sft", str(tmp_path), "--gpus", str(gpus)]) == 0
    config = load_run_config(tmp_path / "run.yaml", with_files=False).config
    assert (config.job, config.trainer.n_gpus_per_node) == ("sft", gpus)
    assert config.actor.megatron.tensor_model_parallel_size == tp


def test_the_next_command_is_that_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "sft", str(tmp_path), "--gpus", "0"]) == 0
    assert f"next: rlhf-megatron sft {tmp_path / 'run.yaml'}" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert (
        "run.yaml is there already and is not overwritten; name another folder."
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"] and (
        tmp_path / "run.yaml"
    ).read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("quickstart", "--gpus", "8"), "the quickstart needs no GPU"),
        (("async", "--gpus", "1"), "use --gpus 2 or more"),
    ],
)
def test_what_cannot_be(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", words[0], "never", *words[1:]]) == 1
    assert expected in capsys.readouterr().err


def test_what_is_installed_brings_its_examples(tmp_path: Path) -> None:
    """The files of a wheel, in an empty folder: nothing of the working tree is read."""
    site = tmp_path / "site"
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "-e",
        str(tmp_path),
        "build",
        "-b",
        str(tmp_path / "build"),
    ]
    subprocess.run([*command, "--build-lib", str(site)], cwd=ROOT, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    warm = site / "rlhf_megatron/shipped/configs/quickstart_warm.yaml"
    calls = [["init", "."], ["config", "check", "run.yaml"], ["config", "check", str(warm)]]
    program = (
        "from rlhf_megatron.cli.main import main\n"
        f"raise SystemExit(any([main(words) for words in {calls}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=empty, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(ROOT) not in (empty / "run.yaml").read_text()
