"""Whole runs on device cuda without a GPU: their comparison can fail, branches are those of the
sources, one run.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from cuda_tools import NEEDS_CUDA_BUILD, PYTHON
from places import ROOT

from rlhf_megatron.api import load_config
from tools.cuda_rehearsal.branches import EXCUSED, TAKEN, device_branches, not_seen
from tools.cuda_rehearsal.cases import BASELINES, CASES, Case
from tools.cuda_rehearsal.runs import differences, settings_of


def run_of(folder: Path, loss: float, response: str, steps: tuple[int, ...] = (1, 2)) -> Path:
    folder.mkdir()
    rows = [
        {"kind": "step", "step": n, "actor/loss": loss, "timing_s/step": float(len(folder.name))}
        for n in steps
    ]
    samples = [{"step": n, "prompt": "1+1=", "response": response, "reward": 1.0} for n in steps]
    for name, lines in (("metrics", rows), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_are_compared_by_figures_and_samples(tmp_path: Path) -> None:
    expected = run_of(tmp_path / "expected", 0.5, "2")
    assert differences(run_of(tmp_path / "same", 0.5 + 1e-5, "2"), expected) == []
    (words, _) = differences(run_of(tmp_path / "loss", 0.5002, "2"), expected)
    assert words == "step 1: actor/loss 0.5002 on cuda, 0.5 on the CPU"
    (words,) = differences(run_of(tmp_path / "sample", 0.5, "3"), expected)
    assert words.startswith("2 of 2 samples differ, the first at [(1, '1+1=', '3', 1.0)]")
    resumed = run_of(tmp_path / "resumed", 0.5, "2", steps=(2,))
    assert differences(resumed, expected) == ["step rows of steps [2], on the CPU [1, 2]"]
    assert differences(resumed, expected, is_resumed=True) == []


def test_branches_are_found_where_sources_ask_for_a_device() -> None:
    found = device_branches()
    assert {
        "device.py:synchronize_device",
        "ranks/kernels/matrix_products.py:choose_operand_dtype",
    } <= found
    assert {
        "ranks/models/rms_norm_layer.py:apply_rms_norm",
        "rollout/local/local_server.py:_build_service",
    } <= found
    assert len(EXCUSED) <= 15 and all(len(reason.split()) > 3 for reason in EXCUSED.values())
    assert not EXCUSED.keys() - found, (
        "excused in tools/cuda_rehearsal/branches.py, and no longer there"
    )
    taken = set(TAKEN.read_text().splitlines())
    assert sorted(found - taken - EXCUSED.keys()) == [], (
        "new: a case of `make cuda-rehearsal` must come here"
    )
    assert not taken - found, "in tools/cuda_rehearsal/branches.txt, and no longer there"


def test_a_branch_that_nobody_took_is_named(tmp_path: Path) -> None:
    listed = tmp_path / "branches"
    listed.write_text("a.py:f\na.py:g")
    listed.with_suffix(".seen").write_text("a.py:f\n")
    assert not_seen(listed) == ["a.py:g"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.resumes], ids=lambda case: case.name
)
def test_the_settings_of_a_case_are_accepted(case: Case, tmp_path: Path) -> None:
    settings = settings_of(case, tmp_path)
    load_config(ROOT / "configs" / f"{BASELINES[case.baseline].config}.yaml", settings)


def test_cases_name_what_is_there() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.baseline for case in CASES} == BASELINES.keys()
    assert all(case.resumes in names[:place] for place, case in enumerate(CASES) if case.resumes)


@pytest.mark.dist
@NEEDS_CUDA_BUILD
def test_a_run_on_device_cuda_has_the_figures_of_the_cpu(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "tools.cuda_rehearsal", "--cases", "pp2", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ok     pp2" in done.stdout


def test_nothing_forks_in_a_process_that_may_have_a_device() -> None:
    """CUDA works in no child that is forked off a process in which it has begun."""
    forks = re.compile(
        r"os\.fork\b|import multiprocessing|from"
        r" multiprocessing|start_processes|ProcessPoolExecutor"
    )
    sources = [
        path for path in (ROOT / "rlhf_megatron").rglob("*.py") if forks.search(path.read_text())
    ]
    assert {path.relative_to(ROOT / "rlhf_megatron").as_posix() for path in sources} == {
        "weights/conversion/group_processes.py",  # a command that copies files on the CPU
        # an interpreter of its own without torch, as the harness below it
        "rewards/sandbox/guardian.py",
        "rewards/sandbox/harness.py",
        # an interpreter of its own, which imports rewards and nothing else
        "rewards/service/worker_template.py",
        # where `can_fork` finds no device and none is asked for
        "runtime/torchrun/forked_ranks.py",
    }
