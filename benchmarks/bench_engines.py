"""Tokens per second of stock SGLang beside the bundled engine, over HTTP as in a run: same model, \
prompts and lengths.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_engines [--models quickstart smollm2] [--engines
        local sglang ...]

The engines are started one after the other (an idle server polls) with the settings of the shipped
configurations and the weights of their model. `sglang` has its prefix cache and no seeds,
`sglang_seeded` has `enable_deterministic_inference`, which takes the prefix cache away on a CPU.
Workloads, each with the prompts of the configuration, all engines with the same ones:

    step    what `generate` of a training step asks for: all prompts and samples, the
            configuration's stop tokens
    decode  a fourth of the prompts, 24 tokens a sample and no stop tokens but those that SGLang
            knows of the model

A repetition takes the prompts of the next step, and the prefix cache is emptied before it, as a
weight sync does. Tokens are response tokens, counted. `ratio` is tokens per second of sglang over
those of local (above 1: sglang is faster). Writes benchmarks/results/engines.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, significant, spread, write_result
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.scheduler.algorithm_setup import load_run_prompts, make_run_data
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.rollout.engine_interface import EngineAddress, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.rollout_requests import build_generate_requests
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory

CONFIGS = {"quickstart": "configs/quickstart_sglang.yaml", "smollm2": "configs/smollm2_sglang.yaml"}
ENGINES = ("local", "sglang", "sglang_seeded")
SEEDED = "enable_deterministic_inference"
DECODE_TOKENS = 24  # prompt and response fit into the context of the shipped configurations
DECODE_PART = 4  # one in so many prompts
TRANSFER_BYTES = 1 << 20  # nothing is sent


@dataclass(frozen=True)
class Repetition:
    seconds: float
    num_tokens: int  # of the responses
    num_prompt_tokens: int  # each sample's
    num_cached: int  # of these


def workloads(config: RunConfig, repetitions: int) -> dict[str, list[list[GenerateRequest]]]:
    """Requests of each repetition; the first one is a warm-up."""
    sets, tokenizer = load_run_prompts(config.model, config.data)
    data = make_run_data(config.data, config.trainer.seed, config.rollout.stop, sets, tokenizer)
    assert data.stream is not None
    found: dict[str, list[list[GenerateRequest]]] = {"step": [], "decode": []}
    for step in range(1, repetitions + 2):
        prompts = data.stream.draw_step_prompts(step)
        usual = SamplingParams(
            config.data.max_response_length, config.rollout.temperature, data.stop_token_ids
        )
        found["step"].append(_requests(config, prompts, usual, step))
        long = SamplingParams(DECODE_TOKENS, config.rollout.temperature)
        found["decode"].append(_requests(config, prompts, long, step)[::DECODE_PART])
    return found


def _requests(
    config: RunConfig, prompts: PromptBatch, params: SamplingParams, step: int
) -> list[GenerateRequest]:
    return build_generate_requests(prompts, config.rollout.n, params, config.trainer.seed, step)


@contextmanager
def running(
    name: str, config: RunConfig, folder: Path
) -> Iterator[tuple[EngineFleet, tuple[EngineAddress, ...]]]:
    """One engine of a kind, with the model's weights."""
    with ExitStack() as stack:
        transfer = stack.enter_context(
            make_transfer_directory(config.rollout.transfer_dir, TRANSFER_BYTES)
        )
        servers = stack.enter_context(_start(name, config, folder / name, transfer.path))
        engines = [connect_engine(address, transfer.path) for address in servers.addresses]
        fleet = EngineFleet(engines, config.rollout.request_timeout_s, request_retries=0)
        stack.callback(fleet.close)
        yield fleet, servers.addresses


