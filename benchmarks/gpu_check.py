"""All tests that need CUDA, and the engine benchmark on it: `make gpu-check`, with the system's Python and torch.

    python -m benchmarks.gpu_check [--skip-benchmarks]

Installs nothing and needs no network. megatron-core may come as a wheel on PYTHONPATH; a check whose packages are
missing is skipped, by name. With pytest every test marked `gpu` runs (those in tests/gpu and the ones beside the other
tests); without it the functions of tests/gpu/gpu_checks.py run by themselves. Prints one line a test and writes
benchmarks/results/gpu_check-<date>-<commit>.json: device, versions, and per test outcome, seconds and figures.

Exit code 1 when a test failed. Without a CUDA device it says so, writes nothing, and exits with 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, commit, versions, write_result

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "numpy", "pytest")
TESTS = ROOT / "tests"
MESSAGE_LENGTH = 2000
BENCHMARK_TIMEOUT_S = 300


@dataclass(frozen=True)
class Outcome:
    """Of one test. `figures`: what it measured."""

    name: str
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float
    message: str = ""
    figures: dict[str, float | str] = field(default_factory=dict)


def files_with_gpu_tests(directory: Path = TESTS) -> list[Path]:
    """Only these are collected: another test file may import what is not installed here."""
    return sorted(path for path in directory.rglob("test_*.py") if "mark.gpu" in path.read_text())


def run_pytest(files: list[Path], arguments: tuple[str, ...] = ("-m", "gpu")) -> list[Outcome]:
    """Each test of `files` that `arguments` select. A file that cannot be imported counts as one failed test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *map(str, files), *arguments, "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "--continue-on-collection-errors"]
        code = subprocess.run(command, cwd=ROOT, env=environment()).returncode
        if not report.is_file():
            raise RuntimeError(f"pytest exited with {code} and wrote no report: {' '.join(command)}")
        return read_report(report)


def read_report(path: Path) -> list[Outcome]:
    """The outcomes in a junit file."""
    return [_outcome(case) for case in ElementTree.parse(path).getroot().iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::")
    kind, message = "passed", ""
    for tag, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        found = case.find(tag)
        if found is not None:
            kind, message = word, f"{found.get('message') or ''}\n{found.text or ''}".strip()[-MESSAGE_LENGTH:]
    figures = {str(item.get("name")): _number(item.get("value") or "") for item in case.iter("property")}
    return Outcome(name, kind, float(case.get("time") or 0), message, figures)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def run_functions(checks: Mapping[str, Callable[[], dict[str, float]]], missing: type[Exception]) -> list[Outcome]:
    """Without pytest: call each check. `missing`: what a check raises whose packages are not there."""
    outcomes = []
    for name, check in checks.items():
        start = time.perf_counter()
        kind, message, figures = "passed", "", {}
        try:
            figures = check()
        except missing as error:
            kind, message = "skipped", str(error)
        except Exception:  # any failure of a check is its outcome
            kind, message = "failed", traceback.format_exc()[-MESSAGE_LENGTH:]
        outcomes.append(Outcome(name, kind, round(time.perf_counter() - start, 3), message, dict(figures)))
    return outcomes


def run_gpu_checks() -> list[Outcome]:
    import torch

    sys.path.insert(0, str(TESTS / "gpu"))
    import gpu_checks

    device = torch.device("cuda")
    checks = {
        name: lambda check=check: check(device, torch.bfloat16)  # type: ignore[misc]
        for name, check in gpu_checks.CHECKS.items()
    }
    return run_functions(checks, gpu_checks.MissingPackageError)


def run_benchmark() -> dict[str, Any]:
    """The local engine against transformers on the GPU; {"skipped": why} where it cannot run."""
    missing = [name for name in ("transformers", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return {"skipped": f"needs {', '.join(missing)}"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "local_engine.json"
        command = [sys.executable, "-m", "benchmarks.bench_local_engine", "--device", "cuda", "--dtype", "bfloat16"]
        try:
            done = subprocess.run(
                [*command, "--output", str(output)],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=BENCHMARK_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {BENCHMARK_TIMEOUT_S} s"}
        if done.returncode:
            return {"failed": done.stderr[-MESSAGE_LENGTH:]}
        print(done.stdout, end="")
        return json.loads(output.read_text())


def environment() -> dict[str, str]:
    """Children find the package and what lies on this process's path, without an installation."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def describe_device() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def print_outcomes(outcomes: list[Outcome]) -> Counter[str]:
    for outcome in outcomes:
        figures = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float | int) else f"{key} {value}"
            for key, value in outcome.figures.items()
        )
        why = "" if outcome.outcome == "passed" else outcome.message.strip().splitlines()[-1:]
        print(f"{outcome.outcome:8} {outcome.seconds:7.2f} s  {outcome.name}  {figures}{why or ''}")
    return Counter(outcome.outcome for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-benchmarks", action="store_true")
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        has_device = Path("/dev/nvidia0").exists()
        print(
            f"gpu-check: {'a' if has_device else 'no'} CUDA device, and {sys.executable} has no torch; nothing was run."
        )
        print("Set PYTHON to the interpreter that has it: make gpu-check PYTHON=/path/to/python3")
        return 1 if has_device else 0
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: no CUDA device (torch {torch.__version__}); nothing was run, nothing was written.")
        return 0
    has_pytest = importlib.util.find_spec("pytest") is not None
    outcomes = run_pytest(files_with_gpu_tests()) if has_pytest else run_gpu_checks()
    counts = print_outcomes(outcomes)
    benchmark = {"skipped": "--skip-benchmarks"} if args.skip_benchmarks else run_benchmark()
    result = {
        "device": describe_device(),
        "gpu_versions": versions(PACKAGES),
        "runner": "pytest" if has_pytest else "functions",
        "counts": {kind: counts[kind] for kind in ("passed", "failed", "skipped")},
        "tests": [asdict(outcome) for outcome in outcomes],
        "local_engine": benchmark,
    }
    name = f"gpu_check-{time.strftime('%Y-%m-%d', time.gmtime())}-{commit().rstrip('+')}"
    path = write_result(name, "python -m benchmarks.gpu_check", result)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped: {path}")
    return 1 if counts["failed"] or not counts["passed"] or "failed" in benchmark else 0


if __name__ == "__main__":
    sys.exit(main())
