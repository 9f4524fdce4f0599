"""`python -m benchmarks.chaos.schedules`: seeded random faults between a fleet of two bundled engines and its trainer.

One schedule is a weight sync of new weights and a generate call, while the proxies in front of the engines delay, drop,
double and break requests, damage buckets, answer with old versions, and kill engines. After each, by other means:
every sample came exactly once; its version is the current one; its log-probs are those of transformers on the weights
that the trainer holds; and a generate call that nobody disturbs gives the same tokens bit for bit. A sync may end with
an error where no engine is left in which the weights stand as sent; that is counted, and nothing is generated then.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.task import LAYOUTS, MODEL, overrides, place, write_task
from benchmarks.common import RESULTS, ROOT, write_result
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.resharding.transfer_dir import make_transfer_dir
from rlhf_megatron.rollout.bucket_faults import BUCKET_KINDS, UPDATE_PATHS
from rlhf_megatron.rollout.clients import connect
from rlhf_megatron.rollout.engine import (
    Engine,
    EngineAddress,
    EngineError,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
)
from rlhf_megatron.rollout.fault_proxy import FaultProxy, ProxyFault
from rlhf_megatron.rollout.fleet import EngineFleet
from rlhf_megatron.rollout.process import EngineServers
from rlhf_megatron.rollout.supervisor import Supervision
from rlhf_megatron.runtime.inline import InlineGroup
from rlhf_megatron.runtime.pool import Pool
from rlhf_megatron.runtime.roles import role_builder
from rlhf_megatron.scheduler.engines import MIB, start_engines, transfer_bytes
from rlhf_megatron.scheduler.weight_sync import WeightSync

DIRECTORY = ROOT / "runs" / "chaos_schedules"
NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 8, 3, 6
LOG_PROB_TOLERANCE = 1e-4  # nats, float32
REQUEST_S = 4.0  # deadline of a generate request; a dropped one costs as much
DELAY_S = 0.3
SHAKE = 0.05  # standard deviation of what is added to every weight before a sync
KILL_EVERY = 10  # schedules; a restart takes seconds
PATHS = ("/generate", "/begin_weight_update", "/commit_weight_update", "/weight_digests", "/health")
KINDS = ("delay", "duplicate", "reset", "drop")
GENERATE_KINDS = (*KINDS, "old_version")


class Shaker:
    """A role on the rank: new weights without an optimizer step."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @torch.no_grad()
    def shake(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for chunk in self._actor.model.chunks:
            for parameter in chunk.parameters():
                parameter.add_(SHAKE * torch.randn(parameter.shape, generator=generator))


def draw_faults(seed: int, can_kill: bool) -> tuple[ProxyFault, ...]:
    """One to three faults for one engine. `nth` counts from the start of the schedule."""
    draw = random.Random(seed)
    faults = []
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.4:
            faults.append(ProxyFault(draw.choice(BUCKET_KINDS), nth=draw.randint(1, 4), is_hidden=draw.random() < 0.5))  # type: ignore[arg-type]
            continue
        path = draw.choice(PATHS)
        kind = draw.choice(GENERATE_KINDS if path == "/generate" else KINDS)
        faults.append(ProxyFault(kind, path, nth=draw.randint(1, 2), seconds=DELAY_S))  # type: ignore[arg-type]
    if can_kill:
        faults.append(ProxyFault("kill_engine", draw.choice(PATHS), nth=draw.randint(1, 2)))
    return tuple(faults)


@dataclass
class Proxies:
    """The proxy in front of each engine, made anew when an engine is started again at another address."""

    servers: EngineServers
    transfer_dir: Path
    stack: ExitStack
    by_name: dict[str, FaultProxy] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)

    def connect(self, address: EngineAddress) -> Engine:
        self._count(address.name)
        name = address.name
        proxy = FaultProxy(
            address,
            self.transfer_dir,
            kill_engine=lambda: self.servers.kill(name),
            timeout_s=1.25 * REQUEST_S,
        )
        self.by_name[name] = self.stack.enter_context(proxy)
        return connect(proxy.address, self.transfer_dir)

    def plan(self, name: str, faults: Sequence[ProxyFault]) -> None:
        """From now on. `nth` of each fault counts from here; those of buckets count update requests."""
        self._count(name)
        proxy = self.by_name[name]
        bucket_path = UPDATE_PATHS[proxy.target.kind]
        proxy.faults = tuple(
            ProxyFault(
                fault.kind,
                fault.path,
                fault.nth + proxy.passed[fault.path or bucket_path],
                seconds=fault.seconds,
                is_hidden=fault.is_hidden,
            )
            for fault in faults
        )

    def _count(self, name: str) -> None:
        if name in self.by_name:
            self.fired.update(fault.kind for fault, _ in self.by_name[name].fired)
            self.by_name[name].fired.clear()

    def totals(self) -> dict[str, int]:
        for name in self.by_name:
            self._count(name)
        return dict(sorted(self.fired.items()))


