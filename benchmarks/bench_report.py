"""`rlhf-megatron report` on a run of 500 steps: wall and CPU time of the whole command, \
size of the page.

    python -m benchmarks.bench_report [--steps 500] [--repeats 3]

The run directory is written by benchmarks/synthetic_run.py: a PPO run with a critic, three sources,
six samples a step. Each measurement is a process of its own, with and without the pictures
(matplotlib hidden). The bar is the product's:
the page with pictures in less than 5 s, and below 1 MB. Writes benchmarks/results/report.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, significant, spread, write_result
from benchmarks.synthetic_run import Shape, write_run

MAX_SECONDS = 5.0
MAX_MEGABYTES = 1.0
HIDE = (
    "import sys; sys.modules['matplotlib'] = None; from rlhf_megatron.cli.main import"
    " main; sys.exit(main())"
)
COMMANDS = {"with_pictures": ["-m", "rlhf_megatron"], "page_only": ["-c", HIDE]}


def measure(command: list[str], run_dir: Path, out: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    arguments = [*command, "report", str(run_dir), "--out", str(out), "--open", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "synthetic"
        out = Path(directory) / "report"
        write_run(run_dir, Shape(steps=args.steps, total_steps=args.steps))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
        for _ in range(args.repeats):
            for name, command in COMMANDS.items():
                times[name].append(measure(command, run_dir, out))
        page = significant((out / "index.html").stat().st_size / 1e6)
        pictures = {path.name: path.stat().st_size for path in sorted(out.glob("*.png"))}
        inputs = {path.name: path.stat().st_size for path in sorted(run_dir.iterdir())}
    seconds = {
        name: {
            "wall_s": spread([wall for wall, _ in found]),
            "cpu_s": spread([cpu for _, cpu in found]),
        }
        for name, found in times.items()
    }
    result = {
        "steps": args.steps,
        "seconds": seconds,
        "page_megabytes": page,
        "pictures_bytes": pictures,
        "inputs_bytes": inputs,
        "bars": {"wall_s": MAX_SECONDS, "megabytes": MAX_MEGABYTES},
        "over_bar": {
            "wall time": significant(seconds["with_pictures"]["wall_s"]["min"] / MAX_SECONDS),
            "size of the page": significant(page / MAX_MEGABYTES),
        },
    }
    path = write_result("report", f"python -m benchmarks.bench_report --steps {args.steps}", result)
    for name, found in seconds.items():
        print(f"{name:14} wall {found['wall_s']['min']:.2f} s, CPU {found['cpu_s']['min']:.2f} s")
    print(f"page {page:.2f} MB\nwritten: {path}")


if __name__ == "__main__":
    main()
