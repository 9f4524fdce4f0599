"""Reward workers under Ray: actors, each with a share of the run's worker processes, where Ray has placed them.

driver --- actor of rewards0 --- template --- workers
       `-- actor of rewards1 --- template --- workers

A batch is dealt out to all actors at once; what a sample does to a worker is the business of the pool of its actor. The
samples of an actor that is lost go to the others, and the actor is started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.plugins import load_plugins, loaded
from rlhf_megatron.rewards.scorers.base import RewardResult
from rlhf_megatron.rewards.service.pool import MAX_RESTARTS, WorkerPool
from rlhf_megatron.rewards.service.processes import STARTUP_S
from rlhf_megatron.rewards.service.wire import Task
from rlhf_megatron.runtime.keepers import Answer, LateAnswerError, ProcessLostError, Remote
from rlhf_megatron.runtime.processes import machine_id

logger = logging.getLogger(__name__)
NUM_TASKS = 256  # of a call, so that few of a batch's texts are in Ray's store at a time
CALL_S = 120.0  # of a call that scores nothing
BATCH_S = 7 * 24 * 3600.0  # of a batch, whose samples have limits of their own


class Part:
    """Holds a share of the workers, in the process of an actor."""

    def __init__(self, directory: str) -> None:
        """`directory`: the driver's, from which relative paths of the settings count, where this machine has it."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        self._pool: WorkerPool | None = None
        self._tasks: list[Task] = []

    def machine(self) -> str:
        return machine_id()

    def start(self, plugins: Sequence[str], pool: tuple[Any, ...]) -> list[str]:
        """Wait until the rewards are loaded. Return what is wrong with them. `pool`: arguments of the WorkerPool."""
        try:
            load_plugins(plugins)
            self._pool = WorkerPool(*pool)
            self._pool.start()
            self._pool.await_ready()
        except ConfigError as error:
            return error.problems
        except ValueError as error:
            return [str(error)]
        return []

    def take(self, tasks: Sequence[Task]) -> None:
        """Keep tasks of the next batch."""
        self._tasks += tasks

    def run(self) -> list[RewardResult]:
        assert self._pool is not None, "start comes first"
        tasks, self._tasks = self._tasks, []
        return self._pool.run(tasks)


class RayWorkers:
    """Has what a `WorkerPool` has; its workers belong to several."""

    def __init__(
        self,
        begin: Callable[[int], Remote],
        num_parts: int,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log: Path | None,
        waits_s: Sequence[float | None] = (),
    ) -> None:
        """`begin`: a new actor of that number, which holds a `Part`. `log`: its name gets the number."""
        self._begin = begin
        self._parts: dict[int, Remote] = {}
        self._num_machines = 0  # that have parts; 0: not known yet
        logs = [log and log.with_name(f"{log.stem}.{index}{log.suffix}") for index in range(num_parts)]
        shares = [len(range(index, num_workers, num_parts)) for index in range(num_parts)]
        self._of_parts = [(rewards, *one, tuple(waits_s)) for one in zip(shares, [timeout_s] * num_parts, logs)]

    def start(self) -> None:
        """Start without waiting."""
        self._parts = {index: self._begin(index) for index in range(len(self._of_parts))}

    def await_ready(self) -> None:
        """Raises ConfigError with what is wrong with the rewards on any machine, ValueError when an actor is lost."""
        if self._num_machines:
            return
        try:
            machines = {part.call("machine", timeout_s=STARTUP_S) for part in self._parts.values()}
            self._num_machines = len(machines)
            answers = [self._load(index) for index in self._parts]
            problems = [problem for answer in answers for problem in answer.result(2 * STARTUP_S)]
        except (ProcessLostError, LateAnswerError) as error:
            raise ValueError(f"an actor of the rewards (ray.reward_actors) did not start: {error}") from error
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))

    def _load(self, index: int) -> Answer:
        return self._parts[index].submit("start", loaded(), (*self._of_parts[index], self._num_machines))

    def run(self, tasks: Sequence[Task]) -> list[RewardResult]:
        """Return one result a task, in order."""
        self.await_ready()
        results: dict[int, RewardResult] = {}
        num_lost = 0
        while waiting := [number for number in range(len(tasks)) if number not in results]:
            live = list(self._parts)
            shares = {index: waiting[place :: len(live)] for place, index in enumerate(live)}
            given = {index: self._give(index, [tasks[n] for n in share]) for index, share in shares.items() if share}
            for index, answer in given.items():
                try:
                    if isinstance(answer, Exception):
                        raise answer
                    results |= zip(shares[index], answer.result(BATCH_S), strict=True)
                except (ProcessLostError, LateAnswerError) as error:
                    num_lost += 1
                    self._replace(index, str(error), num_lost)
        return [results[number] for number in range(len(tasks))]

    def _give(self, index: int, tasks: Sequence[Task]) -> Answer | Exception:
        part = self._parts[index]
        try:
            for start in range(0, len(tasks), NUM_TASKS):
                part.call("take", list(tasks[start : start + NUM_TASKS]), timeout_s=CALL_S)
        except (ProcessLostError, LateAnswerError) as error:
            return error
        return part.submit("run")

    def _replace(self, index: int, why: str, num_lost: int) -> None:
        """Start an actor again; where that does not work, the others have its share. Raises ValueError without any."""
        logger.warning("rewards%d is lost and started again: %s", index, why)
        self._parts.pop(index).kill()
        with contextlib.suppress(ProcessLostError, LateAnswerError):
            if num_lost <= MAX_RESTARTS:
                self._parts[index] = self._begin(index)
                if self._load(index).result(2 * STARTUP_S):
                    raise ProcessLostError
                return
        if (part := self._parts.pop(index, None)) is not None:
            part.kill()
        logger.error("rewards%d is left out", index)
        if not self._parts:
            raise ValueError(f"all actors of the rewards (ray.reward_actors) are lost: {why}")

    def close(self) -> None:
        """Safe to call twice."""
        for part in self._parts.values():
            part.kill()
        self._parts, self._num_machines = {}, 0
