"""Tests that need a GPU, under a time budget: with pytest in processes that may hang or die,
without it as functions.

Of a process that hangs or dies the tests before count, the running one has failed, and the others
run in a next one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu.children import end_group, environment

TESTS = ROOT / "tests"
MESSAGE_LENGTH = 2000
TEST_LIMIT_S = 90.0  # of one test, and of collecting them
SLOW_PARTS = ("engine", "sharing", "sglang")  # of names of files whose tests start servers
POLL_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """Of one test. `figures`: what it measured."""

    name: str
    outcome: str  # "passed", "failed", "skipped" or "not run"
    seconds: float
    message: str = ""
    figures: dict[str, float | str] = field(default_factory=dict)


def files_with_gpu_tests(directory: Path = TESTS) -> list[Path]:
    """Only these are collected: another test file may import what is not installed here."""
    return sorted(path for path in directory.rglob("test_*.py") if "mark.gpu" in path.read_text())


def is_slow(path: Path) -> bool:
    return any(part in path.name for part in SLOW_PARTS)


def run_pytest(
    files: Sequence[Path],
    arguments: Sequence[str] = ("-m", "gpu"),
    budget_s: float = 300.0,
    test_limit_s: float = TEST_LIMIT_S,
) -> list[Outcome]:
    """Each test of `files` that `arguments` select. A file that cannot be imported counts as
    one failed test.
    """
    deadline = time.monotonic() + budget_s
    outcomes: dict[str, Outcome] = {}
    while True:
        ended = _one_process(files, arguments, tuple(outcomes), deadline, test_limit_s)
        outcomes |= {outcome.name: outcome for outcome in ended.outcomes}
        left = [name for name in ended.collected if name not in outcomes]
        if time.monotonic() >= deadline:
            return [
                *outcomes.values(),
                *(Outcome(name, "not run", 0.0, "the time was up") for name in left),
            ]
        if ended.running is not None:  # it has failed; a next process runs the others
            outcomes[ended.running] = Outcome(ended.running, "failed", ended.seconds, ended.why)
            continue
        if not ended.is_whole:
            outcomes["pytest"] = Outcome("pytest", "failed", ended.seconds, ended.why)
        return list(outcomes.values())


@dataclass(frozen=True)
class _Ended:
    """What one process of pytest told before it ended. `running`: the test that it ended in."""

    outcomes: tuple[Outcome, ...]
    collected: tuple[str, ...]
    running: str | None
    seconds: float  # since its last sign of life
    why: str
    is_whole: bool  # it came to its end by itself


def _one_process(
    files: Sequence[Path],
    arguments: Sequence[str],
    done: Sequence[str],
    deadline: float,
    test_limit_s: float,
) -> _Ended:
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "stream"
        log = Path(folder) / "log"
        left_out = Path(folder) / "done"
        stream.touch()
        left_out.write_text("\n".join(done))
        command = [
            sys.executable,
            "-m",
            "pytest",
            *map(str, files),
            *arguments,
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        command += [
            "-p",
            "benchmarks.gpu.stream_plugin",
            f"--stream={stream}",
            f"--done={left_out}",
        ]
        command += ["--continue-on-collection-errors"]
        with log.open("w") as output:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code, idle = _watch(child, stream, deadline, test_limit_s)
        events = [json.loads(line) for line in stream.read_text().splitlines()]
        tail = log.read_text()[-MESSAGE_LENGTH:]
    found = [Outcome(**event) for event in events if "outcome" in event]
    started = [event["started"] for event in events if "started" in event]
    running = (
        started[-1] if started and started[-1] not in {outcome.name for outcome in found} else None
    )
    return _Ended(
        outcomes=tuple(found),
        collected=tuple(name for event in events for name in event.get("collected", ())),
        running=running,
        seconds=round(idle, 1),
        why=f"not done after {idle:.0f} s"
        if code is None
        else f"the process ended with {code}: {tail}",
        is_whole=running is None
        and code in (0, 1, 2, 5),  # passed, failed, interrupted by import errors, none found
    )


def _watch(
    child: subprocess.Popen[bytes], stream: Path, deadline: float, test_limit_s: float
) -> tuple[int | None, float]:
    """(exit code, None where its time was up; seconds since it last wrote). It has ended, with all
    that it started.
    """
    size = 0
    change = time.monotonic()
    try:
        while child.poll() is None and time.monotonic() < min(deadline, change + test_limit_s):
            time.sleep(POLL_S)
            if stream.stat().st_size != size:
                size, change = stream.stat().st_size, time.monotonic()
        return child.poll(), time.monotonic() - change
    finally:
        end_group(child)


def run_functions(
    checks: Mapping[str, Callable[[], dict[str, float]]], missing: type[Exception]
) -> list[Outcome]:
    """Without pytest: call each check. `missing`:
    what a check raises whose packages are not there.
    """
    outcomes = []
    for name, check in checks.items():
        start = time.perf_counter()
        kind = "passed"
        message = ""
        figures = {}
        try:
            figures = check()
        except missing as error:
            kind = "skipped"
            message = str(error)
        except Exception:  # any failure of a check is its outcome
            kind = "failed"
            message = traceback.format_exc()[-MESSAGE_LENGTH:]
        outcomes.append(
            Outcome(name, kind, round(time.perf_counter() - start, 3), message, dict(figures))
        )
    return outcomes


def run_gpu_checks() -> list[Outcome]:
    """The functions of tests/gpu/gpu_kernel_checks.py and gpu_checks.py, in this process."""
    import torch

    sys.path.insert(0, str(TESTS / "gpu"))
    import gpu_checks
    import gpu_kernel_checks

    device = torch.device("cuda")
    checks: dict[str, Any] = {
        name: lambda check=check: check(device, torch.bfloat16)
        for name, check in {**gpu_kernel_checks.CHECKS, **gpu_checks.CHECKS}.items()
    }
    return run_functions(checks, gpu_checks.MissingPackageError)


def print_outcomes(outcomes: Sequence[Outcome]) -> Counter[str]:
    for outcome in outcomes:
        figures = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float | int) else f"{key} {value}"
            for key, value in outcome.figures.items()
        )
        why = (
            ""
            if outcome.outcome == "passed"
            else (outcome.message.strip().splitlines() or [""])[-1]
        )
        print(f"{outcome.outcome:8} {outcome.seconds:7.2f} s  {outcome.name}  {figures}{why}")
    return Counter(outcome.outcome for outcome in outcomes)
