"""Reward workers under Ray: actors, each with a share of the run's worker processes, where Ray
has placed them.

driver --- actor of rewards0 --- template --- workers
       `-- actor of rewards1 --- template --- workers

A batch is dealt out to all actors at once; what a sample does to a worker is the business of the
pool of its actor. The samples of an actor that is lost go to the others, and the actor is
started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.plugins import list_loaded_plugins, load_plugins
from rlhf_megatron.rewards.scorers.reward_types import RewardResult
from rlhf_megatron.rewards.service.worker_messages import RewardTask
from rlhf_megatron.rewards.service.worker_pool import MAX_RESTARTS, RewardWorkerPool
from rlhf_megatron.rewards.service.worker_processes import STARTUP_S
from rlhf_megatron.runtime.process_control import read_machine_id
from rlhf_megatron.runtime.server_keepers import (
    CallHandle,
    LateAnswerError,
    RemoteHandle,
    RemoteProcessLostError,
)

logger = logging.getLogger(__name__)
NUM_TASKS = 256  # of a call, so that few of a batch's texts are in Ray's store at a time
CALL_S = 120.0  # of a call that scores nothing
BATCH_S = 7 * 24 * 3600.0  # of a batch, whose samples have limits of their own


class RewardPoolActor:
    """A share of the reward workers, in the process of an actor."""

    def __init__(self, working_dir: str) -> None:
        """Change to `working_dir` where this machine has the directory: relative paths of the
        settings count from the driver's working directory.
        """
        with contextlib.suppress(OSError):
            os.chdir(working_dir)
        self._pool: RewardWorkerPool | None = None
        self._tasks: list[RewardTask] = []

    def read_machine_id(self) -> str:
        """Return the id of the actor's machine."""
        return read_machine_id()

    def start_pool(self, plugins: Sequence[str], pool_arguments: tuple[Any, ...]) -> list[str]:
        """Load the plugins, start the workers and wait until they have loaded the rewards. Return
        the problems of the rewards, [] without any. `pool_arguments` are the arguments of
        RewardWorkerPool.
        """
        try:
            load_plugins(plugins)
            rewards, num_workers, timeout_s, log_path, waits_s, num_machines = pool_arguments
            self._pool = RewardWorkerPool(
                rewards, num_workers, timeout_s, log_path, waits_s, num_machines
            )
            self._pool.start()
            self._pool.wait_until_ready()
        except ConfigError as error:
            return error.problems
        except ValueError as error:
            return [str(error)]
        return []

    def add_tasks(self, tasks: Sequence[RewardTask]) -> None:
        """Append tasks to the next batch."""
        self._tasks += tasks

    def score_tasks(self) -> list[RewardResult]:
        """Score the tasks that were added since the last call, and return one result for each task,
        in order.
        """
        assert self._pool is not None, "start comes first"
        tasks = self._tasks
        self._tasks = []
        return self._pool.score_tasks(tasks)


