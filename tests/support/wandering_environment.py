"""A plugin for tests: talks of random length, whose environment says random things."""

from __future__ import annotations

import random
import time
from typing import ClassVar

from rlhf_megatron.extend import ENVIRONMENTS, Observation, Task, Turn, TurnEnvironment

CHARACTERS = "0123456789+-*=? "


@ENVIRONMENTS.register("wandering")
class Wandering(TurnEnvironment):
    """Two to twelve turns; some answers take a moment, and one in 500 fails."""

    is_deterministic: ClassVar[bool] = True

    def reset(self, task: Task) -> Observation:
        self.draw = random.Random(task.seed)
        self.num_turns = self.draw.randint(2, 12)
        return Observation()

    def step(self, turn: Turn) -> Observation:
        if self.draw.random() < 0.02:
            time.sleep(0.05)
        if self.draw.random() < 0.002:
            raise RuntimeError("the environment has lost its way")
        text = "".join(self.draw.choice(CHARACTERS) for _ in range(self.draw.randint(1, 4)))
        is_done = turn.number + 1 >= self.num_turns
        return Observation(text, self.draw.choice((0.0, 0.5)), is_done)
