"""A measured curve on the quickstart's task for every algorithm, three seeds each.

    python -m benchmarks.algorithm_curves [--only NAME ...] [--seeds 1 2 3] [--steps 50] [--jobs 1]
    python -m benchmarks.algorithm_curves --draw    # figure and table of the page, from
                                                    the result file

For each seed the policy is warmed up once, as in configs/quickstart.yaml, and every algorithm
starts from these weights (benchmarks/algorithm_families.py has their settings). A finished run is a
line of runs/algorithm_curves/runs.jsonl and is not made again: what was interrupted goes on where
it stopped. At the end, or with --collect, what there is goes to
benchmarks/results/algorithm_curves.json. Exit code 1 when a run failed. The page
is docs/algorithms/curves.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.algorithm_families import BASE, TRAINING, Member, members
from benchmarks.common import ROOT, commit, machine, significant, versions, write_result

RUNS = ROOT / "runs" / "algorithm_curves"
RESULT = "algorithm_curves"
LIMIT_S = 3600  # of one run


@dataclass(frozen=True)
class Job:
    member: Member
    seed: int
    steps: int
    runs: Path


def train(config: str, name: str, runs: Path, overrides: Sequence[str]) -> Path:
    """The run's directory. Raises RuntimeError when it fails or takes over LIMIT_S."""
    words = [
        *overrides,
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={runs}",
        "trainer.save_last=none",
    ]
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.run(
            [sys.executable, "-m", "rlhf_megatron", "train", f"configs/{config}.yaml", *words],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        ).returncode
    if code:
        raise RuntimeError(f"{name} exited with {code}; see {log}")
    return runs / name


def warm_model(seed: int, runs: Path) -> Path:
    """The weights of a seed, warmed up if they are not there yet."""
    name = f"warm-seed{seed}"
    if not (runs / name / "summary.json").exists():
        words = [*BASE, f"trainer.seed={seed}", f"model.init_seed={seed}", "warmup.save_hf=true"]
        train("quickstart", name, runs, [*words, "trainer.total_training_steps=1"])
    return runs / name / "warm_model"


def overrides_of(job: Job) -> list[str]:
    return [
        *BASE,
        *TRAINING,
        *job.member.overrides,
        f"model.path={job.runs / f'warm-seed{job.seed}' / 'warm_model'}",
        f"trainer.seed={job.seed}",
        f"trainer.total_training_steps={job.steps}",
    ]


def run(job: Job) -> dict[str, Any]:
    """One run, as a line of runs.jsonl."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_dir = train(
        "quickstart_warm", f"{job.member.name}-seed{job.seed}", job.runs, overrides_of(job)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**row_of(job, run_dir), "cpu_s": significant(cpu_s)}


def row_of(job: Job, run_dir: Path) -> dict[str, Any]:
    """Curves of a finished run, of the share of right answers: rewards beside exact_match weigh
    0 in the score.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracy = [
        [row["step"], significant(row["val/accuracy"])]
        for row in rows
        if row["kind"] == "evaluation"
    ]
    reward = [significant(row["reward/part/exact_match"]) for row in rows if row["kind"] == "step"]
    return {
        "name": job.member.name,
        "seed": job.seed,
        "steps": job.steps,
        "overrides": list(job.member.overrides),
        "accuracy": accuracy,
        "reward": reward,
        "seconds": json.loads((run_dir / "summary.json").read_text())["seconds"],
        "commit": commit(),
    }


def read_rows(path: Path, chosen: Iterable[Member]) -> list[dict[str, Any]]:
    """The finished runs whose settings are those of today's table; of equal ones the last."""
    if not path.exists():
        return []
    settings = {member.name: list(member.overrides) for member in chosen}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    current = [row for row in rows if settings.get(row["name"]) == row["overrides"]]
    return list({(row["name"], row["seed"], row["steps"]): row for row in current}.values())


def write(runs: Path, steps: int, seeds: Sequence[int]) -> Path:
    rows = [
        row
        for row in read_rows(runs / "runs.jsonl", members())
        if row["steps"] == steps and row["seed"] in seeds
    ]
    order = [member.name for member in members()]
    rows.sort(key=lambda row: (order.index(row["name"]), row["seed"]))
    command = (
        f"python -m benchmarks.algorithm_curves --seeds {' '.join(map(str, seeds))} --steps {steps}"
    )
    return write_result(
        RESULT,
        command,
        {"steps": steps, "seeds": list(seeds), "base": [*BASE, *TRAINING], "runs": rows},
    )


def run_all(jobs: Sequence[Job], num_processes: int) -> int:
    """Number of runs that failed. A line of runs.jsonl each of the others, as soon as
    it is finished.
    """
    num_failed = 0
    with ProcessPoolExecutor(num_processes) as pool:
        futures = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(futures):
            job = futures[future]
            try:
                row = future.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                num_failed += 1
                print(f"FAILED: {error}", flush=True)
                continue
            with (job.runs / "runs.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            last = row["accuracy"][-1][1]
            print(
                (
                    f"{row['name']:30} seed {row['seed']}  accuracy {last:.3f}"
                    f"  {row['cpu_s']:6.1f} CPU s"
                ),
                flush=True,
            )
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="algorithms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=RUNS, help="directory of the runs")
    parser.add_argument("--draw", action="store_true", help="only draw, from the result file")
    parser.add_argument(
        "--collect", action="store_true", help="only write the result file, from the finished runs"
    )
    args = parser.parse_args()
    if args.draw:
        from benchmarks.algorithm_page import draw

        return draw()
    known = [member.name for member in members()]
    if unknown := sorted(set(args.only) - set(known)):
        parser.error(f"--only takes {', '.join(known)}, not {', '.join(unknown)}.")
    runs = args.runs.resolve()
    num_failed = 0
    if not args.collect:
        print(machine(), versions(), flush=True)
        for seed in args.seeds:
            warm_model(seed, runs)
        done = {
            (row["name"], row["seed"], row["steps"])
            for row in read_rows(runs / "runs.jsonl", members())
        }
        jobs = [
            Job(m, seed, args.steps, runs) for m in members(tuple(args.only)) for seed in args.seeds
        ]
        num_failed = run_all(
            [j for j in jobs if (j.member.name, j.seed, j.steps) not in done], args.jobs
        )
    print(write(runs, args.steps, args.seeds))
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