class RayRewardPool:
    """A pool with the methods of `RewardWorkerPool`, whose workers belong to several actors."""

    def __init__(
        self,
        start_actor: Callable[[int], RemoteHandle],
        num_actors: int,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log_path: Path | None,
        waits_s: Sequence[float | None] = (),
    ) -> None:
        """Divide `num_workers` over `num_actors` actors; nothing starts yet. `start_actor(index)`
        starts a new actor that holds a `RewardPoolActor`. Each actor's log gets its index in the
        name.
        """
        self._start_actor = start_actor
        self._actors: dict[int, RemoteHandle] = {}
        self._num_machines = 0  # that have parts; 0: not known yet
        logs = [
            log_path and log_path.with_name(f"{log_path.stem}.{index}{log_path.suffix}")
            for index in range(num_actors)
        ]
        shares = [len(range(index, num_workers, num_actors)) for index in range(num_actors)]
        self._pool_arguments = [
            (rewards, *one, tuple(waits_s)) for one in zip(shares, [timeout_s] * num_actors, logs)
        ]

    def start(self) -> None:
        """Start all actors, without waiting."""
        self._actors = {
            index: self._start_actor(index) for index in range(len(self._pool_arguments))
        }

    def wait_until_ready(self) -> None:
        """Wait until all actors have loaded the rewards. Raise ConfigError with the problems of the
        rewards on any machine, ValueError where an actor did not start.
        """
        if self._num_machines:
            return
        try:
            machines = {
                part.call_method("read_machine_id", timeout_s=STARTUP_S)
                for part in self._actors.values()
            }
            self._num_machines = len(machines)
            answers = [self._load_rewards(index) for index in self._actors]
            problems = [
                problem for answer in answers for problem in answer.wait_for_result(2 * STARTUP_S)
            ]
        except (RemoteProcessLostError, LateAnswerError) as error:
            raise ValueError(
                f"an actor of the rewards (ray.reward_actors) did not start: {error}"
            ) from error
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))

    def _load_rewards(self, actor_index: int) -> CallHandle:
        """Call the actor to start its workers, and return the call."""
        return self._actors[actor_index].submit_call(
            "start_pool",
            list_loaded_plugins(),
            (*self._pool_arguments[actor_index], self._num_machines),
        )

    def score_tasks(self, tasks: Sequence[RewardTask]) -> list[RewardResult]:
        """Score the tasks on all actors, and return one result for each task, in order. Tasks of an
        actor that is lost go to the actors that are left. Raise ValueError when all actors are
        lost.
        """
        self.wait_until_ready()
        results: dict[int, RewardResult] = {}
        num_lost = 0
        while waiting := [number for number in range(len(tasks)) if number not in results]:
            live = list(self._actors)
            shares = {index: waiting[place :: len(live)] for place, index in enumerate(live)}
            given = {
                index: self._assign_tasks(index, [tasks[n] for n in share])
                for index, share in shares.items()
                if share
            }
            for index, answer in given.items():
                try:
                    if isinstance(answer, Exception):
                        raise answer
                    results |= zip(shares[index], answer.wait_for_result(BATCH_S), strict=True)
                except (RemoteProcessLostError, LateAnswerError) as error:
                    num_lost += 1
                    self._replace_actor(index, str(error), num_lost)
        return [results[number] for number in range(len(tasks))]

    def _assign_tasks(
        self, actor_index: int, tasks: Sequence[RewardTask]
    ) -> CallHandle | Exception:
        """Send tasks to an actor, and return its call that scores them, or the error of an actor
        that is lost or late.
        """
        part = self._actors[actor_index]
        try:
            for start in range(0, len(tasks), NUM_TASKS):
                part.call_method(
                    "add_tasks", list(tasks[start : start + NUM_TASKS]), timeout_s=CALL_S
                )
        except (RemoteProcessLostError, LateAnswerError) as error:
            return error
        return part.submit_call("score_tasks")

    def _replace_actor(self, actor_index: int, loss_reason: str, num_losses: int) -> None:
        """Start a lost actor again. Leave it out where that fails, or after MAX_RESTARTS losses in
        the batch. Raise ValueError where no actor is left.
        """
        logger.warning("rewards%d is lost and started again: %s", actor_index, loss_reason)
        self._actors.pop(actor_index).kill()
        with contextlib.suppress(RemoteProcessLostError, LateAnswerError):
            if num_losses <= MAX_RESTARTS:
                self._actors[actor_index] = self._start_actor(actor_index)
                if self._load_rewards(actor_index).wait_for_result(2 * STARTUP_S):
                    raise RemoteProcessLostError
                return
        if (part := self._actors.pop(actor_index, None)) is not None:
            part.kill()
        logger.error("rewards%d is left out", actor_index)
        if not self._actors:
            raise ValueError(
                f"all actors of the rewards (ray.reward_actors) are lost: {loss_reason}"
            )

    def close(self) -> None:
        """Kill all actors. Safe to call twice."""
        for part in self._actors.values():
            part.kill()
        self._actors = {}
        self._num_machines = 0