@dataclass
class Tally:
    """What the schedules came to."""

    num_samples: int = 0
    num_refused_syncs: int = 0  # no engine was left: nothing was generated
    counters: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Stand:
    """The trainer (one rank, in this process), two engines, and what is between them."""

    def __init__(self, config: RunConfig, directory: Path, stack: ExitStack) -> None:
        self.config = config
        transfer = stack.enter_context(make_transfer_dir(directory / "transfer", transfer_bytes(config)))
        self.transfer_dir = transfer.path
        servers = stack.enter_context(start_engines(config, directory, transfer.path, None))
        self.proxies = Proxies(servers, transfer.path, stack)
        build = role_builder(config)

        def build_with_shaker(pool: Pool) -> Any:
            roles = dict(build(pool))
            return {**roles, "shaker": Shaker(roles["actor"])}

        self.group = InlineGroup(build_with_shaker)
        stack.callback(self.group.close)
        self.servers = servers
        self.version = 0
        self._make_fleet()
        stack.callback(lambda: self.fleet.close())

    def _make_fleet(self) -> None:
        supervision = Supervision(self.servers, self.proxies.connect, 0.5, REQUEST_S, max_restarts=10_000)
        engines = [self.proxies.connect(address) for address in self.servers.addresses]
        self.fleet = EngineFleet(engines, REQUEST_S, 20, supervision=supervision, is_closed=True)
        bucket_bytes = self.config.rollout.update_weights_bucket_megabytes * MIB
        self.sync = WeightSync(self.group, self.fleet, self.transfer_dir, bucket_bytes, "float32", self.version)

    def restart(self) -> None:
        """As a run that is started again would: another fleet, the servers anew, the version kept."""
        self.version = self.sync.version
        self.fleet.close()
        for address in self.servers.addresses:
            self.servers.restart(address.name)
        self._make_fleet()

    def reference(self, directory: Path) -> Any:
        """transformers on the weights that the trainer holds now."""
        from transformers import AutoModelForCausalLM

        shutil.rmtree(directory, ignore_errors=True)
        self.group.broadcast("host.save_hf", directory=directory).result()
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


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


def run_schedule(stand: Stand, seed: int, directory: Path, tally: Tally) -> None:
    """New weights, faults, a sync, a generate call, and the checks."""
    stand.group.broadcast("shaker.shake", seed=seed).result()
    draw = random.Random(seed)
    for name in stand.proxies.by_name:
        faults = draw_faults(draw.randrange(2**31), can_kill=seed % KILL_EVERY == 0 and name.endswith("0"))
        stand.proxies.plan(name, faults)
    requests = requests_of(seed)
    came: Counter[int] = Counter()

    def on_groups(first: int, groups: Sequence[Sequence[GeneratedSample]]) -> None:
        came.update(range(first, first + len(groups)))

    try:
        stand.sync()
        groups = stand.fleet.generate(requests, on_groups)
    except EngineError:
        tally.num_refused_syncs += 1
        for name in stand.proxies.by_name:
            stand.proxies.plan(name, ())
        stand.restart()
        return
    for name in stand.proxies.by_name:
        stand.proxies.plan(name, ())
    problems = check(requests, groups, stand.sync.version, stand.reference(directory / "hf"))
    problems += [f"group {i} came {came[i]} times" for i in range(len(requests)) if came[i] != 1]
    if [tokens_of(group) for group in stand.fleet.generate(requests)] != [tokens_of(group) for group in groups]:
        problems.append("a call that nobody disturbs gives other tokens")
    tally.problems += [f"schedule {seed}: {problem}" for problem in problems]
    tally.num_samples += sum(map(len, groups))
    tally.counters.update({name: int(value) for name, value in stand.fleet.take_counters().items()})


def tokens_of(group: Sequence[GeneratedSample]) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in group]


def check(
    requests: Sequence[GenerateRequest], groups: Sequence[Sequence[GeneratedSample]], version: int, model: Any
) -> list[str]:
    """Numbers, versions and log-probs of what was generated."""
    problems = []
    if [len(group) for group in groups] != [len(request.seeds) for request in requests]:
        problems.append(f"groups have {[len(group) for group in groups]} samples")
    samples = [(request, sample) for request, group in zip(requests, groups, strict=True) for sample in group]
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


def tiny_config(directory: Path) -> RunConfig:
    """One rank, two engines, a model of two small layers in several buckets."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    tree = json.loads((MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**tree, "num_hidden_layers": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model / name)
    values = {**LAYOUTS["inline"], **place(directory), "model.path": str(model), "rollout.num_engines": 2}
    return load_run_config(write_task(directory), overrides(values)).config


def run(count: int, first_seed: int, directory: Path) -> tuple[Tally, dict[str, int]]:
    """`count` schedules with the seeds from `first_seed` on: what they came to, and the faults that happened."""
    shutil.rmtree(directory, ignore_errors=True)
    tally = Tally()
    with ExitStack() as stack:
        stand = Stand(tiny_config(directory), directory, stack)
        stand.sync()
        for seed in range(first_seed, first_seed + count):
            run_schedule(stand, seed, directory, tally)
        return tally, stand.proxies.totals()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=200, help="schedules (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (%(default)s)")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos_schedules.json")
    args = parser.parse_args(argv)
    start = time.monotonic()
    tally, fired = run(args.count, args.seed, args.directory.resolve())
    seconds = round(time.monotonic() - start, 1)
    result = {
        "num_schedules": args.count,
        "num_samples": tally.num_samples,
        "num_refused_syncs": tally.num_refused_syncs,
        "fired": fired,
        "counters": dict(tally.counters),
        "problems": tally.problems,
        "seconds": seconds,
    }
    command = " ".join(["python -m benchmarks.chaos.schedules", *(sys.argv[1:] if argv is None else argv)])
    path = write_result(args.out.stem, command, result, args.out.parent)
    print("\n".join(f"FAIL {problem}" for problem in tally.problems))
    print(
        f"{args.count} schedules, {sum(fired.values())} faults, {tally.num_samples} samples,"
        f" {tally.num_refused_syncs} refused syncs, {len(tally.problems)} problems, {seconds:.0f} s; {path}"
    )
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
