"""A driver with reward workers under Ray and nothing else: what they say of samples, also when an
actor is killed.

python tests/support/ray_rewards_program.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from places import SUPPORT

from rlhf_megatron.config.schema import RayConfig, RewardConfig
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.ray.ray_placement import make_reward_actor_bundles
from rlhf_megatron.runtime.ray.ray_reward_pool import RayRewardPool, RewardPoolActor


def sample(response: str, **extra: Any) -> RewardSample:
    """`response`: says what the function of the tests does."""
    return RewardSample("", response, "7", "s", "stop", 1, json.dumps(extra) if extra else "")


def main(folder: Path) -> None:
    ray_environment.set_ray_defaults(None, os.environ)
    from rlhf_megatron.runtime.ray.ray_cluster import RayCluster, RayObject

    bundles = make_reward_actor_bundles(RayConfig(reward_actors=2, num_cpus_per_reward_actor=0.5))
    started: list[RayObject] = []
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-") as directory,
        RayCluster(None, Path(directory), 1) as cluster,
    ):
        cluster.reserve_bundles(bundles, is_spread=False, timeout_s=60)

        def begin(index: int) -> RayObject:
            environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            started.append(
                cluster.start_object(
                    f"rewards{index}",
                    RewardPoolActor,
                    (os.getcwd(),),
                    bundle_index=index,
                    num_cpus=0.5,
                    environment=environment,
                )
            )
            return started[-1]

        params = {"path": f"{SUPPORT / 'reward_functions.py'}:behave"}
        config = RewardConfig("function", params, num_workers=4, timeout_s=0.5, max_error_rate=1.0)
        samples = [sample(str(number % 10)) for number in range(600)]
        bad = [sample("sleep"), sample("kill"), sample("raise"), sample("garbage", value="'text'")]
        samples[5:245:60] = bad
        with make_reward_scorer(
            config, folder / "rewards.log", make_pool=partial(RayRewardPool, begin, 2)
        ) as scorer:
            results = {"calm": [(r.score, r.status) for r in scorer(samples)]}
            slow = [sample("cpu", seconds=0.1) for _ in range(40)]
            pids = [one.wait_for_location(60).pid for one in started]
            threading.Thread(target=lambda: (time.sleep(1.0), os.kill(pids[0], 9))).start()
            results["killed"] = [(r.score, r.status) for r in scorer([*samples[:5], *slow])]
        print(json.dumps({**results, "num_started": len(started)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
