"""Which environment `make parity MCORE=...` runs in, and which versions it takes. Nothing
is made or run.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from places import ROOT

from rlhf_megatron.mcore_patch import check_megatron_version

VARIABLES = ("ARGS", "MCORE", "PYTHON", "VENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
PROGRAM = "-m benchmarks.parity"


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the variables of a make that these tests run under."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = ["make", "-n", "parity", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def last_line(*arguments: str) -> str:
    done = dry_run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].strip()


def test_the_pinned_version_runs_in_the_usual_environment() -> None:
    assert last_line() == last_line("MCORE=0.16.1") == f".venv/bin/python {PROGRAM}"
    assert last_line("ARGS=--layouts tp2") == f".venv/bin/python {PROGRAM}  --layouts tp2"


def test_another_version_has_an_environment_and_a_result_of_its_own() -> None:
    line = last_line("MCORE=0.19.2", "ARGS=--families llama_tied")
    assert line.startswith(f".venv-mcore-0.19.2/bin/python {PROGRAM} --max-ranks 2")
    assert "benchmarks/results/parity_mcore_0.19.2.json" in line and line.endswith(
        "--families llama_tied"
    )


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0", "0.20.0", "1.0.0", "newest"])
def test_other_versions_are_refused_as_a_rank_refuses_them(version: str) -> None:
    with pytest.raises(RuntimeError):
        check_megatron_version(version)
    done = dry_run(f"MCORE={version}")
    assert done.returncode != 0
    assert f"MCORE is {version}, supported are 0.16.1 to 0.19.x; use MCORE=0.19.2" in done.stderr
