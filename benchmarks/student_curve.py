"""A student learns from a teacher on Megatron: divergence, held-out loss and accuracy along its \
steps, three seeds.

    python -m benchmarks.student_curve [--seeds 1 2 3] [--runs runs] [key=value ...]

configs/quickstart_sft.yaml (tp2, two processes) from random weights, with sft.loss_mode forward_kl
towards the quickstart's warm model: no answer of the rows counts, only what the teacher tells of
its places. Accuracy is greedy, on the 2,000 held-out problems, of the student at each checkpoint
and of the teacher. Writes benchmarks/results/student_curve.json. Runs and answers that are there go
on. Exit code 1 where a student is not within BAR of its teacher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, significant, write_result

TEACHER = "examples/quickstart/warm_model"
BAR = 0.05  # of accuracy, below the teacher's
SETTINGS = ("sft.loss_mode=forward_kl", "sft.params.top_k=8", f"reference.path={TEACHER}")
STEPS = ("trainer.total_training_steps=800", "trainer.save_freq=100", "trainer.max_ckpt_to_keep=0")
QUESTIONS = ("--max-tokens", "4")


def command(*words: str) -> None:
    """Run one of the package. Raises CalledProcessError."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(
        [sys.executable, "-m", "rlhf_megatron", *words], cwd=ROOT, env=environment, check=True
    )


def accuracy(figures: dict[str, Any]) -> dict[str, float]:
    return {name: significant(figures[name]) for name in ("mean", "low", "high")}


def run_seed(seed: int, runs: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The figures of one student."""
    name = f"student-seed{seed}"
    place = (f"trainer.experiment_name={name}", f"trainer.default_local_dir={runs}")
    seeds = (f"trainer.seed={seed}", f"model.init_seed={seed}")
    command("sft", "configs/quickstart_sft.yaml", *SETTINGS, *STEPS, *place, *seeds, *overrides)
    figures = runs / name / "accuracy.json"
    words = ("--every-step", "--out", str(runs / name / "answers"), "--json", str(figures))
    command("evaluate", str(runs / name), *QUESTIONS, *words)
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    divergences = [row["sft/loss"] for row in rows if row["kind"] == "step"]
    held_out = {
        row["step"]: significant(row["val/loss"]) for row in rows if row["kind"] == "evaluation"
    }
    steps = json.loads(figures.read_text())["steps"]
    return {
        "seed": seed,
        "divergence": [
            significant(divergences[0]),
            significant(divergences[-1]),
        ],  # before the first and the last step
        "held_out_loss": held_out,
        "accuracy": {one["step"]: accuracy(one) for one in steps},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    args, overrides = parser.parse_known_args()
    runs = args.runs.absolute()
    told = runs / "student-teacher.json"
    runs.mkdir(parents=True, exist_ok=True)
    task = ("data.task=addition", "--out", str(told) + "l", "--json", str(told))
    command("evaluate", TEACHER, *QUESTIONS, *task)
    teacher = accuracy(json.loads(told.read_text()))
    students = [run_seed(seed, runs, overrides) for seed in args.seeds]
    behind = [
        one["seed"]
        for one in students
        if list(one["accuracy"].values())[-1]["mean"] < teacher["mean"] - BAR
    ]
    result = {"teacher": teacher, "students": students, "bar": BAR, "below_the_bar": behind}
    print(json.dumps(result, indent=1))
    words = " ".join(
        ["python -m benchmarks.student_curve --seeds", *map(str, args.seeds), *overrides]
    )
    print(write_result("student_curve", words, result))
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
