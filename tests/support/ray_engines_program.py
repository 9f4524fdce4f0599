"""A driver with engines under Ray and no trainer, told what to do line by line; each answer is
a line of JSON.

python tests/support/ray_engines_program.py MODEL FOLDER NUM_ENGINES
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from end_to_end_tools import QUICKSTART

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.ray.ray_placement import (
    count_own_cluster_cpus,
    make_engine_bundles,
    make_rank_bundles,
)


def main(model: Path, folder: Path, num_engines: int) -> None:
    settings = [
        "trainer.runtime=ray",
        f"rollout.num_engines={num_engines}",
        "ray.num_cpus_per_engine=0.5",
    ]
    config = load_run_config(QUICKSTART, settings).config
    ray_environment.set_ray_defaults(None, os.environ)
    from rlhf_megatron.runtime.ray.ray_cluster import RayCluster, locate_process
    from rlhf_megatron.runtime.ray.ray_engines import RayServerPlacer

    bundles = [
        *make_rank_bundles(config.trainer, config.ray, config.rollout, False),
        *make_engine_bundles(config.rollout, config.ray, False),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-") as directory,
        RayCluster(None, Path(directory), count_own_cluster_cpus(bundles, 1)) as cluster,
    ):
        cluster.reserve_bundles(bundles, is_spread=False, timeout_s=60)
        place = RayServerPlacer(
            cluster,
            config.rollout,
            config.trainer.nnodes,
            config.ray.num_cpus_per_engine,
            0,
            lambda: [locate_process()],
            {"OMP_NUM_THREADS": "1"},
            b"",
        )
        transfer = folder / "transfer"
        transfer.mkdir()
        # Relative, as settings are: the actor counts from the driver's directory.
        relative = os.path.relpath(folder)
        try:
            servers = start_local_engines(
                model,
                num_engines,
                relative,
                transfer_dir=transfer,
                load_weights=True,
                startup_timeout_s=120,
                placement=place,
            )
        except EngineError as error:
            say({"error": str(error)})
            return
        with servers:
            say(facts(servers))
            for line in sys.stdin:
                verb, *names = line.split()
                if verb == "end":
                    break
                say(act(servers, verb, *names))
    say({"is_over": True})


def act(servers: EngineServers, verb: str, name: str) -> dict[str, Any]:
    if verb == "ending":
        return {"ending": servers.describe_exit(name)}
    if verb == "kill":
        servers.kill_server(name)
        return {"ending": servers.describe_exit(name)}
    assert verb == "restart", verb
    try:
        servers.restart_server(name)
    except EngineError as error:
        return {"error": str(error)}
    return facts(servers)


def facts(servers: EngineServers) -> dict[str, Any]:
    pids = {process.name: process.pid for process in servers.processes}
    return {"pids": pids, "urls": {address.name: address.url for address in servers.addresses}}


def say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
