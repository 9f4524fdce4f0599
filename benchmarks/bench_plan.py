"""What the planner and a dry run take for the largest published shapes: seconds and memory \
of each command.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_plan [--models deepseek_v3 kimi_k2]

Each command is a process of its own, with no weights: `plan sync` and `plan memory` of the model's
recipe, `plan layout` of its config.json, and `convert --dry-run` of an index that is generated from
it (46 and 70 thousand tensors). Writes benchmarks/results/plan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, significant, write_result

MODELS = ("deepseek_v3", "kimi_k2")
FILES = 163  # of the generated index
GB = 10**9
# which a dry run ends with on a machine that has no terabyte free
_NO_ROOM = "are missing on the disk"


def write_index(model: str, directory: Path) -> Path:
    """config.json and an index of the tensors that its model has, without files."""
    from rlhf_megatron.weights.families.family_lookup import make_weight_table
    from rlhf_megatron.weights.hf_reader import read_hf_config
    from rlhf_megatron.weights.weight_sets import INDEX

    hf_config = read_hf_config(ROOT / "examples" / model)
    names = [hf.name for rule in make_weight_table(hf_config) for hf in rule.hf_tensors]
    files = {
        name: f"model-{number * FILES // len(names) + 1:05d}-of-{FILES:05d}.safetensors"
        for number, name in enumerate(names)
    }
    directory.mkdir()
    plain = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    (directory / "config.json").write_text(json.dumps(plain))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return directory


def commands(model: str, index: Path) -> dict[str, list[str]]:
    """By name, the words after `rlhf-megatron`."""
    recipe = f"configs/recipes/{model}_grpo.yaml"
    shape = f"examples/{model}"
    return {
        "plan sync": ["plan", "sync", recipe, "--network", "h200-8x400g"],
        "plan memory": ["plan", "memory", recipe, "--gpu", "h200"],
        "plan layout": [
            "plan",
            "layout",
            shape,
            "--gpus",
            "512",
            "--gpu",
            "h200",
            "--seq",
            "32768",
        ],
        "convert --dry-run": [
            "convert",
            str(index),
            "--out",
            str(index.parent / "out"),
            "--to",
            "torch_dist",
            "--dry-run",
        ],
    }


def measure(words: list[str]) -> dict[str, Any]:
    """Seconds and largest resident memory of one command. Raises RuntimeError where it fails."""
    with tempfile.TemporaryFile() as out:
        start = time.monotonic()
        command = [sys.executable, "-m", "rlhf_megatron", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        out.seek(0)
        text = out.read().decode()
    if os.waitstatus_to_exitcode(status) and _NO_ROOM not in text:
        raise RuntimeError(
            f"{' '.join(words)}: exit code {os.waitstatus_to_exitcode(status)}\n{text}"
        )
    found = {"wall_s": significant(seconds), "cpu_s": significant(used.ru_utime + used.ru_stime)}
    return {
        **found,
        "peak_gb": significant(used.ru_maxrss * 1024 / GB),
        "lines": len(text.splitlines()),
    }


def run(model: str, folder: Path) -> dict[str, Any]:
    """Every command, for one model."""
    return {
        name: measure(words)
        for name, words in commands(model, write_index(model, folder / model)).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            rows[model] = run(model, Path(folder))
            for name, row in rows[model].items():
                print(
                    f"{model}, {name}: {row['wall_s']:.1f} s, {row['cpu_s']:.1f} s of CPU,"
                    f" {row['peak_gb']:.2f} GB"
                )
    print(write_result("plan", "python -m benchmarks.bench_plan", {"models": rows}))


if __name__ == "__main__":
    main()
