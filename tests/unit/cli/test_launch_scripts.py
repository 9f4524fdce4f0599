"""`rlhf-megatron launch-scripts`: the scripts of launch/, in a folder of the user's."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.main import main

LAUNCH = ROOT / "launch"


def test_they_are_those_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch-scripts", "launch"]) == 0
    names = sorted(path.name for path in LAUNCH.iterdir())
    assert sorted(path.name for path in Path("launch").iterdir()) == names
    for name in names:
        written = Path("launch", name)
        assert written.read_bytes() == (LAUNCH / name).read_bytes()
        is_script = name.endswith((".sh", ".sbatch"))
        assert stat.S_IMODE(written.stat().st_mode) == (0o755 if is_script else 0o644)
    assert capsys.readouterr().out.splitlines() == [
        f"launch: {', '.join(names)}",
        "next: launch/torchrun.sh RUN.yaml, or sbatch --nodes=N launch/slurm.sbatch RUN.yaml",
    ]
    explained = subprocess.run(["launch/torchrun.sh"], capture_output=True, text=True)
    assert explained.returncode == 2 and "Train under torchrun" in explained.stderr


def test_another_folder_must_be_named_to_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """slurm.sbatch looks for torchrun.sh in launch/ of the folder of submission."""
    folder = tmp_path / "scripts"
    assert main(["launch-scripts", str(folder)]) == 0
    assert f"or LAUNCH={folder}/torchrun.sh sbatch --nodes=N " in capsys.readouterr().out


def test_files_that_are_there_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm.sbatch").write_text("mine")
    assert main(["launch-scripts", str(tmp_path)]) == 1
    assert f"{tmp_path}/slurm.sbatch is there already" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["slurm.sbatch"]
    assert (tmp_path / "slurm.sbatch").read_text() == "mine"
