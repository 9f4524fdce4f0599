"""All benchmarks, one after the other, and one table of their ratios. `make bench`.

    python -m benchmarks.run_all [--only NAME ...] [--table]

Each is a program of its own whose results lie in benchmarks/results/; --table prints the table of
what lies there and measures nothing. A ratio is ours over the baseline: below 1 is faster, or
smaller. Exit code 1 when a benchmark fails or misses its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT
from benchmarks.kernels.case import Figure
from benchmarks.kernels.report import figures_of


@dataclass(frozen=True)
class Row:
    """One line of the table. `bar`: the largest ratio that is good enough; None: it is
    only reported.
    """

    what: str
    ratio: float
    bar: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """`rows` reads the result file benchmarks/results/`result`.json."""

    module: str
    result: str
    baseline: str
    rows: Callable[[Mapping[str, Any]], list[Row]]
    arguments: tuple[str, ...] = ()


def engine_rows(result: Mapping[str, Any]) -> list[Row]:
    return [
        Row(f"{name}, wall time", 1 / row["speedup"], 1.0)
        for name, row in result["workloads"].items()
    ]


def kernel_rows(result: Mapping[str, Any]) -> list[Row]:
    """Of each case the figure that is nearest to its bar, or furthest over it, as a
    share of the bar.
    """
    return [
        Row(
            f"{name} {case['what']}"[:60],
            max([0.0, *map(over_bar, figures_of(case))]) if not case["error"] else inf,
            1.0,
        )
        for name, case in result["cases"].items()
    ]


def over_bar(figure: Figure) -> float:
    """1 at the bar, above 1 beyond it; 0 without one."""
    if figure.bar is None or figure.value == figure.bar:
        return 1.0 if figure.bar else 0.0
    above, below = (
        (figure.bar, figure.value) if figure.is_more_better else (figure.value, figure.bar)
    )
    share = above / below if below else inf
    return share if share == share else inf  # not a number is no good


def update_rows(result: Mapping[str, Any]) -> list[Row]:
    return [Row(f"{name}, CPU time", ratio, 1.0) for name, ratio in result["ratio"].items()]


def step_rows(result: Mapping[str, Any]) -> list[Row]:
    rows = [
        Row(f"{name}, wall time", ratio["median"]) for name, ratio in result["ratio_by_run"].items()
    ]
    rows.append(Row("the better of them", result["ratio"], 1.0))
    cpu_s = result.get("cpu_s_per_step", {})
    for name in ("ours_dp2", "ours_dp2_shared"):
        if {name, "trl_dp2"} <= cpu_s.keys():
            rows.append(
                Row(
                    f"{name}, CPU time, over TRL's two processes",
                    cpu_s[name] / cpu_s["trl_dp2"],
                    0.75,
                )
            )
    return rows


def sync_rows(result: Mapping[str, Any]) -> list[Row]:
    return [Row(f"{name}, wall time", ratio) for name, ratio in result["ratio"].items()]


def receipt_rows(result: Mapping[str, Any]) -> list[Row]:
    """What lies in a cache is copied faster than anything is digested: it has no bar."""
    return [
        Row(f"{name}, CPU time", ratio, None if name.endswith("cache") else 2.0)
        for name, ratio in result["ratio"].items()
    ]


def reward_rows(result: Mapping[str, Any]) -> list[Row]:
    """Hangs that burn a CPU cost their limit on a core each, whoever measures: they have no bar."""
    return [
        Row(f"{name}, wall time", row["ratio"], None if row["is_burning"] else 1.3)
        for name, row in result["workloads"].items()
    ]


def report_rows(result: Mapping[str, Any]) -> list[Row]:
    return [
        Row(f"{result['steps']} steps, {name}", ratio, 1.0)
        for name, ratio in result["over_bar"].items()
    ]


BENCHMARKS = {
    "local_engine": Benchmark(
        "benchmarks.bench_local_engine",
        "local_engine",
        "transformers' batched generate",
        engine_rows,
    ),
    "kernels": Benchmark("benchmarks.kernels", "kernels_cpu", "the bar of each case", kernel_rows),
    "actor_update": Benchmark(
        "benchmarks.bench_actor_update",
        "actor_update",
        "a plain transformers + torch loop",
        update_rows,
    ),
    "weight_sync": Benchmark(
        "benchmarks.bench_weight_sync", "weight_sync", "a copy of the same bytes", sync_rows
    ),
    "receipt": Benchmark(
        "benchmarks.bench_receipt", "receipt", "a copy of the same bytes", receipt_rows
    ),
    "grpo_step": Benchmark(
        "benchmarks.bench_grpo_step", "grpo_step", "TRL's GRPOTrainer", step_rows
    ),
    "grpo_step_long": Benchmark(
        "benchmarks.bench_grpo_step",
        "grpo_step_long",
        "TRL's GRPOTrainer",
        step_rows,
        ("--shape", "long"),
    ),
    "grpo_step_smollm2": Benchmark(
        "benchmarks.bench_grpo_step",
        "grpo_step_smollm2",
        "TRL's GRPOTrainer",
        step_rows,
        ("--shape", "smollm2"),
    ),
    "rewards": Benchmark(
        "benchmarks.bench_rewards", "rewards", "the batch without its 3 % bad samples", reward_rows
    ),
    "report": Benchmark("benchmarks.bench_report", "report", "the bars: 5 s and 3 MB", report_rows),
}


def read_rows(benchmark: Benchmark, directory: Path = RESULTS) -> list[Row] | None:
    """None: there is no result file."""
    path = directory / f"{benchmark.result}.json"
    return benchmark.rows(json.loads(path.read_text())) if path.is_file() else None


def print_table(names: list[str], directory: Path = RESULTS) -> bool:
    """False when a row is over its bar or a result is missing."""
    is_good = True
    print(f"\n{'benchmark':14}{'what':62}{'ours / baseline':>16}{'bar':>7}   baseline")
    for name in names:
        rows = read_rows(BENCHMARKS[name], directory)
        if rows is None:
            is_good = False
            print(f"{name:14}no result")
            continue
        for row in rows:
            is_met = row.bar is None or row.ratio <= row.bar
            is_good &= is_met
            bar = "-" if row.bar is None else f"{row.bar:g}"
            print(
                f"{name:14}{row.what:62}{row.ratio:16.3f}{bar:>7}   {BENCHMARKS[name].baseline}"
                f"{'' if is_met else '   OVER THE BAR'}"
            )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument(
        "--table", action="store_true", help="print what was measured before; measure nothing"
    )
    args = parser.parse_args()
    failed = []
    for name in [] if args.table else args.only:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", BENCHMARKS[name].module, *BENCHMARKS[name].arguments]
        if subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode:
            failed.append(name)
    is_good = print_table(args.only)
    for name in failed:
        print(f"{name} FAILED; its row, if there is one, is of an earlier run")
    return 0 if is_good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
