"""Rewards in worker processes: a batch with some bad samples in a hundred against the same \
batch without them.

    python -m benchmarks.bench_rewards [--samples 10000] [--repetitions 3] [--num-workers N]
        [--timeout-s S]

In the bad batch 1 % of the samples hang, 1 % raise, 1 % give garbage and, of `function`, 1 % kill
their worker, in places drawn at random. Every sample must get
the status of its kind, and every good one the score that it has in the clean batch: a difference
ends the benchmark. The ratio is wall time, bad over clean, medians of runs in turns; `cpu_ratio` is
that of the workers' CPU time, which says more where the machine has other work.

`function`: a user's function of some milliseconds; its hanging samples sleep. `math_verify`: real
answers; the hanging ones keep the library alone busy for seconds or for ever, the raising ones have
no label, the garbage is no mathematics. `function_burning`, `math_verify_endless` (with --all):
hangs that use a CPU all the time and that no look at the text can tell. Each costs its limit on a
core: `least_added_s` is that over the cores. They have no bar.
Writes benchmarks/results/rewards.json.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import reward_samples
from benchmarks.common import ROOT, significant, spread, versions, write_result
from benchmarks.reward_samples import Bad
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer

FUNCTION = f"{ROOT / 'benchmarks' / 'reward_samples.py'}:similarity"


@dataclass(frozen=True)
class Workload:
    reward: str
    params: dict[str, Any]
    make: Callable[[int, int], list[RewardSample]]  # count, seed
    bad: tuple[Bad, ...]
    is_burning: bool = False


WORKLOADS = {
    "function": Workload(
        "function", {"path": FUNCTION}, reward_samples.texts, reward_samples.OF_FUNCTION
    ),
    "math_verify": Workload("math_verify", {}, reward_samples.answers, reward_samples.OF_MATH),
    "function_burning": Workload(
        "function", {"path": FUNCTION}, reward_samples.texts, reward_samples.BURNING, True
    ),
    "math_verify_endless": Workload(
        "math_verify", {}, reward_samples.answers, reward_samples.ENDLESS, True
    ),
}


def spoil(
    samples: Sequence[RewardSample], kinds: Sequence[Bad], seed: int
) -> tuple[list[RewardSample], dict[int, Bad]]:
    """The samples with 1 % replaced by each kind, and which are of which."""
    share = max(1, len(samples) // 100)
    places = random.Random(seed).sample(range(len(samples)), share * len(kinds))
    spoilt = list(samples)
    where = {}
    for number, place in enumerate(places):
        where[place] = kinds[number % len(kinds)]
        spoilt[place] = where[place].make(number // len(kinds))
    return spoilt, where


def check(
    clean: Sequence[RewardResult], results: Sequence[RewardResult], where: dict[int, Bad]
) -> dict[str, Any]:
    """Statuses by kind. Raises ValueError for a sample with a wrong one, or a good sample with
    another score.
    """
    counts: dict[str, Counter[str]] = {}
    wrong = []
    for place, result in enumerate(results):
        bad = where.get(place)
        is_right = (
            result.status in bad.statuses and result.score == 0 if bad else result == clean[place]
        )
        counts.setdefault(bad.kind if bad else "good", Counter())[result.status] += 1
        if not is_right:
            wrong.append((place, bad.kind if bad else "good", result, clean[place]))
    if wrong:
        raise ValueError(
            f"{len(wrong)} samples have a wrong status or score, the first of them {wrong[:3]}"
        )
    return {kind: dict(counter) for kind, counter in counts.items()}


def timed(
    config: RewardConfig, samples: Sequence[RewardSample], warm: Sequence[RewardSample]
) -> tuple[float, float, list[RewardResult]]:
    """Wall seconds, CPU seconds of all worker processes with their start, results.

    In fresh processes: what they remember of equal samples would favour the later run.
    """
    before = _children_s()
    with (
        tempfile.TemporaryDirectory() as folder,
        make_reward_scorer(config, Path(folder) / "log") as scorer,
    ):
        scorer(warm)
        start = time.perf_counter()
        results = scorer(samples)
        taken = time.perf_counter() - start
    return taken, _children_s() - before, results


def _children_s() -> float:
    """CPU seconds of processes that have ended, with their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    settings = {"num_workers": args.num_workers, "timeout_s": args.timeout_s}
    config = RewardConfig(
        name=workload.reward,
        params=workload.params,
        max_error_rate=1.0,
        **{k: v for k, v in settings.items() if v},
    )
    good = workload.make(args.samples, 0)
    spoilt, where = spoil(good, workload.bad, seed=1)
    seconds: dict[str, list[float]] = {"clean": [], "bad": []}
    cpu: dict[str, list[float]] = {"clean": [], "bad": []}
    statuses = {}
    warm = workload.make(8 * config.num_workers, 2)
    for _ in range(1 if workload.is_burning else args.repetitions):
        taken, used, clean = timed(config, good, warm)
        seconds["clean"].append(taken)
        cpu["clean"].append(used)
        taken, used, results = timed(config, spoilt, warm)
        seconds["bad"].append(taken)
        cpu["bad"].append(used)
        statuses = check(clean, results, where)
    assert all(result.status == "ok" for result in clean), "the clean batch must be clean"
    pairs = zip(seconds["bad"], seconds["clean"], strict=True)
    num_hanging = max(1, args.samples // 100)
    return {
        "ratio": significant(median(seconds["bad"]) / median(seconds["clean"])),
        "ratios": [significant(bad / clean) for bad, clean in pairs],
        "cpu_ratio": significant(median(cpu["bad"]) / median(cpu["clean"])),
        "is_burning": workload.is_burning,
        "least_added_s": num_hanging * config.timeout_s / (os.cpu_count() or 1)
        if workload.is_burning
        else 0.0,
        "num_workers": config.num_workers,
        "timeout_s": config.timeout_s,
        "mean_score": significant(sum(result.score for result in clean) / len(clean)),
        "statuses": statuses,
        "clean_s": spread(seconds["clean"]),
        "bad_s": spread(seconds["bad"]),
        "clean_cpu_s": spread(cpu["clean"]),
        "bad_cpu_s": spread(cpu["bad"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--repetitions", type=int, default=3, help="burning ones have one")
    parser.add_argument(
        "--num-workers", type=int, help="reward.num_workers (default: that of the configuration)"
    )
    parser.add_argument("--timeout-s", type=float, help="reward.timeout_s (likewise)")
    parser.add_argument("--only", nargs="+", choices=tuple(WORKLOADS))
    parser.add_argument(
        "--all", action="store_true", help="also hangs that use a CPU, which have no bar"
    )
    parser.add_argument("--out", default="rewards", help="name of the result file")
    args = parser.parse_args()
    results = {}
    for name in args.only or [
        name for name, workload in WORKLOADS.items() if args.all or not workload.is_burning
    ]:
        results[name] = measure(WORKLOADS[name], args)
        print(name, results[name], flush=True)
    options = "".join(f" {word}" for word, is_given in (("--all", args.all),) if is_given)
    command = f"python -m benchmarks.bench_rewards --samples {args.samples}{options}"
    found = versions(("math-verify", "sympy"))
    path = write_result(
        args.out, command, {"samples": args.samples, "workloads": results, "versions": found}
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
