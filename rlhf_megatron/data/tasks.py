"""Generated tasks by name (`data.task`). A task is a function from its parameters to `TaskRows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_megatron.data.arithmetic import AdditionParams, FewShotParams, addition, few_shot_addition
from rlhf_megatron.data.reasoning_gym import ReasoningGymParams, reasoning_gym
from rlhf_megatron.data.rows import TaskRows
from rlhf_megatron.registry import Registry

TASKS: Registry[Callable[[Any], TaskRows]] = Registry("task")
TASKS.register("addition", AdditionParams)(addition)
TASKS.register("few_shot_addition", FewShotParams)(few_shot_addition)
TASKS.register("reasoning_gym", ReasoningGymParams)(reasoning_gym)
