"""Where the servers and the reward workers of a run stand; the launcher says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_megatron.rewards.scorers.base import RewardResult
from rlhf_megatron.rewards.service.pool import WorkerPool
from rlhf_megatron.rewards.service.wire import Task
from rlhf_megatron.rollout.fleet.process import Place, here


class Pool(Protocol):
    """A pool of reward workers, on this machine or on others."""

    def start(self) -> None: ...
    def await_ready(self) -> object: ...
    def run(self, tasks: Sequence[Task]) -> list[RewardResult]: ...
    def close(self) -> None: ...


class MakePool(Protocol):
    """Takes what a `WorkerPool` takes."""

    def __call__(
        self,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log: Path | None,
        waits_s: Sequence[float | None] = (),
    ) -> Pool: ...


@dataclass(frozen=True)
class Places:
    """The places of engines, reward servers and reward workers. By default all are children of this process."""

    engines: Place = here
    reward_servers: Place = here
    reward_workers: MakePool = WorkerPool
