"""The environment that bench_episodes.py measures: a talk of digits whose steps take the time that
the row's label says (`bench_episodes.Pace` as JSON). Workers of episodes load it as a plugin.
"""

from __future__ import annotations

import asyncio
import json
import time

from rlhf_megatron.agents.environment import (
    ENVIRONMENTS,
    Observation,
    Task,
    Turn,
    TurnEnvironment,
)


class PacedTalk:
    """What plain and async functions share."""

    def begin(self, task: Task) -> Observation:
        self.pace = json.loads(task.label)
        return Observation()

    def find_seconds(self, turn: Turn) -> float:
        """The first step is the slow one."""
        return (self.pace["slow_s"] if turn.number == 0 else 0.0) or self.pace["step_s"]

    def answer(self, turn: Turn) -> Observation:
        return Observation(str(turn.number), is_done=turn.number + 1 == self.pace["num_turns"])


@ENVIRONMENTS.register("paced")
class PacedEnvironment(PacedTalk, TurnEnvironment):
    """Plain functions."""

    def reset(self, task: Task) -> Observation:
        return self.begin(task)

    def step(self, turn: Turn) -> Observation:
        until = time.monotonic() + self.find_seconds(turn)
        is_burning = self.pace["is_burning"] and self.pace["slow_s"] and turn.number == 0
        while is_burning and time.monotonic() < until:
            pass
        time.sleep(max(0.0, until - time.monotonic()))
        return self.answer(turn)


@ENVIRONMENTS.register("paced_async")
class PacedAsyncEnvironment(PacedTalk, TurnEnvironment):
    """Async functions."""

    async def reset(self, task: Task) -> Observation:
        return self.begin(task)

    async def step(self, turn: Turn) -> Observation:
        await asyncio.sleep(self.find_seconds(turn))
        return self.answer(turn)
