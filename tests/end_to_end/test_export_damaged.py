"""`rlhf-megatron export` of a run directory that was damaged: one line names the file, no
traceback reaches the user, and no half-written model is left.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import ForkServer
from test_sft_run import write_config

from rlhf_megatron.cli.main import main

pytestmark = pytest.mark.dist


def find_largest_file(directory: Path) -> Path:
    return max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


def truncate_file(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def flip_byte(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    return path


def remove_file(path: Path) -> Path:
    path.unlink()
    return path


def overwrite_with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "truncated weights": lambda step: truncate_file(find_largest_file(step)),
    "a flipped byte in the weights": lambda step: flip_byte(find_largest_file(step)),
    "removed weights": lambda step: remove_file(find_largest_file(step)),
    "truncated manifest": lambda step: truncate_file(step / "manifest.json"),
    "empty manifest": lambda step: overwrite_with(step / "manifest.json", ""),
    "a manifest of another form": lambda step: overwrite_with(step / "manifest.json", "[1, 2]"),
    "removed manifest": lambda step: remove_file(step / "manifest.json"),
    "deeply nested manifest": lambda step: overwrite_with(step / "manifest.json", "[" * 100_000),
}


@pytest.fixture(scope="module")
def trained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_config(tmp_path_factory.mktemp("trained") / "run")
    attempt = server.train(
        config, {"trainer.total_training_steps": 1, "trainer.test_freq": 1}, command="sft"
    )
    assert attempt.code == 0, attempt.console
    return attempt.run_dir


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named(
    trained: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    [step] = (run_dir / "checkpoints").glob("step_*")
    path = DAMAGES[damage](step)
    assert main(["export", str(run_dir), "--out", str(tmp_path / "out")]) != 0
    error = capsys.readouterr().err
    assert path.name in error or step.name in error, error
    assert "Traceback" not in error and not (tmp_path / "out").exists()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run"]


def test_a_folder_with_files_is_refused_before_the_checkpoint_is_read(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading it takes minutes for a large model; here it would fail."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    [step] = (run_dir / "checkpoints").glob("step_*")
    truncate_file(find_largest_file(step))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for words in ([], ["--adapter"], ["--critic"]):
        assert main(["export", str(run_dir), "--out", str(tmp_path / "out"), *words]) == 1
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'out'} exists already")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
