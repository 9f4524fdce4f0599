"""All tests that need CUDA, and the kernels' benchmarks on it: `make gpu-check`, with the system's
Python and torch.

    python -m benchmarks.gpu_check [--part 1|2] [--only tests G1 ...] [--budget-s 570] [--output
        DIR] [--commit NAME]

Part 1: the tests of kernels and training, then G1 to G9. Part 2: G10, G11, the tests that start
servers, whole runs of `train` against the same on the CPU (tools/cuda_rehearsal/cases.py), and the
bundled engine's benchmark. Without --part both, one after the other; each takes `budget-s` seconds
at most, and what does not fit is named. Installs nothing and needs no network: megatron-core,
msgspec, transformers, liger-kernel and cut-cross-entropy may come as wheels on PYTHONPATH; what
needs a missing one is skipped by name.

Prints one line a test and a figure, and writes
benchmarks/results/gpu_check-<date>-<commit>[-part<n>].json after each of them: device, clocks and
power, versions, outcomes, figures with their bars. --quick: tiny sizes, on a CPU too.

Exit code 1 when a test failed or a case broke; a bar that is missed is reported, not an error.
Without a CUDA device it says so, writes nothing, and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, commit, versions, write_result
from benchmarks.gpu.children import CASES, environment, num_missed, run_case, run_group
from benchmarks.gpu.published import PUBLISHED

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformers",
    "numpy",
    "pytest",
    "liger-kernel",
    "cut-cross-entropy",
    "transformer-engine",
)
PARTS = {
    1: ("tests", "G1", "G2", "G3", "G4", "G6", "G8", "G9", "G5", "G7"),
    2: ("G10", "G11", "slow-tests", "runs", "local-engine"),
}
TESTS_BUDGET_S = 170.0
SLOW_TESTS_BUDGET_S = 150.0
ENGINE_BUDGET_S = 200.0
RUNS_BUDGET_S = 240.0
CORES_PER_RUN = 3  # trainer, engine, controller
LEAST_S = 15.0  # less time than this is no time for another process


class Check:
    """One part's result file, written again after each of its steps."""

    def __init__(self, part: int | None, name: str | None, directory: Path, is_quick: bool) -> None:
        from benchmarks.gpu.device_state import describe_device, device_state

        self.commit = name or commit().rstrip("+")
        self.file = f"gpu_check-{time.strftime('%Y-%m-%d', time.gmtime())}-{self.commit}"
        self.file += f"-part{part}" if part is not None else ""
        self.directory = directory
        before = self._of_today(is_quick)  # steps that are not taken again stay
        self.result: dict[str, Any] = {
            "commit": self.commit,  # of the sources, where these came without their history
            "device": describe_device(),
            "device_state": {"before": device_state()},
            "gpu_versions": versions(PACKAGES),
            "is_quick": is_quick,
            "counts": before.get("counts", {}),
            "tests": before.get("tests", []),
            "cases": before.get("cases", {}),
            "published": PUBLISHED,
        }

    def _of_today(self, is_quick: bool) -> dict[str, Any]:
        """What this file has of the same sources already."""
        path = self.directory / f"{self.file}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found if found.get("is_quick") == is_quick else {}

    def write(self) -> Path:
        return write_result(
            self.file, "python -m benchmarks.gpu_check", self.result, self.directory
        )

    @property
    def has_failed(self) -> bool:
        broken = [case for case in self.result["cases"].values() if case["outcome"] == "failed"]
        broken += [row for row in self.result.get("runs", ()) if row.get("problems")]
        return bool(
            broken
            or self.result["counts"].get("failed")
            or "failed" in self.result.get("local_engine", {})
        )


def run_part(check: Check, steps: Sequence[str], budget_s: float, is_quick: bool) -> None:
    deadline = time.monotonic() + budget_s
    for step in steps:
        left_s = deadline - time.monotonic()
        print(f"{step}  ({left_s:.0f} s left)", flush=True)
        if left_s < LEAST_S:
            check.result.setdefault("out_of_time", []).append(step)
            print("  left out: the time is up")
        elif step in CASES:
            check.result["cases"][step] = run_case(
                step, min(CASES[step].budget_s, left_s), is_quick
            )
        elif step == "runs":
            check.result["runs"] = run_runs(min(RUNS_BUDGET_S, left_s))
        elif step == "local-engine":
            check.result["local_engine"] = run_local_engine(min(ENGINE_BUDGET_S, left_s))
        else:
            limit_s = TESTS_BUDGET_S if step == "tests" else SLOW_TESTS_BUDGET_S
            add_tests(check, is_slow_wanted=step == "slow-tests", budget_s=min(limit_s, left_s))
        check.write()


def add_tests(check: Check, is_slow_wanted: bool, budget_s: float) -> None:
    from benchmarks.gpu import gpu_tests

    if find_spec("pytest") is not None:
        files = [
            file
            for file in gpu_tests.files_with_gpu_tests()
            if gpu_tests.is_slow(file) == is_slow_wanted
        ]
        outcomes = gpu_tests.run_pytest(files, budget_s=budget_s)
    else:
        outcomes = [] if is_slow_wanted else gpu_tests.run_gpu_checks()
    gpu_tests.print_outcomes(outcomes)
    names = {outcome.name for outcome in outcomes}
    tests = [test for test in check.result["tests"] if test["name"] not in names]
    check.result["tests"] = [*tests, *(asdict(outcome) for outcome in outcomes)]
    check.result["counts"] = dict(Counter(test["outcome"] for test in check.result["tests"]))


