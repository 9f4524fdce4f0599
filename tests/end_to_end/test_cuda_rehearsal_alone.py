"""One process for a rank of any world: its stages pass, and mistakes fail them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cuda_tools import NEEDS_CUDA_BUILD, PYTHON
from places import ROOT, SUPPORT

from benchmarks.parity.layouts import LAYOUTS
from tools.cuda_rehearsal.alone.layouts import FAMILIES, NEEDS_PACKAGE, cells
from tools.cuda_rehearsal.environment import environment


def test_each_layout_and_each_family_is_passed_through() -> None:
    found = cells()
    assert {name for name, _, _ in found} == {
        name for name, axes in LAYOUTS.items() if axes.impl != NEEDS_PACKAGE
    }
    assert {family for _, family, _ in found} == FAMILIES.keys()
    assert {rank for name, _, rank in found if name == "pp4"} == {0, 3}


def planted(*words: str) -> Any:
    """What cuda_planted.py found."""
    command = [PYTHON, "-m", "tools.cuda_rehearsal.build", PYTHON.parents[1] / "null_cuda"]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True
    )
    env = environment(Path(built.stdout.strip()), has_numbers=False, num_devices=1, is_alone=True)
    command = [PYTHON, SUPPORT / "cuda_planted.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.dist
@NEEDS_CUDA_BUILD
def test_a_mistake_in_the_trainer_fails_the_stages_that_meet_it() -> None:
    found = planted()
    assert found["none"] == []
    for name, words in (("on the CPU", "cpu"), ("in float64", "dtype")):
        stages = {line.partition(":")[0] for line in found[name]}
        assert {"log-probs", "update", "reference", "critic"} <= stages and "offload" not in stages
        assert all(words in line.lower() for line in found[name]), found[name]


@pytest.mark.dist
@NEEDS_CUDA_BUILD
def test_models_of_transformer_engine_itself_have_the_names_of_the_table_and_our_marks() -> None:
    right, wrong = planted("tp2_sequence_ep2_etp1_grouped_transformer_engine", "deepseek_v3")
    assert right == []
    assert len(wrong) == 8 and all("_down_proj.weight: [[24, 64]" in line for line in wrong)


@pytest.mark.dist
@pytest.mark.long
@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("part", ["layouts", "kernels", "names"])
def test_all_layouts_pass_and_no_kernel_spills(part: str) -> None:
    command = [PYTHON, "-m", "tools.cuda_rehearsal", "--alone", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
