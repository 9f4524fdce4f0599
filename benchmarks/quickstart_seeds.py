"""A quickstart with several seeds: mean gain of held-out accuracy with its \
interval. `make quickstart-seeds`.

    python -m benchmarks.quickstart_seeds [--config configs/quickstart.yaml] [--seeds 1 2 3]
        [key=value ...]

A seed is trainer.seed and, where the configuration starts from random weights, model.init_seed:
weights, order of prompts, sampling and shuffling all follow it. Held-out accuracy is that of the
configuration's rollout.val_kwargs. Runs go to runs/<config>-seed<N>; overrides after the options go
to every run. The interval of the mean gain is Student's t over the seeds; each accuracy has its own
Wilson interval over held-out items. Writes benchmarks/results/ quickstart_seeds.json; for another
configuration quickstart_seeds_<what follows "quickstart_" in its name>.json, or seeds_<its
name>.json. `python -m benchmarks.draw_seeds` draws the curves.
Exit code 1 when something is below the bars of the configuration (BARS), or the interval of the
mean gain has 0.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, significant, write_result
from rlhf_megatron.config.load import load_run_config


@dataclass(frozen=True)
class Bars:
    mean_gain: float = 0.0  # of accuracy, over the seeds
    final: float = 0.0  # accuracy after training, of every seed


BARS = {
    "quickstart": Bars(0.25, 0.85),
    "quickstart_async": Bars(0.15, 0.85),
    "quickstart_fsdp": Bars(0.25, 0.85),
    "quickstart_mla": Bars(0.25, 0.85),
    "quickstart_moe": Bars(0.25, 0.85),
    "quickstart_ppo": Bars(0.25, 0.6),
    "quickstart_ppo_pool": Bars(0.25, 0.6),
    "smollm2_grpo": Bars(0.3, 0.6),
    "smollm2_ppo": Bars(0.3, 0.4),
}
"""By configuration. Those of PPO and of SmolLM2 measure the accuracy of samples, the others
greedy accuracy.
"""

T_975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)  # Student's t, 1 .. 9 degrees of freedom


def run_seed(seed: int, config: Path, runs: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """summary.json of one run. Raises RuntimeError when it fails."""
    name = f"{config.stem}-seed{seed}"
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config), f"trainer.seed={seed}"]
    if load_run_config(config, overrides, with_files=False).config.model.init_seed is not None:
        command.append(f"model.init_seed={seed}")
    command += [
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={runs}",
        "trainer.save_last=none",
    ]
    print(f"seed {seed}: {' '.join(command[1:])} {' '.join(overrides)}", flush=True)
    code = subprocess.run(
        [*command, *overrides], cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}
    ).returncode
    if code:
        raise RuntimeError(
            f"the run with seed {seed} exited with {code}; see {runs / name / 'logs'}"
        )
    return json.loads((runs / name / "summary.json").read_text())


def result_name(config: str) -> str:
    """Name of the result file of a configuration."""
    is_quickstart = config.startswith("quickstart")
    return (
        f"quickstart_seeds{config.removeprefix('quickstart')}"
        if is_quickstart
        else f"seeds_{config}"
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; unbounded for one value. Takes up to ten."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return -math.inf, math.inf
    half = T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def evaluate(summaries: Sequence[dict[str, Any]], bars: Bars) -> dict[str, Any]:
    """Gains, finals, and what falls short of `bars` in `problems`."""
    rows = []
    for summary in summaries:
        before = summary["accuracy_before"]
        after = summary["accuracy_after"]
        rows.append({**summary, "gain": significant(after - before)})
    gains = [row["gain"] for row in rows]
    finals = [row["accuracy_after"] for row in rows]
    mean = statistics.mean(gains)
    low, high = mean_interval(gains)
    problems = [f"mean gain {mean:.3f} is below {bars.mean_gain}"] if mean < bars.mean_gain else []
    if len(gains) > 1 and low <= 0:
        problems.append(f"the interval of the mean gain [{low:.3f}, {high:.3f}] has 0")
    problems += [
        f"seed {row['seed']}: final accuracy {row['accuracy_after']:.3f} is below {bars.final}"
        for row in rows
        if row["accuracy_after"] < bars.final
    ]
    return {
        "mean_gain": significant(mean),
        "mean_gain_interval_95": [significant(low), significant(high)] if len(gains) > 1 else None,
        "lowest_final": min(finals),
        "bars": asdict(bars),
        "problems": problems,
        "seconds": [row["seconds"] for row in rows],
        "runs": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    print("seed    before  [95 % interval]      after  [95 % interval]     gain   seconds")
    for row in result["runs"]:
        low, high = row["accuracy_before_interval"]
        after_low, after_high = row["accuracy_after_interval"]
        print(
            f"{row['seed']:4}    {row['accuracy_before']:6.3f}  [{low:.3f}, {high:.3f}]"
            f"   {row['accuracy_after']:8.3f}  [{after_low:.3f}, {after_high:.3f}]"
            f"  {row['gain']:7.3f}  {row['seconds']:8.1f}"
        )
    interval = result["mean_gain_interval_95"]
    words = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    print(f"mean gain {result['mean_gain']:.3f}{words} over {len(result['runs'])} seeds")
    for problem in result["problems"]:
        print(f"BELOW THE BAR: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    args, rest = parser.parse_known_args()
    overrides = [*args.overrides, *rest]
    if len(args.seeds) > len(T_975) + 1 or len(set(args.seeds)) != len(args.seeds):
        parser.error(f"--seeds takes up to {len(T_975) + 1} different numbers, not {args.seeds}.")
    if any("=" not in item or item.startswith("-") for item in overrides):
        parser.error(f"overrides must be key=value, not {overrides}.")
    runs = args.runs if args.runs.is_absolute() else ROOT / args.runs
    os.chdir(ROOT)  # what a configuration names is relative to it
    bars = BARS.get(args.config.stem, Bars())
    result = evaluate([run_seed(seed, args.config, runs, overrides) for seed in args.seeds], bars)
    print_table(result)
    words = [
        "python -m benchmarks.quickstart_seeds --config",
        str(args.config),
        "--seeds",
        *map(str, args.seeds),
    ]
    print(
        write_result(
            result_name(args.config.stem),
            " ".join([*words, *overrides]),
            {"seeds": args.seeds, **result},
        )
    )
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
