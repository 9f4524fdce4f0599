"""What the controller spends on every token: CPU time and memory, by part, with engines and ranks
that cost nothing.

    python -m benchmarks.bench_controller [--groups 64] [--samples 8] [--response 2048] [--ranks 64]
    python -m benchmarks.bench_controller --large    # 8,192 tokens a response, 1,024 engines and
                                                     ranks, in three sizes

A step of GRPO with a reference and four mini-batches goes through the run's own code: fleet and
drivers, which ask servers that stand for SGLang, samples, journal, batch, rewards, the calls of
log-probs with their messages, advantages, updates, metrics. The servers, what a rank does with a
message, and text are made up and not counted; no model runs. Nothing is compared with a baseline:
two commits are compared by running both in turns (`--repeats`, the least counts).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.bench_in_flight import VOCABULARY, Servers, cpu_of
from benchmarks.common import ROOT, significant, write_result
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    compute_batch_metrics,
    compute_variance_metrics,
    iter_distributions,
    make_logged_samples,
)
from rlhf_megatron.controller.observe.metrics.mismatch_check import make_mismatch_step
from rlhf_megatron.controller.recovery.run_journal import StepJournal
from rlhf_megatron.controller.scheduler.algorithm_setup import RunData, load_algorithm_setup
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import PromptBatch, TokenBatch, TokenLogProbs
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.drivers.driver_pool import DriverPool
from rlhf_megatron.rollout.engine_interface import EngineAddress, SampleGroups
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_samples import ServerLimits
from rlhf_megatron.runtime.call_dispatch import join_replica_results, make_scattered_call
from rlhf_megatron.runtime.control_messages import RoleCallReply
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.parallel_layout import ParallelLayout

NUM_DRIVERS = 2


@dataclass(frozen=True)
class Shape:
    num_groups: int = 64
    num_samples: int = 8
    prompt_length: int = 64
    response_length: int = 2048
    num_ranks: int = 64
    num_engines: int = 8

    @property
    def num_tokens(self) -> int:
        return self.num_groups * self.num_samples * (self.prompt_length + self.response_length)


class Meter:
    """CPU seconds and bytes by part. A part that is entered inside of another one stops its clock.
    What other threads do is counted apart: nothing waits for it.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()  # of the main thread
        self.beside: Counter[str] = Counter()  # of others
        # of the process at the peak of the part, beyond what stood at first
        self.bytes: dict[str, int] = {}
        self.drivers_s = 0.0  # of other processes
        # Of these seconds: between the last answer and the first micro-batch, without
        # what is made up.
        self.waited_s = 0.0
        self._stood = reset_peak()
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.of(part):
                return function(*args, **kwargs)

        return run

    def aside(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """For what another thread calls."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.beside[part] += time.thread_time() - began

        return run

    def answered(self) -> None:
        """The last answer has come."""
        self._turn()
        self.waited_s = -self._own_s()

    def updates(self) -> None:
        """The first micro-batch goes out."""
        self._turn()
        if self.waited_s <= 0.0:
            self.waited_s += self._own_s()

    def _own_s(self) -> float:
        return sum(seconds for part, seconds in self.seconds.items() if part != MADE_UP)

    def _turn(self) -> None:
        now = time.thread_time()
        if self._open:
            part = self._open[-1]
            self.seconds[part] += now - self._since
            self.bytes[part] = max(self.bytes.get(part, 0), peak() - self._stood)
        reset_peak()
        self._since = time.thread_time()


MADE_UP = "made up"  # what is no part of the controller


class Engines(EngineFleet):
    """The run's fleet, clients and drivers before servers that stand for engines, which answer as
    stock SGLang does.

    What the main thread does is a part of the stage that calls it; the loop that talks to drivers
    and the threads that watch engines are counted beside it, drivers apart.
    """

    def __init__(self, shape: Shape, meter: Meter) -> None:
        self._servers = Servers(shape.num_engines, shape.response_length, is_sglang=True)
        self._servers.ask("go")
        self._meter = meter
        drivers = DriverPool(NUM_DRIVERS)
        self._pids = drivers.pids
        addresses = [
            EngineAddress(f"engine{i}", "sglang", f"http://127.0.0.1:{port}", "t" * 32)
            for i, port in enumerate(self._servers.ports)
        ]
        engines = [SGLangEngine(address, Path("/nowhere")) for address in addresses]
        for engine in engines:
            # which a run asks for once
            engine._limits = ServerLimits(VOCABULARY, is_deterministic=False)
        super().__init__(engines, 3600.0, 0, driver_pool=drivers)
        while not drivers.are_all_ready:
            time.sleep(0.1)

    def generate(self, *args: Any) -> SampleGroups:
        there = cpu_of(self._pids)
        all_s = time.process_time()
        own_s = time.thread_time()
        found = super().generate(*args)
        self._meter.answered()
        self._meter.drivers_s = cpu_of(self._pids) - there
        self._meter.beside["fleet"] += time.process_time() - all_s - (time.thread_time() - own_s)
        return found

    def close(self) -> None:
        super().close()
        self._servers.end()


class Ranks:
    """Stands for a pool: messages are encoded and decoded as channels do, ranks answer at once."""

    def __init__(self, num_ranks: int, meter: Meter) -> None:
        self.layout = ParallelLayout(world_size=num_ranks)
        self.layouts = {"actor": self.layout}
        self._meter = meter

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        name = f"call {method}"
        with self._meter.of(name):
            scattered = make_scattered_call(1, method, batch, self.layout, token_budget, arguments)
        values = []
        for rank in range(self.layout.world_size):
            with self._meter.of(name):
                message = b"".join(codec.encode_message_pieces(scattered.make_rank_call(rank)))
            if method == "actor.update" and rank == 0:
                self._meter.updates()
            with self._meter.of(MADE_UP):
                value = self._answer(
                    codec.decode_message(codec.decode_message(message).shard),
                    bool(arguments.get("with_entropy")),
                )
                reply = bytearray(codec.encode_message(RoleCallReply(1, value)))
            with self._meter.of(name):
                values.append(codec.decode_message(reply).value)
        future: Future[Any] = Future()
        with self._meter.of(name):
            future.set_result(
                join_replica_results(
                    method,
                    [values[r] for r in scattered.leader_ranks],
                    scattered.replica_plans,
                    batch.offsets,
                )
            )
        return future

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        raise AssertionError(f"{method}: nothing is broadcast in a step")

    def _answer(self, batch: TokenBatch, with_entropy: bool) -> Any:
        if hasattr(batch, "loss_weights"):
            return UpdateResult({"actor/pg_loss": 1.0}, 1.0, 1e-6, False)
        log_probs = -(batch.token_ids % 977).float() / 977 * batch.response_mask
        return TokenLogProbs(log_probs, -log_probs if with_entropy else None)


class Text:
    """Stands for a tokenizer: text is made by its library, in time that is not the controller's."""

    special_tokens_by_id: ClassVar[dict[int, str]] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return f"{len(ids)} tokens"


def prompts_of(shape: Shape) -> PromptBatch:
    count = shape.num_groups
    return PromptBatch(
        prompt_ids=tuple(
            tuple(range(100 + i, 100 + i + shape.prompt_length)) for i in range(count)
        ),
        prompts=tuple(f"prompt {i}" for i in range(count)),
        labels=("",) * count,
        sources=("benchmark",) * count,
        group_ids=tuple(range(count)),
        extras=("",) * count,
    )


def scores(samples: Sequence[RewardSample]) -> list[RewardResult]:
    return [RewardResult(float(i % 3 == 0)) for i, _ in enumerate(samples)]


def measure(shape: Shape, directory: Path) -> Meter:
    """One step."""
    total = shape.num_groups * shape.num_samples
    config = read_run_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            f"data.train_batch_size={shape.num_groups}",
            f"data.max_response_length={shape.response_length}",
            f"rollout.n={shape.num_samples}",
            f"actor.mini_batch_size={total // 4}",
            f"actor.ppo_max_token_len_per_gpu={2 * (shape.prompt_length + shape.response_length)}",
            "actor.use_kl_loss=true",
            "algorithm.rollout_correction.rollout_is=token",
        ],
    ).config
    meter = Meter()
    engines = Engines(shape, meter)
    ranks = Ranks(shape.num_ranks, meter)
    text = Text()
    made_up: Any = text
    data = RunData(None, (), made_up, ())
    parts = replace(load_algorithm_setup(config), needs_reference=True)
    group: Any = ranks
    journal = StepJournal(directory / "journal", "benchmark")
    stages = StepStages(
        config, RoleProxies(group), engines, data, parts, PolicySync(-1), scores, journal=journal
    )
    thresholds: Any = lambda found: None  # noqa: E731
    stages.mismatch_check._raise_past_thresholds = thresholds
    for name in ("append_groups", "begin_batch_write"):
        setattr(journal, name, meter.wrapped("journal of groups", getattr(journal, name)))
    journal._write_batch_record = meter.aside("journal of batches", journal._write_batch_record)
    prompts = prompts_of(shape)
    stages.begin_step()
    with meter.of("samples to a batch"):
        rollout = stages.generate_rollout(1, prompts)
    with meter.of(MADE_UP):
        engines.close()
    with meter.of("rewards"):
        scored = stages.score_rollout(1, rollout)
    del rollout
    stages.mismatch_check = meter.wrapped("mismatch metrics", stages.mismatch_check)
    stages.mismatch_check.first_step = 0
    with meter.of("annotation"):
        annotated = stages.annotate_step(1, scored)
    del scored
    with meter.of("advantages"):
        train = stages.compute_advantages(1, annotated)
    del annotated
    with meter.of("mini-batches"):
        _, metrics = stages.update_models(1, train)
    with meter.of("metrics of the batch"):
        metrics |= compute_batch_metrics(train) | compute_variance_metrics(train, metrics)
        make_logged_samples(1, train, 8, 1)
    journal.wait_for_write()
    with meter.of("mismatch record"):
        make_mismatch_step(1, train, lambda ids: "")
    with meter.of("distributions"):
        for _ in iter_distributions(train, 0):
            pass
    return meter


