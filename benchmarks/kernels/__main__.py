"""The kernels on a CPU, against what they are to beat: `make bench-kernels`.

    python -m benchmarks.kernels [--quick] [--only C1 C7 ...] [--repeats N] [--out FILE]

A case is one file of this folder with a constant CASE. Each runs in a process of its own, forked
from this one, with one thread; it measures its baselines in the same run. Ratios are ours over the
baseline. Prints a table with the bars. A run of all cases at full size writes
benchmarks/results/kernels_cpu.json; any other writes only where --out says. --quick: small sizes,
which show that everything runs; their ratios say little, so only bars on errors and counts hold.

Exit code 1 when a case fails or misses a bar. Full size: some eight minutes on a quiet machine,
6 GB of memory.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["OMP_WAIT_POLICY"] = "passive"

import argparse
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks import kernels
from benchmarks.common import RESULTS, write_result
from benchmarks.kernels.case import Case, CaseResult
from benchmarks.kernels.measure import REPEATS_VARIABLE, in_child
from benchmarks.kernels.report import HEAD, Outcome, as_json, lines_of

FULL_TIMEOUT_S = 1800.0
QUICK_TIMEOUT_S = 240.0


def find_cases() -> tuple[list[Case], list[Outcome]]:
    """All cases in order of their numbers, and a failure for each file that cannot be imported."""
    cases = []
    broken = []
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.name == "__main__":
            continue
        try:
            case = getattr(
                importlib.import_module(f"benchmarks.kernels.{module.name}"), "CASE", None
            )
        except Exception as error:  # one broken file must not hide the other cases
            message = f"{type(error).__name__}: {error}"
            broken.append(
                Outcome(
                    "?",
                    f"benchmarks/kernels/{module.name}.py cannot be imported",
                    0.0,
                    None,
                    message,
                )
            )
            continue
        if case is not None:
            cases.append(case)
    return sorted(cases, key=lambda case: int(case.name.lstrip("C"))), broken


def run_cases(cases: Iterable[Case], is_quick: bool) -> Iterable[Outcome]:
    """One outcome a case, as they end."""
    for case in cases:
        start = time.perf_counter()
        result = None
        error = ""
        try:
            result = in_child(
                _run, QUICK_TIMEOUT_S if is_quick else FULL_TIMEOUT_S, case=case, is_quick=is_quick
            )
        except RuntimeError as problem:
            error = str(problem)
        yield Outcome(case.name, case.what, time.perf_counter() - start, result, error)


def _run(case: Case, is_quick: bool) -> CaseResult:
    torch.set_num_threads(1)
    return case.run(is_quick)


def select(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    known = [case.name for case in cases]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; there are {', '.join(known)}.")
    return [case for case in cases if not names or case.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, half a minute; timings have no bars"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="C1 C7 ...")
    parser.add_argument(
        "--repeats", type=int, help="the most rounds of a comparison; 5 unless given"
    )
    parser.add_argument(
        "--out", type=Path, help="result file; needed for a part of the cases and for --quick"
    )
    args = parser.parse_args(arguments)
    if args.repeats is not None:
        os.environ[REPEATS_VARIABLE] = str(args.repeats)
    cases, broken = find_cases()
    chosen = select(cases, args.only)
    print(HEAD)
    outcomes = list(broken)
    for outcome in broken:
        print("\n".join(lines_of(outcome)))
    for outcome in run_cases(chosen, args.quick):
        outcomes.append(outcome)
        print("\n".join(lines_of(outcome)), flush=True)
        if outcome.error:
            print(outcome.error, file=sys.stderr)
    is_whole = not args.quick and not args.only
    path = args.out or (RESULTS / "kernels_cpu.json" if is_whole else None)
    if path:
        flags = [
            *(["--quick"] if args.quick else []),
            *(["--only", *args.only] if args.only else []),
        ]
        flags += ["--repeats", str(args.repeats)] if args.repeats is not None else []
        command = " ".join(["python -m benchmarks.kernels", *flags])
        write_result(
            path.stem, command, {"is_quick": args.quick, "cases": as_json(outcomes)}, path.parent
        )
        print(f"written: {path}")
    num_bad = sum(not outcome.is_good for outcome in outcomes)
    print(f"{len(outcomes) - num_bad} of {len(outcomes)} cases good")
    return 1 if num_bad else 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)
