"""The same recorded rollouts trained under every launcher: each figure of each step must be the \
same, bit for bit.

    python -m benchmarks.launchers                       # records 3 steps of the quickstart, then
                                                         replays them 7 times
    python -m benchmarks.launchers --record RUN_DIR      # replays an earlier record of
                                                         the quickstart

On one rank: inline, torchrun, Ray. On four (tp2 pp2) and on two replicas: torchrun, Ray. Ray is a
cluster of this machine that each run makes. A replay computes log-probs, advantages, mini-batches
and optimizer steps anew; compared are all numbers of a step but times. Exit code 1 on a difference.
Writes benchmarks/results/launchers.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, write_result
from benchmarks.parity.layouts import LAYOUTS
from benchmarks.replay_layouts import (
    CONFIG,
    Placement,
    record,
    start_weights,
    step_metrics,
    train,
    weights,
)

RUNS = ROOT / "runs" / "launchers"
AREAS = (
    "actor/",
    "critic/",
    "training/",
    "policy/",
    "reward/",
    "rollout_corr/",
    "response_length/",
    "prompt_length/",
)
SHOWN = ("actor/loss", "actor/pg_loss", "actor/grad_norm")
REPLAYED = {
    "one_rank": ("inline", "torchrun", "ray"),
    "tp2_pp2": ("torchrun", "ray"),
    "dp2": ("torchrun", "ray"),
}
"""Layout -> launchers; the first is what the others are compared with."""


@dataclass(frozen=True)
class Row:
    """One step under one launcher. Losses in hexadecimal, so that every bit is seen."""

    layout: str
    runtime: str
    step: int
    shown: dict[str, str]
    num_figures: int
    different: tuple[str, ...]  # names of figures that are not those of the first launcher


def figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Every number of a step that rollouts and weights decide, exactly."""
    return {
        name: float(value).hex()
        for name, value in metrics.items()
        if name.startswith(AREAS) and isinstance(value, int | float)
    }


def compare(
    layout: str, runtime: str, found: Sequence[Mapping], first: Sequence[Mapping]
) -> list[Row]:
    """A row a step. A figure that only one of them has is a difference."""
    rows = []
    for step, (mine, other) in enumerate(zip(found, first, strict=True), start=1):
        ours = figures(mine)
        theirs = figures(other)
        different = sorted(
            name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
        )
        shown = {name: ours[name] for name in SHOWN}
        rows.append(Row(layout, runtime, step, shown, len(ours), tuple(different)))
    return rows


def replay(
    recorded: Path, start: Sequence[str], layout: str, runtime: str, num_steps: int, runs: Path
) -> list[dict]:
    """Metrics of each step."""
    settings = [
        word
        for word in Placement(LAYOUTS[layout]).settings
        if not word.startswith("trainer.runtime=")
    ]
    settings += [f"trainer.runtime={runtime}", *start, f"trainer.total_training_steps={num_steps}"]
    name = f"{layout}_{runtime}"
    named = train(
        CONFIG, name, [*settings, "--replay", str(num_steps), "--replay-from", str(recorded)], runs
    )
    return step_metrics(named.with_name(f"{named.name}-replay"))


def replay_all(
    recorded: Path, start: Sequence[str], layouts: Sequence[str], num_steps: int, runs: Path
) -> list[Row]:
    """Rows of every launcher but the first of each layout."""
    rows = []
    for layout in layouts:
        by_runtime = {}
        for runtime in REPLAYED[layout]:
            begin = time.monotonic()
            by_runtime[runtime] = replay(recorded, start, layout, runtime, num_steps, runs)
            print(f"{layout} under {runtime}: {time.monotonic() - begin:.0f} s", flush=True)
        first = by_runtime[REPLAYED[layout][0]]
        rows += compare(layout, REPLAYED[layout][0], first, first)
        for runtime in REPLAYED[layout][1:]:
            rows += compare(layout, runtime, by_runtime[runtime], first)
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'layout':<10} {'launcher':<9} {'step':>4} {'loss':>24} {'gradient norm':>24} figures"
    ]
    for row in rows:
        verdict = (
            "the same"
            if not row.different
            else f"{len(row.different)} DIFFER: {', '.join(row.different[:4])}"
        )
        loss = row.shown["actor/loss"]
        norm = row.shown["actor/grad_norm"]
        lines.append(
            f"{row.layout:<10} {row.runtime:<9} {row.step:>4} {loss:>24} {norm:>24}"
            f" {row.num_figures}, {verdict}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launchers", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--record", type=Path, help="run directory of an earlier record; made when left out"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of the loop (%(default)s)")
    parser.add_argument(
        "--layouts", default=",".join(REPLAYED), help="comma-separated (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "launchers.json", help="result file (%(default)s)"
    )
    args = parser.parse_args(argv)
    layouts = args.layouts.split(",")
    if unknown := [name for name in layouts if name not in REPLAYED]:
        raise SystemExit(f"unknown layout {', '.join(unknown)}; known: {', '.join(REPLAYED)}.")
    begin = time.monotonic()
    recorded = (
        args.record.resolve() if args.record else record(CONFIG, "record", (), args.steps, RUNS)
    )
    print(f"record: {recorded} ({time.monotonic() - begin:.0f} s)", flush=True)
    rows = replay_all(recorded, weights(start_weights(recorded)), layouts, args.steps, RUNS)
    print(table(rows))
    misses = sum(bool(row.different) for row in rows)
    seconds = time.monotonic() - begin
    command = " ".join(
        ["python -m benchmarks.launchers", *(sys.argv[1:] if argv is None else argv)]
    )
    result = {
        "num_different": misses,
        "num_figures": sum(row.num_figures for row in rows),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }
    path = write_result(args.out.stem, command, json.loads(json.dumps(result)), args.out.parent)
    print(f"{len(rows)} steps of launchers, {misses} different, {seconds:.0f} s; {path}")
    return 1 if misses or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
