"""Routes of samples through this package's stores and through Ray's object store: CPU time, and
what has to move.

    python -m benchmarks.bench_route_store [--samples 128] [--tokens 8192] [--layers 48] [--top-k
        8] [--stages 8]

A sample's routes are put, and a rank of one of `--stages` pipeline stages reads its layers of all
tokens: from a store of its machine, and as from another one, over a connection. Seconds are of all
processes that take part, the store's and Ray's included, a GB of routes; each way has its turn in
each repetition, and the median counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_in_flight import cpu_of
from benchmarks.common import spread, write_result
from rlhf_megatron.data import expert_route_files
from rlhf_megatron.data.expert_route_files import SelectedRoutes
from rlhf_megatron.runtime.process_control import find_children
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.route_store import enable_route_stores, start_route_store


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the result in benchmarks/results/route_store.json",
    )
    args = parser.parse_args()
    ray_environment.set_ray_defaults(None, os.environ)
    import ray

    drawn = np.random.default_rng(1)
    whole = [
        drawn.integers(0, 128, (args.tokens, args.layers * args.top_k), np.uint8)
        for _ in range(args.samples)
    ]
    gigabytes = sum(sample.nbytes for sample in whole) / 1e9
    own = np.arange(args.layers // args.stages)
    every = np.arange(args.tokens)
    width = len(own) * args.top_k
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[Any], Any], each: Sequence[Any]) -> list[Any]:
        pids = [os.getpid(), *(child.pid for child in find_children(os.getpid()))]
        before = cpu_of(pids)
        found = [work(one) for one in each]
        seconds.setdefault(name, []).append((cpu_of(pids) - before) / gigabytes)
        return found

    def near(handle: str) -> SelectedRoutes:
        return expert_route_files.select_routes(
            expert_route_files.split_route_handle(handle)[1], every, {args.layers: own}, args.top_k
        )

    def far(handle: str) -> SelectedRoutes:
        assert expert_route_files.remote_route_stores is not None
        return expert_route_files.remote_route_stores.select_routes(
            *expert_route_files.split_route_handle(handle), every, {args.layers: own}, args.top_k
        )

    def by_ray_of(ref: Any) -> expert_route_files.ExpertIds:
        found: expert_route_files.ExpertIds = ray.get(ref)[:, :width].copy()
        return found

    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=4 * 10**9
    )
    enable_route_stores(b"s" * 64)
    with tempfile.TemporaryDirectory() as folder:
        store = start_route_store(Path(folder), "127.0.0.1")
        for _ in range(args.repeats):
            handles = timed(
                "store: put",
                partial(expert_route_files.write_route_file, f"{folder}/routes"),
                whole,
            )
            read = timed("store: read on its machine", near, handles)
            fetched = timed("store: read over a connection", far, handles)
            refs = timed("Ray: put", ray.put, whole)
            by_ray = timed("Ray: read on its machine", by_ray_of, refs)
            assert all((a.ids == b.ids).all() for a, b in zip(read, fetched, strict=True))
            assert all(
                (a.ids.reshape(b.shape) == b).all() for a, b in zip(read, by_ray, strict=True)
            )
            num_fetched = sum(one.num_fetched for one in fetched)
            expert_route_files.remove_route_files(handles)
            del refs, by_ray
        store.close()
    ray.shutdown()
    rows = {name: spread(values) for name, values in seconds.items()}
    # an object of Ray moves as a whole
    shares = {"store": num_fetched / gigabytes / 1e9, "Ray": 1.0}
    for name, row in rows.items():
        print(f"{row['median']:8.3f} s a GB  {name}")
    print("of a sample's bytes a stage of another machine fetches:", shares)
    if args.write:
        shape = {name: value for name, value in vars(args).items() if name != "write"}
        command = "python -m benchmarks.bench_route_store"
        print(
            write_result(
                "route_store",
                command,
                {"shape": shape, "cpu_s_a_GB": rows, "share_fetched": shares},
            )
        )


if __name__ == "__main__":
    main()
