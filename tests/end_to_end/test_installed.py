"""From an installed wheel, in an empty folder, without GPUs: what a first user does,
in seven commands.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import cold

from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = [pytest.mark.dist, pytest.mark.long]
TIMEOUT_S = 900.0  # of one command
STEPS = ("trainer.total_training_steps=4", "trainer.test_freq=1", "trainer.test_samples=50")


def test_init_train_stop_resume_export_generate(tmp_path: Path) -> None:
    site = tmp_path / "site"
    folder = tmp_path / "empty"
    folder.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(ROOT)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHON"] = sys.executable  # of the launch scripts

    def start(*words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, str(site / "bin" / "rlhf-megatron"), *words]
        if words[0].startswith("launch/"):
            command = [*words]
        with cold():
            return subprocess.Popen(
                command, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True
            )

    def done(*words: str) -> str:
        process = start(*words)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, out
        return out

    assert "next: rlhf-megatron train run.yaml" in done("init", "grpo", ".")
    first = start("train", "run.yaml", *STEPS, "trainer.total_training_steps=1000")
    metrics = folder / "runs" / "grpo" / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not (metrics.exists() and '"kind": "step"' in metrics.read_text()):
        if time.monotonic() > deadline:
            first.kill()
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == STOPPED_EXIT_CODE, out
    saved = (folder / "runs" / "grpo" / "checkpoints").glob("step_*")
    last = max(int(path.name.removeprefix("step_")) for path in saved) + 2
    assert "next: launch/torchrun.sh RUN.yaml" in done("launch-scripts", "launch")
    assert f"resumed after step {last - 2}" in done(
        "launch/torchrun.sh", "run.yaml", *STEPS, f"trainer.total_training_steps={last}"
    )
    done("export", "runs/grpo", "--out", "trained")
    done("generate", "trained", "val.jsonl", "--max-tokens", "4", "--out", "answers.jsonl")
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 200
    policy, tokenizer = (
        kind.from_pretrained(folder / "trained") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    for row in rows[:20]:
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ]
        ids = policy.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
        assert row["responses"] == [tokenizer.decode(ids, skip_special_tokens=True)]
