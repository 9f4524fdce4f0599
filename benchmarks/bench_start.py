"""How long `rlhf-megatron train` takes to the first row of a run, which its first optimizer \
step has made.

    python -m benchmarks.bench_start [--tree DIR] [--repeats 3]

The quickstart, with a warm-up that looks at ten samples after its first step. `--tree`: a checkout
of another commit, which runs in turns with this one in the same environment. CPU seconds are those
of all processes of the run until then. Writes benchmarks/results/start.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, Timings, ratios, write_result

SETTINGS = (
    "warmup.max_steps=1",
    "warmup.test_freq=1",
    "warmup.test_samples=10",
    "trainer.total_training_steps=1",
)
FIRST_ROW = b"warm-up "
MAX_RATIO = 0.5


def measure(tree: Path, out: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a start; the run is killed then."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "rlhf_megatron", "train", "configs/quickstart.yaml", *SETTINGS]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"trainer.default_local_dir={out}"],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line.decode())
        if line.startswith(FIRST_ROW):
            break
    else:
        raise SystemExit(f"the run in {tree} ended before its first row:\n{''.join(said)}")
    wall = time.perf_counter() - began
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    # user, system, and both of children that have ended
    cpu = sum(sum(member.cpu_times()[:4]) for member in family)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    trees = {"this": ROOT} | ({"other": args.tree.resolve()} if args.tree else {})
    timings = {name: Timings() for name in trees}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(args.repeats):
            for name, tree in trees.items():
                wall, cpu = measure(tree, Path(directory) / f"{name}{number}")
                timings[name].wall_s.append(wall)
                timings[name].cpu_s.append(cpu)
                print(f"{name}: {wall:.1f} s, {cpu:.1f} s of CPU", flush=True)
    result: dict[str, Any] = {name: timing.summary() for name, timing in timings.items()}
    if args.tree:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=args.tree, capture_output=True, text=True, check=True
        )
        result |= {
            "other_commit": commit.stdout.strip(),
            "ratio": ratios(timings["this"], timings["other"]),
        }
        result["max_ratio"] = MAX_RATIO
    write_result("start", "python -m benchmarks.bench_start", result)


if __name__ == "__main__":
    main()
