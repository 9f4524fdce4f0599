"""A driver with the servers of a run's reward model under Ray, and nothing else; one of them is
killed, all sleep.

python tests/support/ray_reward_servers_program.py RUN.yaml FOLDER     (with asked.json: the samples
    that are scored)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from sglang_tools import STARTUP_S

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.service.reward_model_servers import RewardModelServers
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.ray.ray_placement import make_reward_server_bundles


def main(path: Path, folder: Path) -> None:
    config = read_run_config(path, ["trainer.runtime=ray", "ray.num_cpus_per_engine=0.5"]).config
    limits = {"startup_timeout_s": STARTUP_S, "health_interval_s": 1.0, "health_timeout_s": 60.0}
    config = replace(config, rollout=replace(config.rollout, **limits))
    asked = [RewardSample(**one) for one in json.loads((folder / "asked.json").read_text())]
    ray_environment.set_ray_defaults(None, os.environ)
    from rlhf_megatron.runtime.ray.ray_cluster import RayCluster
    from rlhf_megatron.runtime.ray.ray_engines import RayServerPlacer

    with (
        tempfile.TemporaryDirectory(prefix="rlhf-") as directory,
        RayCluster(None, Path(directory), 1) as cluster,
    ):
        bundles = make_reward_server_bundles(config.reward_model.served.num_servers, config.ray, 0)
        cluster.reserve_bundles(bundles, is_spread=False, timeout_s=60)
        environment = {"OMP_NUM_THREADS": "1"}
        place = RayServerPlacer(
            cluster, config.rollout, 1, 0.5, 0, tuple, environment, b"", first_bundle=0
        )
        rewards = RewardConfig(name="overlong", params={"max_len": 4, "buffer": 4}, num_workers=4)
        with RewardModelServers(
            EngineSetup.from_config(config), config.reward_model, folder, None, place
        ) as servers:

            def urls() -> list[str]:
                return [address.url for address in servers.servers.addresses]

            def directly() -> list[float]:
                body = {"input_ids": [3, 5, 7]}
                answers = [
                    HttpClient(one).post("/classify", body, 60.0)
                    for one in servers.servers.addresses
                ]
                return [answer["embedding"][0] for answer in answers]

            told: dict[str, object] = {"urls": urls()}
            with make_reward_scorer(rewards, folder / "log", servers.make_reward_term()) as scorer:
                told["first"] = [result.parts["reward_model"] for result in scorer(asked)]
                servers.servers.get_process("reward0").send_signal(signal.SIGKILL)
                told["killed"] = [result.parts["reward_model"] for result in scorer(asked)]
            deadline = time.monotonic() + STARTUP_S
            while not (servers.num_restarts and servers._lock.acquire(blocking=False)):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            servers._lock.release()
            told |= {
                "num_restarts": servers.num_restarts,
                "urls_again": urls(),
                "slept": directly(),
            }
            servers.sleep()
            servers.wake()
            told["woken"] = directly()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
