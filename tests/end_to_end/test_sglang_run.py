"""The shipped configurations through the command line with stock SGLang as the engine."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from places import ROOT
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python

PR_SET_CHILD_SUBREAPER = 36
THREE_STEPS = (
    "trainer.total_training_steps=3",
    "trainer.val_before_train=false",
    "trainer.runtime=inline",
    "trainer.n_gpus_per_node=1",
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.pipeline_model_parallel_size=1",
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.mini_batch_size=16",
)
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
needs_smollm2 = pytest.mark.skipif(
    not (SMOLLM2 / "config.json").is_file(), reason="run: rlhf-megatron fetch smollm2"
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
    """Processes that are there before; what a child leaves behind becomes a child of this process.
    No run is forked from a process that stays.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    with warm.cold():
        yield alive()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def train(name: str, directory: Path, *settings: str) -> Path:
    """The run directory of a shipped configuration."""
    command = [sys.executable, "-m", "rlhf_megatron", "train", f"configs/{name}.yaml", *settings]
    command += [
        f"rollout.sglang.python={sglang_python()}",
        f"rollout.startup_timeout_s={STARTUP_S}",
    ]
    with (directory / "out").open("w") as out:
        done = subprocess.run(
            [*command, f"trainer.default_local_dir={directory}"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=1800,
        )
    assert done.returncode == 0, (directory / "out").read_text()[-4000:]
    return directory / name


def rows_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [
        row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if row["kind"] == kind
    ]


@needs_sglang
@pytest.mark.sglang
@pytest.mark.dist
def test_three_steps(tmp_path: Path, others: set[psutil.Process]) -> None:
    run_dir = train("quickstart_sglang", tmp_path, *THREE_STEPS)
    steps = rows_of(run_dir, "step")
    assert [row["step"] for row in steps] == [1, 2, 3]
    # the sync before step 1 was the first
    assert [row["policy/version"] for row in steps] == [2, 3, 4]
    for row in steps:
        assert row["rollout/num_samples"] == 16
        assert 0 < row["training/rollout_log_probs_diff_max"] <= 1e-4
        assert row["sync/num_bytes"] > 0
    summary = json.loads((run_dir / "summary.json").read_text())
    # the warmed-up checkpoint gives 0.6 when greedy; other weights give none
    assert summary["accuracy_after"] > 0.3

    deadline = time.monotonic() + 20
    while alive() - others and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive() - others == set()


@needs_sglang
@pytest.mark.sglang
@pytest.mark.dist
@pytest.mark.long
def test_ten_steps_of_the_quickstart_gain(tmp_path: Path) -> None:
    """At tp2 pp2. In float32 the engine's log-probs are the trainer's from the first step on."""
    run_dir = train("quickstart_sglang", tmp_path)
    before, after = rows_of(run_dir, "evaluation")
    assert (before["step"], after["step"]) == (0, 10) and before["val/num_items"] == after[
        "val/num_items"
    ] == 2000
    assert after["val/accuracy"] > before["val/accuracy"]
    steps = rows_of(run_dir, "step")
    assert [row["policy/version"] for row in steps] == list(range(2, 12))
    assert 0 < steps[0]["training/rollout_log_probs_diff_max"] <= 1e-4
    for row in steps:
        assert row["rollout/num_samples"] == 512
        assert row["rollout/finish_reason/stop"] + row[
            "rollout/finish_reason/length"
        ] == pytest.approx(1.0)
        assert row["rollout/finish_reason/length"] == row["response_length/clip_ratio"]
        assert row["rollout/samples_of_several_versions"] == row["rollout/num_retractions"] == 0.0
    assert json.loads((run_dir / "summary.json").read_text())["layout"] == "tp2 pp2 dp1"
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").open()]
    assert {sample["num_retractions"] for sample in samples} == {0}


# A model with experts is nearly random then: an entropy bonus, so that each step learns.
FEW_STEPS = (
    "actor.entropy_coeff=0.01",
    "trainer.total_training_steps=2",
    "trainer.test_samples=50",
    "warmup.max_steps=3",
    "warmup.test_freq=3",
    "warmup.test_samples=8",
    "data.train_batch_size=8",
    "rollout.n=4",
    "actor.mini_batch_size=32",
    "rollout.engine=sglang",
)
ENGINES = {"tp1": {}, "tp2": {"tp_size": 2}, "tp2 ep2": {"tp_size": 2, "ep_size": 2}}


@needs_sglang
@pytest.mark.sglang
@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("sizes", ENGINES)
@pytest.mark.parametrize("name", ["quickstart_moe", "quickstart_mla"])
def test_models_with_experts(name: str, sizes: str, tmp_path: Path) -> None:
    """From tp2 ep2 pp2. The engine's log-probs are the trainer's before and after an update of
    all its weights.
    """
    arguments = {**CPU_ARGUMENTS, "context_length": 64, **ENGINES[sizes]}
    env = {**CPU_ENV, **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "tp_size" in arguments else {})}
    given = (
        f"rollout.sglang.args={json.dumps(arguments)}",
        f"rollout.sglang.env={json.dumps(env)}",
    )
    run_dir = train(name, tmp_path, *FEW_STEPS, *given)
    steps = rows_of(run_dir, "step")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/num_samples"] == 32 and row["actor/grad_norm"] > 0
        assert 0 < row["training/rollout_log_probs_diff_max"] <= 1e-4
        assert row["sync/num_bytes"] > 0
    assert (
        json.loads((run_dir / "summary.json").read_text())["layout"]
        == "tp2 sequence pp2 ep2 etp1 dp1"
    )


@needs_sglang
@needs_smollm2
@pytest.mark.sglang
@pytest.mark.smollm2
@pytest.mark.dist
@pytest.mark.long
def test_smollm2(tmp_path: Path) -> None:
    """A real model. The samples of a group share their prompt's cache, and the log-probs are
    the trainer's.
    """
    run_dir = train(
        "smollm2_sglang", tmp_path, "trainer.total_training_steps=2", "rollout.val_kwargs.n=1"
    )
    steps = rows_of(run_dir, "step")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0 < row["training/rollout_log_probs_diff_max"] <= 1e-4
        # of each group of 8 one is computed, and its last token
        assert 0.3 < row["rollout/cached_token_share"] < 7 / 8
