"""`make clean` removes what can be made again, and never a run."""

import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("runs/x/checkpoints", ".cache/smollm2", ".venv/bin", "build", "a/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def make(checkout: Path, *words: str) -> str:
    return subprocess.run(
        ["make", "-s", *words], cwd=checkout, check=True, capture_output=True, text=True
    ).stdout


def test_clean_leaves_runs_and_fetched_models(checkout: Path) -> None:
    make(checkout, "clean")
    left = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_dir()}
    assert left == {"runs", "runs/x", "runs/x/checkpoints", ".cache", ".cache/smollm2", "a"}


def test_clean_runs_says_what_it_would_remove_and_wants_a_yes(checkout: Path) -> None:
    said = make(checkout, "clean-runs")
    assert "runs/x" in said and ".cache/smollm2" in said and "YES=1 removes all of this" in said
    assert (checkout / "runs" / "x").is_dir()
    make(checkout, "clean-runs", "YES=1")
    assert (
        not (checkout / "runs").exists()
        and not (checkout / ".cache").exists()
        and (checkout / ".venv").exists()
    )
