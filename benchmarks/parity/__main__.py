"""`python -m benchmarks.parity`: exit code 1 when a figure is over its bar or a cell failed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common import RESULTS, write_result
from benchmarks.parity.cases import DENSE_FAMILIES, EXPERT_FAMILIES, FAMILIES, Recipe, Role
from benchmarks.parity.dumps import ROWS, Dumps, other_than_dumps
from benchmarks.parity.layouts import LAYOUTS, TE
from benchmarks.parity.measure import BAR, Row

ROLES: dict[str, Role] = {"actor": "actor", "critic": "critic"}
GROUPS = {"dense": DENSE_FAMILIES, "experts": EXPERT_FAMILIES}
DUMPS = Path("runs") / "parity"
Value = TypeVar("Value")


def nearest(rows: Iterable[Row], *columns: str) -> list[Row]:
    """Of the rows that agree in `columns`, the one that is nearest to its bar,
    or farthest over it.
    """
    worst: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(getattr(row, column) for column in columns)
        if key not in worst or (row.ok, -_share(row)) < (worst[key].ok, -_share(worst[key])):
            worst[key] = row
    return list(worst.values())


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    wide = [
        max([6, *(len(name) for name in names)])
        for names in ((r.family for r in rows), (r.layout for r in rows))
    ]
    lines = [
        f"{'family':<{wide[0]}} {'layout':<{wide[1]}} {'quantity':<16} {'error':>9} {'float32':>9}"
        f" {'bar':>9}  worst tensor (cut)"
    ]
    for row in rows:
        mark = "" if row.ok else "  OVER THE BAR"
        lines.append(
            f"{row.family:<{wide[0]}} {row.layout:<{wide[1]}} {row.quantity:<16} {row.error:9.2e}"
            f" {row.float32_error:9.2e} {row.bar:9.2e}  {row.tensor} ({row.cut}){mark}"
        )
    return "\n".join(lines)


def shares(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """layout -> family -> quantity -> error as a share of its bar, of the cut and the tensor that
    are nearest to it.
    """
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for row in nearest(rows, "layout", "family", "quantity"):
        cells.setdefault(row.layout, {}).setdefault(row.family, {})[row.quantity] = round(
            _share(row), 3
        )
    return cells


def _share(row: Row) -> float:
    return row.error / row.bar if row.bar else 0.0


def chosen(names: str | None, known: dict[str, Value], what: str) -> dict[str, Value]:
    """The entries that a comma-separated list names; None: all. Raises SystemExit for
    an unknown name.
    """
    picked = names.split(",") if names else list(known)
    unknown = [name for name in picked if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}.")
    return {name: known[name] for name in picked}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity", description="every layout against float64"
    )
    parser.add_argument(
        "--layouts", help=f"comma-separated, of {', '.join(LAYOUTS)}; all when left out"
    )
    every = f"comma-separated, of {', '.join(FAMILIES)}; {' or '.join(GROUPS)}; all when left out"
    parser.add_argument("--families", help=every)
    parser.add_argument(
        "--roles", help=f"comma-separated, of {', '.join(ROLES)}; both when left out"
    )
    parser.add_argument(
        "--max-ranks", type=int, default=8, help="leave out larger layouts (%(default)s)"
    )
    parser.add_argument(
        "--in-turns", action="store_true", help="one family a layout, in place of all"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "parity.json", help="result file (%(default)s)"
    )
    parser.add_argument(
        "--dumps",
        type=Path,
        default=DUMPS,
        help="directory of raw tensors, made anew (%(default)s)",
    )
    parser.add_argument(
        "--adam-eps", type=float, default=Recipe.adam_eps, help="Adam epsilon (%(default)s)"
    )
    args = parser.parse_args(argv)
    layouts = [
        axes
        for axes in chosen(args.layouts, LAYOUTS, "layout").values()
        if axes.num_ranks <= args.max_ranks
    ]
    if args.device == "cuda" and not args.layouts:  # Transformer Engine itself is asked for there
        layouts = [axes for axes in layouts if axes.impl != TE]
    families = GROUPS.get(args.families) or chosen(args.families, FAMILIES, "family")
    roles = chosen(args.roles, ROLES, "role")

    import torch

    from benchmarks.parity.run import run_parity

    torch.set_num_threads(1)
    start = time.monotonic()
    if args.dumps.exists():
        if (other := other_than_dumps(args.dumps)) and args.dumps != DUMPS:
            raise SystemExit(
                f"{args.dumps} holds {other}, which is no dump of this program; name"
                " another directory."
            )
        shutil.rmtree(args.dumps)

    def report(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", flush=True)

    recipe = Recipe(adam_eps=args.adam_eps)
    rows, failures = run_parity(
        list(families),
        layouts,
        list(roles.values()),
        recipe,
        Dumps(args.dumps),
        report,
        device=args.device,
        is_in_turns=args.in_turns,
    )
    print(table(nearest(rows, "layout", "quantity")))
    (args.dumps / ROWS).write_text(
        json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    misses = sum(not row.ok for row in rows)
    result = {
        "measure": (
            "see benchmarks/parity/measure.py; rows: of each layout and quantity the one"
            " nearest to its bar"
        ),
        "reference": (
            "transformers in float64; bar: a multiple of the error of transformers in float32"
        ),
        "bar_factor": BAR,
        "recipe": asdict(recipe),
        "dumps": str(args.dumps),
        "seconds": round(time.monotonic() - start, 1),
        "num_over_the_bar": misses,
        "failures": [asdict(failure) for failure in failures],
        "num_rows": len(rows),
        "shares_of_the_bar": shares(rows),
        "rows": [asdict(row) for row in nearest(rows, "layout", "quantity")],
    }
    command = " ".join(["python -m benchmarks.parity", *(sys.argv[1:] if argv is None else argv)])
    path = write_result(args.out.stem, command, result, args.out.parent)
    seconds = time.monotonic() - start
    cells = len(
        {
            (row.family, row.layout, row.quantity)
            for row in rows
            if row.quantity in ("log_probs", "values")
        }
    )
    print(f"{path}; tensors in {args.dumps}")
    print(
        f"{cells} cells, {len(failures)} more failed; {len(rows)} rows, {misses} over the bar;"
        f" {seconds:.0f} s"
    )
    return 1 if misses or failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
