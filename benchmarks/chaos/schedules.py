"""`python -m benchmarks.chaos.schedules`: seeded random faults between a fleet of two engines
and its trainer.

    python -m benchmarks.chaos.schedules
        # bundled engines, 200 schedules
    python -m benchmarks.chaos.schedules --engine sglang --count 200         # stock SGLang
    python -m benchmarks.chaos.schedules --engine sglang --router sglang     # behind sglang-router
    python -m benchmarks.chaos.schedules --engine sglang --seed 17 --count 1 # one schedule alone

One schedule is a weight sync of new weights and a generate call, while the proxies in front of the
engines delay, drop, double and break requests, cut answers off, answer 500, damage buckets, answer
with old versions, and kill engines or stop what holds their model. After each, by other means:
every sample came exactly once; its version is the current one; its log-probs are those of
transformers on the weights that the trainer holds; and a generate call that nobody disturbs gives
the same tokens. A sync may end with an error where no engine is left in which the weights stand as
sent; that is counted, and nothing is generated then. Servers are started once; only those that a
schedule killed are started again.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.bucket_faults import BUCKET_KINDS
from benchmarks.chaos.fault_proxy import ProxyFault
from benchmarks.chaos.stand import Pace, Stand, tiny_config
from benchmarks.common import RESULTS, ROOT, write_result
from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
)

DIRECTORY = ROOT / "runs" / "chaos_schedules"
NUM_GROUPS = 8
GROUP_SIZE = 3
NUM_TOKENS = 6
LOG_PROB_TOLERANCE = 1e-4  # nats, float32
DELAY_S = 0.3
KINDS = ("delay", "duplicate", "reset", "cut", "error", "drop")
GENERATE_KINDS = (*KINDS, "old_version")


def draw_faults(seed: int, pace: Pace, can_end: bool) -> tuple[ProxyFault, ...]:
    """One to three faults for one engine. `nth` counts from the start of the schedule. `can_end`:
    it is also killed, or stopped.
    """
    draw = random.Random(seed)
    faults = []
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.4:
            faults.append(
                ProxyFault(
                    draw.choice(BUCKET_KINDS), nth=draw.randint(1, 4), is_hidden=draw.random() < 0.5
                )
            )
            continue
        path = draw.choice(pace.paths)
        kind = draw.choice(GENERATE_KINDS if path == "/generate" else KINDS)
        faults.append(ProxyFault(kind, path, nth=draw.randint(1, 2), seconds=DELAY_S))
    if can_end:
        kind = draw.choice(("kill_engine", "hang_engine"))
        faults.append(ProxyFault(kind, draw.choice(pace.paths[:3]), nth=1))
    return tuple(faults)


@dataclass
class Outcome:
    """What one schedule came to."""

    seed: int
    faults: dict[str, list[str]]  # planned, by engine
    seconds: float = 0.0
    num_samples: int = 0
    refused: str = ""  # no engine was left: nothing was generated
    problems: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """What is not empty."""
        return {key: value for key, value in vars(self).items() if value}


def requests_of(seed: int) -> list[GenerateRequest]:
    draw = random.Random(seed)
    params = SamplingParams(NUM_TOKENS, 1.0, (1,))
    return [
        GenerateRequest(
            tuple(draw.randrange(2, 16) for _ in range(draw.randint(1, 6))),
            tuple(draw.randrange(2**31) for _ in range(GROUP_SIZE)),
            params,
        )
        for _ in range(NUM_GROUPS)
    ]


def run_schedule(stand: Stand, seed: int) -> Outcome:
    """New weights, faults, a sync, a generate call, and the checks."""
    start = time.monotonic()
    stand.group.broadcast_call("shaker.shake", seed=seed).result()
    draw = random.Random(seed)
    outcome = Outcome(seed, {})
    for name in sorted(stand.proxies.by_name):
        can_end = seed % stand.pace.kill_every == 0 and name.endswith("0")
        faults = draw_faults(draw.randrange(2**31), stand.pace, can_end)
        stand.proxies.plan(name, faults)
        outcome.faults[name] = [
            f"{fault.kind} {fault.path or 'bucket'} {fault.nth}" for fault in faults
        ]
    requests = requests_of(seed)
    came: Counter[int] = Counter()

    def on_groups(first: int, groups: Sequence[Sequence[GeneratedSample]]) -> None:
        came.update(range(first, first + len(groups)))

    try:
        stand.sync()
        groups = stand.fleet.generate(requests, on_groups)
    except EngineError as error:
        outcome.refused = str(error)[:300]
        quieten(stand)
        stand.restart()
    else:
        quieten(stand)
        outcome.num_samples = sum(map(len, groups))
        model = stand.reference()
        outcome.problems = check(requests, groups, stand.sync.policy_version, model)
        outcome.problems += [
            f"group {i} came {came[i]} times" for i in range(len(requests)) if came[i] != 1
        ]
        again = stand.fleet.generate(requests)
        outcome.problems += [
            f"undisturbed: {words}"
            for words in check(requests, again, stand.sync.policy_version, model)
        ]
        outcome.problems += other_tokens(groups, again)
        outcome.counters = {
            name: int(value) for name, value in stand.fleet.take_counters().items() if value
        }
    outcome.seconds = round(time.monotonic() - start, 2)
    return outcome


def quieten(stand: Stand) -> None:
    for name in stand.proxies.by_name:
        stand.proxies.plan(name, ())


def other_tokens(
    groups: Sequence[Sequence[GeneratedSample]], again: Sequence[Sequence[GeneratedSample]]
) -> list[str]:
    """Samples that a call that nobody disturbs gives otherwise: same seeds, same weights."""
    return [
        f"sample {number} of group {index}: {sample.token_ids}, undisturbed {other.token_ids}"
        for index, (group, others) in enumerate(zip(groups, again, strict=True))
        for number, (sample, other) in enumerate(zip(group, others, strict=True))
        if sample.token_ids != other.token_ids
    ]


def check(
    requests: Sequence[GenerateRequest],
    groups: Sequence[Sequence[GeneratedSample]],
    version: int,
    model: Any,
) -> list[str]:
    """Numbers, versions and log-probs of what was generated."""
    problems = []
    if [len(group) for group in groups] != [len(request.seeds) for request in requests]:
        problems.append(f"groups have {[len(group) for group in groups]} samples")
    samples = [
        (request, sample)
        for request, group in zip(requests, groups, strict=True)
        for sample in group
    ]
    if versions := {sample.policy_version for _, sample in samples} - {version}:
        problems.append(f"samples of versions {sorted(versions)}, the current one is {version}")
    worst = max(difference(model, request.prompt_ids, sample) for request, sample in samples)
    if not worst <= LOG_PROB_TOLERANCE:
        problems.append(f"log-probs differ by {worst:.2g} from those of the current weights")
    return problems


def difference(model: Any, prompt: tuple[int, ...], sample: GeneratedSample) -> float:
    """Largest |log-prob| difference of a sample's tokens."""
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(sample.log_probs)).abs().max())


