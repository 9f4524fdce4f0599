"""A whole weight sync against a plain memory copy of the same bytes: seconds, bytes a second, and \
where they go.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_weight_sync [--repetitions 5]

A sync: open the transaction, convert to Hugging Face tensors and write them with digests into
shared memory, hand each bucket to a local engine (a process of its own) that loads it and digests
what stands there, compare, commit. Shard to shard each rank writes what it holds, into shared
memory (`shards`) or over a process group (`links`: gloo); `whole` gathers whole tensors on one rank
first, as files and broadcasts need them. All in turns. Trainer ranks are processes over gloo that
hold the shards a model would have; float32. Models:

    quickstart   the quickstart's model (3.2 MB), buckets of 4 MiB
    smollm2      about 135 million parameters in SmolLM2-135M's shapes with 12 heads and 4 key heads
                 of 48 instead of 9
                 and 3 of 64, so that tp2 can split them; buckets of 64 MiB

The copy, in turns with the sync, moves the same bytes within rank 0 into memory that is mapped
already: the floor of one of the sync's several passes over the bytes. Parts are summed over buckets
(`write_bucket` contains `digest_part`); `deliver` runs in a thread beside the others, so they add
up to more than the whole. Writes benchmarks/results/weight_sync.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, significant, spread, write_result

TIMEOUT_S = 600
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "quickstart": (
        json.loads((ROOT / "examples/quickstart/model/config.json").read_text()),
        4 << 20,
    ),
    "smollm2": (SMOLLM2, 64 << 20),
}
PARTS = ("pack_shards", "gather_packed", "write_bucket", "digest_part", "deliver", "weight_digests")
WAYS = {"shards": ("tensor", True), "links": ("process_group", True), "whole": ("tensor", False)}
"""The transport, and whether the engine takes parts."""


class Clock:
    """Seconds by part, of functions that are called through it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return timed


def rank_main(model: str, tp: int, repetitions: int, output: Path) -> None:
    """One rank. Rank 0 also is the controller: it starts the engine and measures."""
    import torch
    import torch.distributed as dist

    from rlhf_megatron.controller.sync.weight_sync import verify_engine_digests
    from rlhf_megatron.ranks.parallel.world import create_world
    from rlhf_megatron.ranks.resharding import shard_sender, weight_sender
    from rlhf_megatron.rollout.local.local_client import LocalEngine
    from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups
    from rlhf_megatron.rollout.transports.weight_delivery import deliver_weights
    from rlhf_megatron.weights.families.family_lookup import make_weight_table
    from rlhf_megatron.weights.parallel_layout import ParallelLayout
    from rlhf_megatron.weights.tensor_digest import format_digest
    from rlhf_megatron.weights.weight_source import make_random_source
    from rlhf_megatron.weights.weight_table import split_tensor

    torch.set_num_threads(1)
    world = create_world(ParallelLayout(tp, tp=tp), torch.device("cpu"))
    hf_config, bucket_bytes = MODELS[model]
    source = make_random_source(hf_config, seed=1)
    export = []
    for rule in make_weight_table(hf_config, tp):
        whole = rule.to_megatron(*source.read_hf_tensors(rule))
        export.append((rule, split_tensor(rule.split, whole, tp)[world.coordinates.tp].clone()))

    clock = Clock()
    parts = [
        (weight_sender, name)
        for name in ("pack_shards", "gather_packed", "digest_part", "write_bucket")
    ]
    for module, name in [*parts, (shard_sender, "write_bucket")]:
        setattr(module, name, clock.wrap(name, getattr(module, name)))
    LocalEngine.update_weights = clock.wrap("deliver", LocalEngine.update_weights)
    LocalEngine.receive_weights = clock.wrap("deliver", LocalEngine.receive_weights)
    LocalEngine.get_weight_digests = clock.wrap("weight_digests", LocalEngine.get_weight_digests)

    groups = EngineProcessGroups()

    def send(version: int, way: str, place: list[Any]) -> weight_sender.SendReport:
        if tp > 1:
            dist.broadcast_object_list(place)
        address, transfer_dir = place
        return deliver_weights(
            export,
            world,
            groups,
            version=version,
            engines=[replace(address, takes_parts=WAYS[way][1])],
            transfer_dir=transfer_dir,
            bucket_bytes=bucket_bytes,
            engine_dtype="float32",
            transport_kind=WAYS[way][0],
        )

    def reports_of(report: weight_sender.SendReport) -> list[weight_sender.SendReport]:
        """Of all ranks, on the first one."""
        if tp == 1:
            return [report]
        found: list[Any] = [None] * tp
        dist.gather_object(report, found if world.rank == 0 else None)
        return found

    if world.rank:
        for version in range(len(WAYS) * (repetitions + 1)):
            dist.barrier()
            reports_of(send(version, tuple(WAYS)[version % len(WAYS)], [None, None]))
        groups.close()
        return
    with engine(hf_config, bucket_bytes) as (client, transfer_dir):

        def sync(version: int, way: str) -> int:
            client.begin_weight_update(version)
            reports = reports_of(send(version, way, [client.address, transfer_dir]))
            digests: dict[str, int] = defaultdict(int)
            for report in reports:
                for name, value in report.digests.items():
                    digests[name] += int(value, 16)
            verify_engine_digests(
                "engine0",
                {name: format_digest(value) for name, value in digests.items()},
                client.get_weight_digests(),
            )
            client.commit_weight_update(version)
            return sum(report.num_bytes for report in reports)

        result = measure(sync, clock, repetitions, dist.barrier)
        groups.close()
    output.write_text(json.dumps(result))


