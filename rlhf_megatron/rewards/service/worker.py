"""A worker process: reads tasks, calls the rewards, answers one line a task. Forked off the template.

What a sample does to it (loops, crashes, memory) is the pool's business: the worker only answers for what returns.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rewards.scorers.base import Limited, Reward, RewardResult, masked
from rlhf_megatron.rewards.service.outcome import outcome
from rlhf_megatron.rewards.service.process_limits import limit_memory
from rlhf_megatron.rewards.service.wire import Reply, decode_tasks, encode_reply

MEMORY_ERROR = masked(MemoryError.__name__).status
MEMORY_GIB = 4.0  # where the params do not say


@dataclass(frozen=True)
class LoadedReward:
    """A reward with its parameters, prepared."""

    reward: Reward
    params: Any

    @property
    def memory_gib(self) -> float:
        return self.params.max_memory_gib if isinstance(self.params, Limited) else MEMORY_GIB


def serve(rewards: Sequence[LoadedReward], connection: socket.socket) -> None:
    """Until the controller closes the connection, or a sample has used up the memory."""
    with connection.makefile("rb") as lines:
        for line in lines:
            for task in decode_tasks(line):
                loaded = rewards[task.component]
                limit_memory(loaded.memory_gib)
                result = outcome(loaded.reward, task.sample, loaded.params)
                is_last = result.status == MEMORY_ERROR
                connection.sendall(_encode(Reply(result, is_last)))
                if is_last:
                    return


def _encode(reply: Reply) -> bytes:
    result = reply.result
    parts = {str(name): float(value) for name, value in result.parts.items()}
    plain = RewardResult(float(result.score), str(result.status), parts, result.error)
    return encode_reply(Reply(plain, reply.is_last))
