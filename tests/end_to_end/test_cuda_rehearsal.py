"""The CUDA code path without a GPU: right numbers, memory of another process, and mistakes that each pass catches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT

from tools.cuda_rehearsal.build import missing_tools
from tools.cuda_rehearsal.environment import environment

PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
WHY_NOT = missing_tools() if PYTHON.is_file() else "`make cuda-rehearsal` has not made .venv-cuda"
pytestmark = [pytest.mark.dist, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def built() -> Path:
    command = [PYTHON, "-m", "tools.cuda_rehearsal.build", PYTHON.parents[1] / "null_cuda"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr[-3000:]
    return Path(found.stdout.strip())


def start(built: Path, *words: str, has_numbers: bool = True) -> subprocess.Popen[str]:
    program, *rest = words
    env = environment(built, has_numbers, 2)
    command = [PYTHON, SUPPORT / f"cuda_{program}.py", *rest]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    return {name: said for line in output.splitlines() for name, said in json.loads(line).items()}


def test_a_model_on_device_cuda_learns_as_on_the_cpu(built: Path) -> None:
    found = told(start(built, "numbers", "model"))
    assert found["device"] == "cuda:0"
    assert found["worst gradient"] < 1e-5  # relative L2 error after three steps in float32
    assert found["attention"] < 0.01  # bfloat16 keeps 8 bits


def test_another_process_takes_weights_by_cuda_ipc(built: Path) -> None:
    found = told(start(built, "numbers", "send"))
    assert found["memory"] == "device_memory" and found["lay on"]
    assert found["standing"] == found["sent"] and found["stale"] is None


def test_mistakes_are_caught_by_the_pass_that_can(built: Path) -> None:
    numbers, checks = start(built, "mistakes", "numbers"), start(built, "mistakes", "checks", has_numbers=False)
    found = told(numbers)
    assert "to be on the same device, but aten::addmm got one on cpu" in found["cpu in a forward pass"]
    assert "to be on the same device, but aten::add got one on cuda:1" in found["another device"]
    assert "to have the same dtype" in found["two types"]
    assert "a kernel that the host does not compute" in found["a kernel that nobody computes"]
    assert "device may be out of range" in found["a rank too many"]
    found = told(checks)
    assert "FlashAttention only support fp16 and bf16" in found["attention in float32"]
    assert "does not have a deterministic implementation" in found["no deterministic form"]
    assert "called a synchronizing CUDA operation" in found["the host waits"]


def test_ranks_that_call_different_things_are_told_what_each_called(built: Path, tmp_path: Path) -> None:
    ranks = [start(built, "mistakes", "rank", str(tmp_path / "store"), str(rank)) for rank in range(2)]
    for rank, found in enumerate(map(told, ranks)):
        assert found["sum"] == 3.0
        words = f"ranks differ on rank {rank} of 2; rank 0: all_reduce of 40 B rank 1: broadcast of 40 B"
        assert words in found["differ"]
