"""The quickstart with several seeds: mean gain of held-out accuracy with its interval. `make quickstart-seeds`.

    python -m benchmarks.quickstart_seeds [--seeds 1 2 3] [key=value ...]

A seed is trainer.seed and model.init_seed: weights, order of prompts, sampling and shuffling all follow it. Runs go to
runs/quickstart-seed<N>; overrides after the options go to every run. The interval of the mean gain is Student's t over
the seeds; each accuracy has its own Wilson interval over held-out items. Writes
benchmarks/results/quickstart_seeds.json; exit code 1 when the mean gain is below 0.25 or a final accuracy below 0.85.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, significant, write_result

MIN_MEAN_GAIN, MIN_FINAL = 0.25, 0.85
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 .. 9 degrees of freedom


def run_seed(seed: int, config: str, runs: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """summary.json of one run. Raises RuntimeError when it fails."""
    name = f"quickstart-seed{seed}"
    command = [sys.executable, "-m", "rlhf_megatron", "train", config, f"trainer.seed={seed}"]
    command += [f"model.init_seed={seed}", f"trainer.experiment_name={name}", f"trainer.default_local_dir={runs}"]
    print(f"seed {seed}: {' '.join(command[1:])} {' '.join(overrides)}", flush=True)
    code = subprocess.run([*command, *overrides], cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    if code:
        raise RuntimeError(f"the run with seed {seed} exited with {code}; see {runs / name / 'logs'}")
    return json.loads((runs / name / "summary.json").read_text())


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; unbounded for one value. Takes up to ten."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return -math.inf, math.inf
    half = T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def evaluate(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gains, finals, and what falls short of the bars in `problems`."""
    rows = []
    for summary in summaries:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        rows.append({**summary, "gain": significant(after - before)})
    gains, finals = [row["gain"] for row in rows], [row["accuracy_after"] for row in rows]
    mean = statistics.mean(gains)
    problems = [f"mean gain {mean:.3f} is below {MIN_MEAN_GAIN}"] if mean < MIN_MEAN_GAIN else []
    problems += [
        f"seed {row['seed']}: final accuracy {row['accuracy_after']:.3f} is below {MIN_FINAL}"
        for row in rows
        if row["accuracy_after"] < MIN_FINAL
    ]
    low, high = mean_interval(gains)
    return {
        "mean_gain": significant(mean),
        "mean_gain_interval_95": [significant(low), significant(high)] if len(gains) > 1 else None,
        "lowest_final": min(finals),
        "bars": {"mean_gain": MIN_MEAN_GAIN, "final": MIN_FINAL},
        "problems": problems,
        "seconds": [row["seconds"] for row in rows],
        "runs": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    print("seed    before  [95 % interval]      after  [95 % interval]     gain   seconds")
    for row in result["runs"]:
        (low, high), (after_low, after_high) = row["accuracy_before_interval"], row["accuracy_after_interval"]
        print(
            f"{row['seed']:4}    {row['accuracy_before']:6.3f}  [{low:.3f}, {high:.3f}]   {row['accuracy_after']:8.3f}"
            f"  [{after_low:.3f}, {after_high:.3f}]  {row['gain']:7.3f}  {row['seconds']:8.1f}"
        )
    interval = result["mean_gain_interval_95"]
    words = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    print(f"mean gain {result['mean_gain']:.3f}{words} over {len(result['runs'])} seeds")
    for problem in result["problems"]:
        print(f"BELOW THE BAR: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    args, rest = parser.parse_known_args()
    overrides = [*args.overrides, *rest]
    if len(args.seeds) > len(T_975) + 1 or len(set(args.seeds)) != len(args.seeds):
        parser.error(f"--seeds takes up to {len(T_975) + 1} different numbers, not {args.seeds}.")
    if any("=" not in item or item.startswith("-") for item in overrides):
        parser.error(f"overrides must be key=value, not {overrides}.")
    runs = args.runs if args.runs.is_absolute() else ROOT / args.runs
    result = evaluate([run_seed(seed, args.config, runs, overrides) for seed in args.seeds])
    print_table(result)
    command = " ".join(["python -m benchmarks.quickstart_seeds --seeds", *map(str, args.seeds), *overrides])
    print(write_result("quickstart_seeds", command, {"seeds": args.seeds, **result}))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
