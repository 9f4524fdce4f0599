"""The commands of docs/smollm2.md in their order, on fewer problems and with fewer steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_tools import BLOCK
from places import ROOT

pytestmark = [pytest.mark.smollm2, pytest.mark.long]
MODEL = ".cache/smollm2-135m-instruct"
ONE_STEP = "trainer.total_training_steps=1"
FEWER = {
    "sft": ("data.train_batch_size=4",),
    "train": ("data.train_batch_size=2", "actor.mini_batch_size=8"),
}


def commands() -> list[str]:
    ((_, text),) = BLOCK.findall((ROOT / "docs" / "smollm2.md").read_text())
    return [line.partition("#")[0].strip() for line in text.splitlines() if line.strip()]


def test_every_command_runs_as_printed(tmp_path: Path) -> None:
    """Behind those that train stand fewer steps; behind the first program, fewer problems."""
    if not (ROOT / MODEL / "config.json").is_file():
        pytest.skip(f"{MODEL} is not there; fetch it with `rlhf-megatron fetch smollm2`.")
    shutil.copytree(ROOT / "examples" / "smollm2", tmp_path / "examples" / "smollm2")
    (tmp_path / ".cache").mkdir()
    (tmp_path / MODEL).symlink_to(ROOT / MODEL, target_is_directory=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = []
    for command in commands():
        program, *words = command.split()
        program_words = ["-m", "rlhf_megatron"] if program == "rlhf-megatron" else []
        if program == "rlhf-megatron" and words[0] in FEWER:
            words += [ONE_STEP, *FEWER[words[0]]]
        run = subprocess.run(
            [sys.executable, *program_words, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        done.append(run.stdout)
        if words[-1] == "problems":
            for name, count in (("train", 24), ("val", 4)):
                path = tmp_path / "runs" / "smollm2_data" / f"{name}.jsonl"
                path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
    scored = [text for text in done if "answers to 4 prompts" in text]
    assert len(scored) == 4, done
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/smollm2_data/pairs.jsonl").read_text().splitlines()
    ]
    assert rows and all(row["chosen"] != row["rejected"] for row in rows)
    for name in ("sft", "dpo", "grpo_chat"):
        assert [*(tmp_path / "runs" / f"smollm2_{name}" / "hf").glob("model*.safetensors")]