@contextmanager
def engine(hf_config: dict[str, Any], bucket_bytes: int) -> Iterator[tuple[Any, Path]]:
    """A local engine without weights, its client, and the directory of the buckets."""
    from rlhf_megatron.rollout.local.local_client import LocalEngine
    from rlhf_megatron.rollout.local.local_launch import start_local_engines
    from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory

    with (
        tempfile.TemporaryDirectory() as folder,
        make_transfer_directory(None, 2 * bucket_bytes) as transfer,
    ):
        Path(folder, "config.json").write_text(json.dumps(hf_config))
        servers = start_local_engines(
            folder,
            1,
            folder,
            transfer_dir=transfer.path,
            dtype="float32",
            device="cpu",
            load_weights=False,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
        )
        with servers:
            client = LocalEngine(servers.addresses[0])
            try:
                yield client, transfer.path
            finally:
                client.close()


def measure(
    sync: Callable[[int, str], int], clock: Clock, repetitions: int, barrier: Callable[[], object]
) -> dict[str, Any]:
    """Syncs and copies in turns; the first of each is a warm-up."""
    import torch

    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    parts: dict[str, dict[str, list[float]]] = {way: {part: [] for part in PARTS} for way in WAYS}
    copies = []
    num_bytes = 0
    for version in range(len(WAYS) * (repetitions + 1)):
        way = tuple(WAYS)[version % len(WAYS)]
        clock.seconds.clear()
        barrier()
        start = time.perf_counter()
        num_bytes = sync(version, way)
        taken = time.perf_counter() - start
        origin = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.full_like(origin, 2)
        start = time.perf_counter()
        target.copy_(origin)
        if version >= len(WAYS):
            copies.append(time.perf_counter() - start)
            seconds[way].append(taken)
            for part in PARTS:
                parts[way][part].append(clock.seconds[part])
    return {
        "num_bytes": num_bytes,
        "copy_s": spread(copies),
        **{
            way: {
                "sync_s": spread(seconds[way]),
                "parts_s": {part: spread(values)["median"] for part, values in parts[way].items()},
                "over_copy": {
                    "min": significant(min(seconds[way]) / min(copies)),
                    "median": significant(
                        spread(seconds[way])["median"] / spread(copies)["median"]
                    ),
                },
            }
            for way in WAYS
        },
    }


def run(model: str, tp: int, repetitions: int, folder: Path) -> dict[str, Any]:
    """The measurement in `tp` processes. Raises RuntimeError with their output when one fails."""
    output = folder / "result.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_weight_sync",
        "--child",
        model,
        "--tp",
        str(tp),
    ]
    command += ["--repetitions", str(repetitions), "--result", str(output)]
    processes = []
    logs = []
    for rank in range(tp):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": tp,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {key: str(value) for key, value in place.items()}
        logs.append(folder / f"rank{rank}.log")
        with logs[-1].open("w") as out:
            processes.append(
                subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
                )
            )
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(
            f"{model} at tp{tp}: exit codes {codes}\n" + "\n".join(log.read_text() for log in logs)
        )
    return json.loads(output.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--child", choices=tuple(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        rank_main(args.child, args.tp, args.repetitions, args.result)
        return
    rows: dict[str, Any] = {}
    for model in args.models:
        for tp in (1, 2):
            name = f"{model} tp{tp}"
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = row = run(model, tp, args.repetitions, Path(folder))
            print(
                f"weight sync, {name}: {row['num_bytes'] / 1e6:.1f} MB, a copy"
                f" {row['copy_s']['min']:.4f} s"
            )
            for way in WAYS:
                found = row[way]
                print(
                    (
                        f"    {way}: {found['sync_s']['min']:.4f} s,"
                        f" {found['over_copy']['min']:.1f} times a copy:"
                    ),
                    end="",
                )
                print(
                    "",
                    ", ".join(
                        f"{part} {took:.4f}" for part, took in found["parts_s"].items() if took
                    ),
                )
    command = f"python -m benchmarks.bench_weight_sync --repetitions {args.repetitions}"
    ratio = {
        f"{name}, {way}": row[way]["over_copy"]["min"] for name, row in rows.items() for way in WAYS
    }
    print(write_result("weight_sync", command, {"dtype": "float32", "runs": rows, "ratio": ratio}))


if __name__ == "__main__":
    main()
