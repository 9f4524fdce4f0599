"""`python -m benchmarks.chaos`: the matrix of faults, each case against a run that was left alone.

    make chaos                                            # all cases; about an hour on two cores
    python -m benchmarks.chaos --layout inline            # one process a run: a few minutes
    python -m benchmarks.chaos --only ckpt kill_rank1     # cases whose name has one of these
    python -m benchmarks.chaos --list

Results: benchmarks/results/chaos.json. The exit code is 1 when a case fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos import cases, relayout
from benchmarks.chaos.matrix import Outcome, run_case, signal_name, undisturbed
from benchmarks.chaos.task import write_task
from benchmarks.common import RESULTS, ROOT, write_result

DIRECTORY = ROOT / "runs" / "chaos"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PATTERN", help="parts of names, or shell patterns"
    )
    parser.add_argument("--layout", nargs="*", default=[], choices=("inline", "tp2", "tp2_pp2"))
    parser.add_argument("--list", action="store_true", help="name the cases and do nothing")
    parser.add_argument(
        "--directory", type=Path, default=DIRECTORY, help="of the runs (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "chaos.json", help="result file (%(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    chosen = cases.choose(args.only, args.layout)
    moves = (
        [move for move in relayout.MOVES if cases.fits(move.name, args.only)]
        if not args.layout
        else []
    )
    if args.list or not chosen + moves:
        lines = [f"{case.name:<52} {case.plan}" for case in chosen] + [move.name for move in moves]
        print("\n".join(lines) or "no case has such a name; see --list")
        return 0 if lines else 2
    start = time.monotonic()
    directory = args.directory.resolve()
    config = write_task(directory)
    references: dict[str, Path] = {}
    outcomes: list[Outcome] = []
    for case in chosen:
        outcome = _run(case, config, references, directory)
        outcomes.append(outcome)
        print(line(outcome, len(outcomes), len(chosen)), flush=True)
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    relayouts = _relayouts(moves, directory)
    failed += sum(not all(figure["ok"] for figure in row["figures"]) for row in relayouts)
    result = {
        "num_cases": len(outcomes) + len(relayouts),
        "num_failed": failed,
        "num_points": len({case.plan.partition("@")[2].partition(":")[0] for case in chosen}),
        "seconds": round(time.monotonic() - start, 1),
        "cases": [asdict(outcome) for outcome in outcomes],
        "relayouts": relayouts,
    }
    command = " ".join(["python -m benchmarks.chaos", *(sys.argv[1:] if argv is None else argv)])
    path = write_result(args.out.stem, command, result, args.out.parent)
    print(f"{result['num_cases']} cases, {failed} failed, {result['seconds']:.0f} s; {path}")
    return 1 if failed else 0


def _run(case: cases.Case, config: Path, references: dict[str, Path], directory: Path) -> Outcome:
    """The case, after the undisturbed run of its layout and settings where that
    has not been made.
    """
    shared = {key: value for key, value in case.settings.items() if key in cases.REFERENCE_SETTINGS}
    key = f"{case.layout}{json.dumps(shared, sort_keys=True) if shared else ''}"
    if key not in references:
        place = directory / f"undisturbed{len(references)}_{case.layout}"
        references[key] = undisturbed(config, case.layout, place, shared)
    return run_case(case, config, references[key], directory / case.name.replace("/", "."))


def _relayouts(moves: list[relayout.Move], directory: Path) -> list[dict[str, Any]]:
    """A row each; warm worker processes are shared."""
    rows = []
    pool = relayout.DistPool()
    try:
        for move in moves:
            figures = relayout.run_move(pool, move, directory / "relayout")
            rows.append(relayout.as_row(move, figures))
            shown = ", ".join(
                f"{f.where}: {f.error / f.bar:.2f} of the bar ({f.tensor})" for f in figures
            )
            print(
                f"{'ok' if all(f.is_ok for f in figures) else 'FAIL':<4} {move.name}: {shown}",
                flush=True,
            )
    finally:
        pool.close()
    return rows


def line(outcome: Outcome, number: int, count: int) -> str:
    """A case for people."""
    codes = " ".join(map(signal_name, outcome.exit_codes))
    mark = "ok  " if not outcome.problems else "FAIL"
    text = f"{number:>3}/{count} {mark} {outcome.name:<50} {outcome.seconds:6.1f} s, exits {codes}"
    return text + "".join(
        f"\n          {words}" for problem in outcome.problems for words in problem.splitlines()
    )


if __name__ == "__main__":
    sys.exit(main())
