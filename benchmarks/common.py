"""What every benchmark shares: turns between the measured and its baseline, the machine, and
the result file.

Standard library only, so that a benchmark can start in any environment.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "megatron-core", "transformers", "numpy")


@dataclass
class Timings:
    """Seconds of each repetition of one run. `cpu_s`: of this process, all its threads."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {"wall_s": spread(self.wall_s), "cpu_s": spread(self.cpu_s)}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Minimum, median and all values, rounded to five significant digits."""
    return {
        "min": significant(min(values)),
        "median": significant(statistics.median(values)),
        "values": [significant(value) for value in values],
    }


def significant(value: float) -> float:
    return float(f"{value:.5g}")


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    repetitions: int,
    num_warmups: int = 1,
    finish: Callable[[], None] = int,
) -> dict[str, Timings]:
    """Time every run `repetitions` times, each after the other, so that a busy machine
    hits them alike.

    `finish` waits for what a run has left behind on a device.
    """
    timings = {name: Timings() for name in runs}
    for repetition in range(num_warmups + repetitions):
        for name, run in runs.items():
            wall = time.perf_counter()
            cpu = time.process_time()
            run()
            finish()
            if repetition >= num_warmups:
                timings[name].wall_s.append(time.perf_counter() - wall)
                timings[name].cpu_s.append(time.process_time() - cpu)
    return timings


def ratios(measured: Timings, baseline: Timings) -> dict[str, float]:
    """Seconds of `measured` over seconds of `baseline`: below 1 is faster."""
    return {
        "cpu_min": significant(min(measured.cpu_s) / min(baseline.cpu_s)),
        "cpu_median": significant(
            statistics.median(measured.cpu_s) / statistics.median(baseline.cpu_s)
        ),
        "wall_min": significant(min(measured.wall_s) / min(baseline.wall_s)),
        "wall_median": significant(
            statistics.median(measured.wall_s) / statistics.median(baseline.wall_s)
        ),
    }


def machine() -> dict[str, Any]:
    """Where and when this runs. `load_average`: above the number of cores, others
    were measured too.
    """
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "system": platform.platform(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """None: not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def commit() -> str:
    """Abbreviated git commit, with "+" behind it where tracked files differ from it; "unknown"
    outside of git.
    """
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_result(
    name: str, command: str, result: Mapping[str, Any], directory: Path = RESULTS
) -> Path:
    """`directory`/`name`.json: what was run, where, and the result. Appears by rename
    when complete.
    """
    report = {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **result,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(report, indent=1) + "\n")
    aside.rename(path)
    return path


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
