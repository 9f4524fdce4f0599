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

    def start(self) -> None:
        """Start the workers without waiting."""

    def wait_until_ready(self) -> object:
        """Wait until the workers have loaded the rewards. The return value has no meaning.
        Raise ConfigError with the problems of the rewards, ValueError where workers are lost.
        """

    def score_tasks(self, tasks: Sequence[RewardTask]) -> list[RewardResult]:
        """Score the tasks and return one result for each, in order."""

    def close(self) -> None:
        """End the workers. Safe to call twice."""


class RewardPoolFactory(Protocol):
    """A callable that makes a reward pool from the arguments of `RewardWorkerPool`."""

    def __call__(
        self,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log_path: Path | None,
        waits_s: Sequence[float | None] = (),
    ) -> RewardPool:
        """Return a pool that is not started; see `RewardWorkerPool` for the arguments."""


@dataclass(frozen=True)
class RunPlacement:
    """The places of engines, reward servers and reward workers. By default all are children
    of this process.
    """

    place_engine: LaunchPlacement = launch_here
    place_reward_server: LaunchPlacement = launch_here
    make_reward_pool: RewardPoolFactory = RewardWorkerPool