def _start(name: str, config: RunConfig, folder: Path, transfer_dir: Path) -> EngineServers:
    rollout = config.rollout
    if name == "local":
        return start_local_engines(
            config.model.path,
            1,
            folder,
            transfer_dir=transfer_dir,
            dtype=EngineSetup.from_config(config).dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            startup_timeout_s=rollout.startup_timeout_s,
        )
    arguments = {key: value for key, value in rollout.sglang.args.items() if key != SEEDED}
    arguments |= {"load_format": "auto"} | ({SEEDED: True} if name == "sglang_seeded" else {})
    sglang = replace(rollout.sglang, args=arguments)
    return EngineSetup.from_config(
        replace(config, rollout=replace(rollout, sglang=sglang))
    ).start_servers(folder, transfer_dir, None)


def measure(
    fleet: EngineFleet,
    addresses: Sequence[EngineAddress],
    repetitions: Sequence[list[GenerateRequest]],
) -> list[Repetition]:
    """All but the first."""
    found = []
    for requests in repetitions:
        _empty_caches(addresses)
        start = time.perf_counter()
        groups = fleet.generate(requests)
        seconds = time.perf_counter() - start
        samples = [sample for group in groups for sample in group]
        num_prompt_tokens = sum(
            len(request.prompt_ids) * len(request.seeds) for request in requests
        )
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        found.append(
            Repetition(
                seconds,
                num_tokens,
                num_prompt_tokens,
                sum(sample.num_cached_tokens for sample in samples),
            )
        )
    return found[1:]


def _empty_caches(addresses: Sequence[EngineAddress]) -> None:
    """The bundled engine shares the prompt of a group and keeps nothing over requests."""
    for address in addresses:
        if address.kind == "sglang":
            client = HttpClient(address)
            client.post("/flush_cache?timeout=30", {}, 60.0)  # waits for what still ends


def row_of(repetitions: Sequence[Repetition]) -> dict[str, Any]:
    return {
        "tokens_per_s": significant(
            statistics.median(r.num_tokens / r.seconds for r in repetitions)
        ),
        "seconds": spread([r.seconds for r in repetitions]),
        "tokens": [r.num_tokens for r in repetitions],
        "cached_share": significant(
            sum(r.num_cached for r in repetitions) / sum(r.num_prompt_tokens for r in repetitions)
        ),
    }


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of each other engine over those of `local`; empty without it."""
    if "local" not in rows:
        return {}
    base = rows["local"]["tokens_per_s"]
    return {
        name: significant(row["tokens_per_s"] / base)
        for name, row in rows.items()
        if name != "local"
    }


def bench_model(config: RunConfig, engines: Sequence[str], repetitions: int) -> dict[str, Any]:
    """Workload -> engine -> row, and the ratios."""
    requests = workloads(config, repetitions)
    rows: dict[str, dict[str, dict[str, Any]]] = {workload: {} for workload in requests}
    start_s = {}
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        for name in engines:
            begin = time.perf_counter()
            with running(name, config, Path(folder)) as (fleet, addresses):
                start_s[name] = significant(time.perf_counter() - begin)
                for workload, of_repetitions in requests.items():
                    row = rows[workload][name] = row_of(measure(fleet, addresses, of_repetitions))
                    print(
                        f"  {workload:7}{name:15}{row['tokens_per_s']:10.1f} tokens/s,"
                        f" {100 * row['cached_share']:.0f} % of prompt tokens cached",
                        flush=True,
                    )
    return {
        "start_s": start_s,
        "workloads": rows,
        "ratio": {name: ratios(row) for name, row in rows.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the configurations"
    )
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()
    models = {}
    for model in args.models:
        print(f"{model} ({CONFIGS[model]})", flush=True)
        config = read_run_config(ROOT / CONFIGS[model], args.set).config
        models[model] = bench_model(config, args.engines, args.repetitions)
        for workload, of_engines in models[model]["ratio"].items():
            for name, ratio in of_engines.items():
                print(f"  {workload:7}{name} / local {ratio:10.2f}")
    if not args.no_file:
        command = f"python -m {__spec__.name} {' '.join(sys.argv[1:])}".strip() if __spec__ else ""
        print(write_result("engines", command, {"repetitions": args.repetitions, "models": models}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