def run(args: argparse.Namespace) -> tuple[list[Outcome], dict[str, int], float]:
    """What the schedules came to, the faults that happened, and the seconds that the servers
    took to start.
    """
    directory = args.directory.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + 60 * args.minutes
    with ExitStack() as stack:
        start = time.monotonic()
        stand = Stand(tiny_config(directory, args.engine, args.router), directory, stack)
        startup_s = time.monotonic() - start
        stand.sync()
        with suppress(KeyboardInterrupt):  # what has been done so far counts
            for seed in range(args.seed, args.seed + args.count):
                if time.monotonic() > deadline:
                    break
                outcomes.append(run_schedule(stand, seed))
                print(line(outcomes[-1]), flush=True)
        return outcomes, stand.proxies.totals(), startup_s


def line(outcome: Outcome) -> str:
    """A schedule for people."""
    mark = "FAIL" if outcome.problems else "none" if outcome.refused else "ok"
    planned = "; ".join(f"{name} {', '.join(faults)}" for name, faults in outcome.faults.items())
    text = f"{mark:<4} {outcome.seed:>4} {outcome.seconds:6.1f} s  {planned}"
    return "".join([text, *(f"\n          {problem}" for problem in outcome.problems)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=("local", "sglang"), default="local")
    parser.add_argument(
        "--router", choices=("balancer", "sglang"), default="balancer", help="of engine sglang"
    )
    parser.add_argument("--count", type=int, default=200, help="schedules (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="begin no schedule after so long"
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument(
        "--out", type=Path, help="benchmarks/results/chaos_schedules[_sglang[_router]].json"
    )
    args = parser.parse_args(argv)
    if args.out is None:
        name = (
            "chaos_schedules"
            + "_sglang" * (args.engine == "sglang")
            + "_router" * (args.router == "sglang")
        )
        args.out = RESULTS / f"{name}.json"
    start = time.monotonic()
    outcomes, fired, startup_s = run(args)
    num_samples = sum(outcome.num_samples for outcome in outcomes)
    refused = [outcome.seed for outcome in outcomes if outcome.refused]
    failed = [outcome.seed for outcome in outcomes if outcome.problems]
    counters: Counter[str] = Counter()
    for outcome in outcomes:
        counters.update(outcome.counters)
    seconds = time.monotonic() - start
    result = {
        "engine": args.engine,
        "router": args.router,
        "num_schedules": len(outcomes),
        "num_samples": num_samples,
        "num_refused_syncs": len(refused),
        "failed_seeds": failed,
        "fired": fired,
        "counters": dict(counters),
        "problems": [
            f"schedule {outcome.seed}: {words}"
            for outcome in outcomes
            for words in outcome.problems
        ],
        "startup_seconds": round(startup_s, 1),
        "seconds": round(seconds, 1),
        "schedules": [outcome.row() for outcome in outcomes],
    }
    command = " ".join(
        ["python -m benchmarks.chaos.schedules", *(sys.argv[1:] if argv is None else argv)]
    )
    path = write_result(args.out.stem, command, result, args.out.parent)
    print(
        f"{len(outcomes)} schedules, {sum(fired.values())} faults, {num_samples} samples,"
        f" {len(refused)} refused syncs, {len(failed)} with problems, {seconds:.0f} s; {path}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
