"""Reward workers in several actors, which are objects of this process here; the last test
has real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from config_samples import VALID
from places import SUPPORT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer
from rlhf_megatron.runtime.ray.ray_reward_pool import RayRewardPool, RewardPoolActor
from rlhf_megatron.runtime.server_keepers import RemoteProcessLostError

PROGRAM = SUPPORT / "ray_rewards_program.py"
NUM_MACHINES = (
    "__import__('rlhf_megatron.rewards.reward_endpoint').rewards.reward_endpoint._num_machines"
)


@dataclass
class Actor:
    """What holds a part. `loses`: runs that it does not survive."""

    machine: str
    loses: list[str]
    part: RewardPoolActor = field(default_factory=lambda: RewardPoolActor(os.getcwd()))
    num_run: int = 0

    def call_method(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method in self.loses:
            self.loses.remove(method)
            raise RemoteProcessLostError("its machine is gone")
        if method == "read_machine_id":
            return self.machine
        self.num_run += method == "score_tasks"
        return getattr(self.part, method)(*arguments)

    def submit_call(self, method: str, *arguments: Any) -> Answer:
        return Answer(self, method, arguments)

    def kill(self) -> None:
        if self.part._pool is not None:
            self.part._pool.close()


@dataclass(frozen=True)
class Answer:
    actor: Actor
    method: str
    arguments: tuple[Any, ...]
    is_done: bool = True

    def wait_for_result(self, timeout_s: float) -> Any:
        return self.actor.call_method(self.method, *self.arguments, timeout_s=timeout_s)


@dataclass
class Cluster:
    loses: dict[int, list[str]] = field(default_factory=dict)
    started: list[Actor] = field(default_factory=list)

    def begin(self, index: int) -> Actor:
        self.started.append(Actor(f"machine {index}", self.loses.pop(index, [])))
        return self.started[-1]


def config(function: str = "behave") -> RewardConfig:
    params = {"path": f"{SUPPORT / 'reward_functions.py'}:{function}"}
    return RewardConfig("function", params, num_workers=3, timeout_s=0.5, max_error_rate=1.0)


def samples(*bad: tuple[str, dict[str, Any]]) -> Iterator[RewardSample]:
    for number in range(20):
        yield RewardSample("", str(number % 10), "7", "s", "stop", 1)
    for response, extra in bad:
        yield RewardSample("", response, "7", "s", "stop", 1, json.dumps(extra))


RIGHT = [(float(number % 10 == 7), "ok") for number in range(20)]


def scored(
    cluster: Cluster, log: Path, *bad: tuple[str, dict[str, Any]]
) -> list[tuple[float, str]]:
    with make_reward_scorer(
        config(), log, make_pool=partial(RayRewardPool, cluster.begin, 2)
    ) as scorer:
        return [(result.score, result.status) for result in scorer(list(samples(*bad)))]


def test_what_samples_do_is_accounted_for_and_limits_of_servers_are_shared(tmp_path: Path) -> None:
    cluster = Cluster()
    bad = [
        ("sleep", {}),
        ("kill", {}),
        ("garbage", {"value": "'x'"}),
        ("garbage", {"value": NUM_MACHINES}),
    ]
    wanted = [
        (0.0, "timeout"),
        (0.0, "masked:worker_died"),
        (0.0, "masked:bad_result"),
        (2.0, "ok"),
    ]
    assert scored(cluster, tmp_path / "rewards.log", *bad) == [*RIGHT, *wanted]
    assert [actor.num_run for actor in cluster.started] == [1, 1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rewards.0.log", "rewards.1.log"]


def test_the_samples_of_a_lost_actor_are_scored_by_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster({1: ["score_tasks"]})
    assert scored(cluster, tmp_path / "log") == RIGHT
    assert [actor.machine for actor in cluster.started] == ["machine 0", "machine 1", "machine 1"]
    assert "rewards1 is lost and started again: its machine is gone" in caplog.text
    cluster = Cluster({0: ["add_tasks"], 1: ["score_tasks"]})
    assert scored(cluster, tmp_path / "log") == RIGHT and len(cluster.started) == 4, (
        "all were lost once"
    )
    cluster = Cluster({0: ["start_pool"]})
    with pytest.raises(
        ValueError, match=r"an actor of the rewards \(ray.reward_actors\) did not start"
    ):
        scored(cluster, tmp_path / "log")


def test_wrong_rewards_are_told_once(tmp_path: Path) -> None:
    pool = partial(RayRewardPool, Cluster().begin, 2)
    with (
        make_reward_scorer(config("nothing"), tmp_path / "log", make_pool=pool) as scorer,
        pytest.raises(ConfigError) as caught,
    ):
        scorer.wait_until_ready()
    assert (
        len(caught.value.problems) == 1
        and "the module has no 'nothing'" in caught.value.problems[0]
    )


def test_the_rules_of_reward_actors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)

    def problems(*overrides: str) -> str:
        of_processes = "reward.params={pattern: '#### (.*)'}"
        return "\n".join(
            validate_config(
                read_run_config(path, ["trainer.runtime=ray", of_processes, *overrides])
            )
        )

    assert problems("ray.reward_actors=2", "reward.num_workers=4") == ""
    assert "must be at most reward.num_workers (4)" in problems(
        "ray.reward_actors=8", "reward.num_workers=4"
    )
    assert "ray.reward_actors" in problems("ray.num_cpus_per_reward_actor=2")
    assert "set trainer.runtime to ray" in problems(
        "trainer.runtime=torchrun", "ray.reward_actors=2"
    )
    assert "reward.name" in problems("ray.reward_actors=2", "reward.params={}")


@pytest.mark.long
def test_real_actors_of_which_one_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=300, check=True, cwd=SUPPORT
    )
    told = json.loads(done.stdout.strip().splitlines()[-1])
    wanted = [[float(number % 10 == 7), "ok"] for number in range(600)]
    statuses = ("timeout", "masked:worker_died", "masked:KeyError", "masked:bad_result")
    wanted[5:245:60] = [[0.0, status] for status in statuses]
    assert told["calm"] == wanted
    assert told["killed"] == [*wanted[:5], *[[1.0, "ok"]] * 40] and told["num_started"] == 3
