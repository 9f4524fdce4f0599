"""Where the servers and the reward workers of a run stand; the launcher says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_megatron.rewards.scorers.reward_types import RewardResult
from rlhf_megatron.rewards.service.worker_messages import RewardTask
from rlhf_megatron.rewards.service.worker_pool import RewardWorkerPool
from rlhf_megatron.rollout.fleet.server_process import LaunchPlacement, launch_here


class RewardPool(Protocol):
    """A pool of reward workers, on this machine or on others."""

    def start(self) -> None: ...
    def wait_until_ready(self) -> object: ...
    def score_tasks(self, tasks: Sequence[RewardTask]) -> list[RewardResult]: ...
    def close(self) -> None: ...


class RewardPoolFactory(Protocol):
    """Takes what a `RewardWorkerPool` takes."""

    def __call__(
        self,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log_path: Path | None,
        waits_s: Sequence[float | None] = (),
    ) -> RewardPool: ...


@dataclass(frozen=True)
class RunPlacement:
    """The places of engines, reward servers and reward workers. By default all are children
    of this process.
    """

    place_engine: LaunchPlacement = launch_here
    place_reward_server: LaunchPlacement = launch_here
    make_reward_pool: RewardPoolFactory = RewardWorkerPool