def run_local_engine(budget_s: float) -> dict[str, Any]:
    """The local engine against transformers on the GPU; {"skipped": why} where it cannot run."""
    missing = [name for name in ("transformers", "numpy") if find_spec(name) is None]
    if missing:
        return {"skipped": f"needs {', '.join(missing)}"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "local_engine.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.bench_local_engine",
            "--device",
            "cuda",
            "--dtype",
            "bfloat16",
        ]
        try:
            done = subprocess.run(
                [*command, "--output", str(output)],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=budget_s,
            )
        except subprocess.TimeoutExpired:
            return {"out of time": f"not done after {budget_s:.0f} s"}
        if done.returncode:
            return {"failed": done.stderr[-2000:]}
        print(done.stdout, end="")
        return json.loads(output.read_text())


def run_runs(budget_s: float) -> list[dict[str, Any]]:
    """Whole runs on the machine's GPUs: a row a case, with its difference to the CPU."""
    missing = [
        name
        for name in ("megatron", "transformers", "aiohttp", "msgspec")
        if find_spec(name) is None
    ]
    if missing:
        return [{"skipped": f"needs {', '.join(missing)}"}]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runs.json"
        command = [
            sys.executable,
            "-m",
            "tools.cuda_rehearsal",
            "--on-gpus",
            "--jobs",
            str(max(1, (os.cpu_count() or 1) // 3)),
        ]
        code = run_group([*command, "--out", folder, "--json", str(output)], budget_s)
        rows: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    return (
        rows if code is not None else [*rows, {"out of time": f"not done after {budget_s:.0f} s"}]
    )


def summarise(check: Check) -> None:
    """The last lines: what is asked first."""
    for name, case in check.result["cases"].items():
        figures = [figure for figure in case["figures"] if figure["bar"] is not None]
        print(f"{name:4} {case['what']}: {case['outcome']}, {case['seconds']:.0f} s")
        for figure in figures:
            sign = ">=" if figure["is_more_better"] else "<="
            verdict = "met" if figure["is_met"] else "NOT MET"
            bar = f"{sign} {figure['bar']:g}"
            print(
                f"       {figure['what']:62} {figure['value']:>10g} {figure['unit']:9} bar"
                f" {bar}: {verdict}"
            )
        for kind in ("failed", "skipped"):
            for what, why in case["details"].get(kind, {}).items():
                print(f"       {kind}: {what}: {last_line(why)}")
    for test in check.result["tests"]:
        if test["outcome"] in ("failed", "not run"):
            print(f"{test['outcome']}: {test['name']}: {last_line(test['message'])}")
    for row in check.result.get("runs", ()):
        words = (
            "; ".join(last_line(problem) for problem in row.get("problems", ())) or "as on the CPU"
        )
        print(f"run {row['name']}: {words}" if "name" in row else f"runs: {row}")
    counts = ", ".join(f"{number} {kind}" for kind, number in check.result["counts"].items())
    left_out = ", ".join(check.result.get("out_of_time", ())) or "nothing"
    print(
        f"tests: {counts or 'none'}; bars missed: {num_missed(check.result['cases'])}; left"
        f" out: {left_out}"
    )
    print(check.write())


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def has_device() -> bool:
    """Says what is missing where there is none."""
    if find_spec("torch") is None:
        word = "a" if Path("/dev/nvidia0").exists() else "no"
        print(f"gpu-check: {word} CUDA device, and {sys.executable} has no torch; nothing was run.")
        print("Set PYTHON to the interpreter that has it: make gpu-check PYTHON=/path/to/python3")
        return False
    import torch

    if not torch.cuda.is_available():
        print(
            f"gpu-check: no CUDA device (torch {torch.__version__}); nothing was run, nothing"
            " was written."
        )
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = tuple(step for part in PARTS.values() for step in part)
    parser.add_argument("--part", type=int, choices=tuple(PARTS))
    parser.add_argument(
        "--only", nargs="+", choices=steps, default=None, metavar="STEP", help=", ".join(steps)
    )
    parser.add_argument("--budget-s", type=float, default=570.0, help="of a part, seconds")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="directory of the result files"
    )
    parser.add_argument("--commit", help="name of the sources, where their history is not at hand")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, on a CPU too: shows that everything runs"
    )
    args = parser.parse_args(arguments)
    if not args.quick and not has_device():
        return 1 if find_spec("torch") is None and Path("/dev/nvidia0").exists() else 0
    has_failed = False
    for part in [args.part] if args.part else list(PARTS):
        chosen = [step for step in PARTS[part] if args.only is None or step in args.only]
        if not chosen:
            continue
        check = Check(part, args.commit, args.output, args.quick)
        run_part(check, chosen, args.budget_s, args.quick)
        summarise(check)
        has_failed |= check.has_failed
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
