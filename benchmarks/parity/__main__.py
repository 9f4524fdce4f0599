"""`python -m benchmarks.parity`: exit code 1 when a figure is over its bar."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common import RESULTS, write_result
from benchmarks.parity.cases import FAMILIES, Recipe
from benchmarks.parity.dumps import Dumps
from benchmarks.parity.layouts import LAYOUTS
from benchmarks.parity.measure import BAR, Row

DUMPS = Path("runs") / "parity"
Value = TypeVar("Value")


def table(rows: Sequence[Row]) -> str:
    """One line a family, layout and quantity: of its cuts, the one nearest to its bar."""
    lines = [
        f"{'family':<13} {'layout':<12} {'quantity':<16} {'error':>9} {'float32':>9} {'bar':>9}  worst tensor (cut)"
    ]
    worst: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.family, row.layout, row.quantity)
        if key not in worst or (row.ok, -_share(row)) < (worst[key].ok, -_share(worst[key])):
            worst[key] = row
    for row in worst.values():
        mark = "" if row.ok else "  OVER THE BAR"
        lines.append(
            f"{row.family:<13} {row.layout:<12} {row.quantity:<16} {row.error:9.2e} {row.float32_error:9.2e}"
            f" {row.bar:9.2e}  {row.tensor} ({row.cut}){mark}"
        )
    return "\n".join(lines)


def _share(row: Row) -> float:
    return row.error / row.bar if row.bar else 0.0


def chosen(names: str | None, known: dict[str, Value], what: str) -> dict[str, Value]:
    """The entries that a comma-separated list names; None: all. Raises SystemExit for an unknown name."""
    picked = names.split(",") if names else list(known)
    unknown = [name for name in picked if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}.")
    return {name: known[name] for name in picked}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description="every layout against float64")
    parser.add_argument("--layouts", help=f"comma-separated, of {', '.join(LAYOUTS)}; all when left out")
    parser.add_argument("--families", help=f"comma-separated, of {', '.join(FAMILIES)}; all when left out")
    parser.add_argument("--out", type=Path, default=RESULTS / "parity.json", help="result file (%(default)s)")
    parser.add_argument("--dumps", type=Path, default=DUMPS, help="directory of raw tensors, made anew (%(default)s)")
    parser.add_argument("--adam-eps", type=float, default=Recipe.adam_eps, help="Adam epsilon (%(default)s)")
    args = parser.parse_args(argv)
    layouts = chosen(args.layouts, LAYOUTS, "layout")
    families = chosen(args.families, FAMILIES, "family")

    import torch

    from benchmarks.parity.run import run_parity

    torch.set_num_threads(1)
    start = time.monotonic()
    if args.dumps.exists():
        if any(args.dumps.iterdir()) and not (args.dumps / "run.json").exists() and args.dumps != DUMPS:
            raise SystemExit(f"{args.dumps} is not empty and holds no dumps of this program; name another directory.")
        shutil.rmtree(args.dumps)

    def report(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", flush=True)

    recipe = Recipe(adam_eps=args.adam_eps)
    rows = run_parity(list(families), list(layouts.values()), recipe, Dumps(args.dumps), report)
    print(table(rows))
    misses = sum(not row.ok for row in rows)
    result = {
        "measure": "see benchmarks/parity/measure.py",
        "reference": "transformers in float64; bar: a multiple of the error of transformers in float32",
        "bar_factor": BAR,
        "recipe": asdict(recipe),
        "dumps": str(args.dumps),
        "seconds": round(time.monotonic() - start, 1),
        "num_over_the_bar": misses,
        "rows": [asdict(row) for row in rows],
    }
    command = " ".join(["python -m benchmarks.parity", *(sys.argv[1:] if argv is None else argv)])
    path = write_result(args.out.stem, command, result, args.out.parent)
    print(f"{len(rows)} rows, {misses} over the bar, {time.monotonic() - start:.0f} s; {path}; tensors in {args.dumps}")
    return 1 if misses or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
