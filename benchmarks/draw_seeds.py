"""Curves of runs that differ in their seed, with the baseline of always giving the most common
answer, as one picture.

    python -m benchmarks.draw_seeds --out docs/images/smollm2_seeds.png smollm2_grpo smollm2_ppo

One panel a configuration: runs/<configuration>-seed<N>, as `benchmarks.quickstart_seeds` leaves
them. Thin lines are the mean reward of each step of each seed; thick ones held-out accuracy, mean
over the seeds with Student's t interval.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import ROOT
from benchmarks.quickstart_seeds import mean_interval


def curves(run_dir: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]], float]:
    """(step, mean reward) of each step, (step, held-out accuracy) of each
    evaluation, the baseline.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [(row["step"], row["critic/rewards/mean"]) for row in rows if row["kind"] == "step"]
    accuracies = [(row["step"], row["val/accuracy"]) for row in rows if row["kind"] == "evaluation"]
    return (
        rewards,
        accuracies,
        json.loads((run_dir / "summary.json").read_text())["majority_answer_accuracy"],
    )


def draw_panel(axes: Any, name: str, run_dirs: list[Path]) -> None:
    seeds = [curves(run_dir) for run_dir in run_dirs]
    for index, (rewards, _, _) in enumerate(seeds):
        label = "reward of a step, each seed (sampled)" if index == 0 else None
        axes.plot(
            *zip(*rewards, strict=True), color="tab:blue", alpha=0.4, linewidth=1, label=label
        )
    steps = [step for step, _ in seeds[0][1]]
    by_step = [[accuracies[i][1] for _, accuracies, _ in seeds] for i in range(len(steps))]
    axes.plot(
        steps,
        [mean(values) for values in by_step],
        "o-",
        color="tab:orange",
        label="held-out accuracy, mean",
    )
    if len(seeds) > 1:
        bounds = [mean_interval(values) for values in by_step]
        low = [max(0.0, b[0]) for b in bounds]
        high = [min(1.0, b[1]) for b in bounds]
        axes.fill_between(
            steps, low, high, color="tab:orange", alpha=0.25, label="95 % interval over the seeds"
        )
    axes.axhline(seeds[0][2], color="grey", linestyle=":", label="always the most common answer")
    axes.set(
        xlabel="step",
        ylabel="share of right answers",
        ylim=(0, 1.02),
        title=f"{name}, {len(seeds)} seeds",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", help="names of configurations")
    parser.add_argument(
        "--runs", type=Path, action="append", help="where their runs are; default: runs"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = args.runs or [ROOT / "runs"]
    figure, panels = pyplot.subplots(
        1, len(args.configs), figsize=(6 * len(args.configs), 4), dpi=100, squeeze=False
    )
    for axes, name in zip(panels[0], args.configs, strict=True):
        found = sorted(
            path.parent for place in places for path in place.glob(f"{name}-seed[0-9]/summary.json")
        )
        if not found:
            parser.error(f"no finished run {name}-seed<N> under {', '.join(map(str, places))}")
        draw_panel(axes, name, found)
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