def reset_peak() -> int:
    """Bytes that stand now; `peak` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# is it linear?
LARGE = tuple(Shape(num_groups, 8, 64, 8192, 1024, 1024) for num_groups in (64, 256, 1024))
WHOLE = Shape(2048, 8, 64, 8192, 1024, 1024)  # the step whose figures follow


def of_large() -> dict[str, Any]:
    """Three sizes of a large step, once each, the exponents from the smallest to the largest, and
    what the whole one takes by the largest.
    """
    sizes = []
    for shape in LARGE:
        with tempfile.TemporaryDirectory() as directory:
            meter = measure(shape, Path(directory))
        rows = {part: seconds for part, seconds in meter.seconds.items() if part != MADE_UP}
        histograms = rows.pop("distributions")
        tokens = shape.num_tokens
        count = {part: meter.bytes[part] for part in rows}
        rows |= meter.beside
        sizes.append(
            {
                "num_samples": shape.num_groups * shape.num_samples,
                "controller_us_a_token": sum(rows.values()) / tokens * 1e6,
                "drivers_us_a_token": meter.drivers_s / tokens * 1e6,
                "answer_to_update_us_a_token": meter.waited_s / tokens * 1e6,
                "histograms_us_a_token": histograms / tokens * 1e6,
                "bytes_a_token": max(count.values()) / tokens,
                "bytes_a_token_with_histograms": meter.bytes["distributions"] / tokens,
            }
        )
        print("  ".join(f"{name} {value:.4g}" for name, value in sizes[-1].items()))
    first = sizes[0]
    last = sizes[-1]
    millions = WHOLE.num_tokens / 1e6
    growth = math.log(last["num_samples"] / first["num_samples"])
    exponents = {  # of the sum over tokens: 1 is linear, what every size has alike makes it less
        name: 1 + math.log(last[name] / first[name]) / growth
        for name in first
        if name.endswith("us_a_token")
    }
    print("exponents:  " + "  ".join(f"{name} {value:.3g}" for name, value in exponents.items()))
    whole = {
        "num_samples": WHOLE.num_groups * WHOLE.num_samples,
        "controller_cpu_s": last["controller_us_a_token"] * millions,
        "answer_to_update_cpu_s": last["answer_to_update_us_a_token"] * millions,
        "gigabytes": last["bytes_a_token"] * millions / 1e3,
    }
    print(
        "a step of 16,384 samples:  "
        + "  ".join(f"{name} {value:.4g}" for name, value in whole.items())
    )
    sizes = [{name: significant(value) for name, value in size.items()} for size in sizes]
    return {
        "sizes": sizes,
        "exponents": {k: significant(v) for k, v in exponents.items()},
        "whole_step": whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=Shape.num_groups)
    parser.add_argument("--samples", type=int, default=Shape.num_samples)
    parser.add_argument("--response", type=int, default=Shape.response_length)
    parser.add_argument("--ranks", type=int, default=Shape.num_ranks)
    parser.add_argument("--engines", type=int, default=Shape.num_engines)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="large steps in place of the others")
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the result in benchmarks/results/controller[_large].json",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    # M_MMAP_THRESHOLD: columns are given back at once, as large ones are
    ctypes.CDLL(None).mallopt(-3, 1 << 17)
    shape = Shape(
        args.groups, args.samples, Shape.prompt_length, args.response, args.ranks, args.engines
    )
    best: dict[str, float] = {}
    used: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        measure(Shape(4, 2, 3, 20, 2), Path(directory))  # imports what a step needs
    if args.large:
        found = of_large()
        if args.write:
            print(
                write_result(
                    "controller_large", "python -m benchmarks.bench_controller --large", found
                )
            )
        return
    for repeat in range(args.repeats):
        with tempfile.TemporaryDirectory() as directory:
            meter = measure(shape, Path(directory))
        if repeat == 0:  # later ones find memory that the first has left
            used = {
                part: round(count / shape.num_tokens, 1)
                for part, count in meter.bytes.items()
                if part != MADE_UP
            }
        for part, seconds in (meter.seconds | meter.beside | {"drivers": meter.drivers_s}).items():
            best[part] = min(best.get(part, seconds), seconds)
    del best[MADE_UP]
    rows = {part: significant(seconds / shape.num_tokens * 1e6) for part, seconds in best.items()}
    print("us of CPU, and bytes at the peak of a part; both a token")
    for part, value in sorted(rows.items(), key=lambda row: -row[1]):
        print(f"{value:8.4f} {used.get(part, 0.0):7.1f}  {part}")
    print(f"{sum(rows.values()):8.4f} {max(used.values()):7.1f}  the step")
    if args.write:
        result = {"shape": vars(shape), "cpu_us_a_token": rows, "bytes_a_token": used}
        print(write_result("controller", "python -m benchmarks.bench_controller", result))


if __name__ == "__main__":
    main()
