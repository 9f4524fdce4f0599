"""Three GRPO steps through the command line with stock SGLang as the engine."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sglang_tools import ROOT, STARTUP_S, needs_sglang, sglang_python

PR_SET_CHILD_SUBREAPER = 36
SETTINGS = (
    "trainer.runtime=inline",
    "trainer.n_gpus_per_node=1",
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.pipeline_model_parallel_size=1",
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.mini_batch_size=16",
    f"rollout.startup_timeout_s={STARTUP_S}",
)


def alive() -> set[psutil.Process]:
    """Processes under this one that have not ended."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


@pytest.fixture
def others() -> Iterator[set[psutil.Process]]:
    """Processes that are there before; what a child leaves behind becomes a child of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield alive()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@needs_sglang
@pytest.mark.sglang
@pytest.mark.dist
def test_three_steps(tmp_path: Path, others: set[psutil.Process]) -> None:
    command = [sys.executable, "-m", "rlhf_megatron", "train", "configs/quickstart_sglang.yaml", *SETTINGS]
    command += [f"rollout.sglang.python={sglang_python()}", f"trainer.default_local_dir={tmp_path}"]
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=900)
    assert done.returncode == 0, (tmp_path / "out").read_text()[-4000:]

    run_dir = tmp_path / "quickstart_sglang"
    steps = [row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert [row["policy/version"] for row in steps] == [2, 3, 4]  # the sync before step 1 was the first
    for row in steps:
        assert row["rollout/num_samples"] == 16
        assert 0 < row["training/rollout_log_probs_diff_max"] <= 1e-4
        assert row["sync/num_bytes"] > 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_after"] > 0.3  # the warmed-up checkpoint gives 0.6 when greedy; other weights give none

    deadline = time.monotonic() + 20
    while alive() - others and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive() - others == set()
