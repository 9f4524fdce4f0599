"""A worker process: it reads tasks, calls the rewards and answers one line a task. It is forked
off the template.

Nothing that a reward raises or returns may pass for a score. The pool deals with what a sample does
to the process (loops, crashes, memory): the worker only answers for what returns.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.rewards.scorers.reward_types import (
    BAD_RESULT,
    MALFORMED,
    TIMEOUT,
    BadResultError,
    MemoryLimitedParams,
    Reward,
    RewardResult,
    RewardSample,
    make_masked_result,
)
from rlhf_megatron.rewards.service.worker_messages import (
    RewardTaskReply,
    decode_tasks,
    encode_json_line,
)

PR_SET_CHILD_SUBREAPER = 36
GIB = 2**30

TRACEBACK_LINES = 12

MEMORY_ERROR = make_masked_result(MemoryError.__name__).status
MEMORY_GIB = 4.0  # where the params do not say


def adopt_orphans() -> None:
    """Make what this process's children leave behind a child of this process, on Linux. Failures
    are ignored.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def limit_memory(max_gib: float) -> None:
    """Limit this process's writable memory to `max_gib` GiB; larger allocations raise MemoryError.
    Libraries and mapped files do not count.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(max_gib * GIB), hard))


def call_reward(reward: Reward, sample: RewardSample, params: Any) -> RewardResult:
    """Call the reward and return its result. An exception, or a value that is no valid result,
    gives a masked result with the end of the traceback.
    """
    try:
        return check_reward_result(reward(sample, params))
    except BadResultError as error:
        return make_masked_result(BAD_RESULT, format_traceback_end(error))
    except (
        Exception,
        SystemExit,
    ) as error:  # somebody else's code: what it raises is told, counted and left out
        return make_masked_result(type(error).__name__, format_traceback_end(error))


def check_reward_result(result: object) -> RewardResult:
    """Return `result` if it is a valid RewardResult. Raise BadResultError where it is none, or is
    malformed or timeout with a score above 0.
    """
    if not isinstance(result, RewardResult):
        raise BadResultError(f"a reward must return a RewardResult, not {type(result).__name__}.")
    if result.status in (MALFORMED, TIMEOUT) and result.score > 0:
        raise BadResultError(
            f"score ({result.score}) must be at most 0 when the status is {result.status}."
        )
    return result


def format_traceback_end(error: BaseException) -> str:
    """Return the last TRACEBACK_LINES lines of the error's traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])


@dataclass(frozen=True)
class LoadedReward:
    """A reward with its parameters, prepared."""

    reward: Reward
    params: Any

    @property
    def memory_gib(self) -> float:
        """Return the memory in GiB that a worker may use for this reward."""
        return (
            self.params.max_memory_gib
            if isinstance(self.params, MemoryLimitedParams)
            else MEMORY_GIB
        )


def serve_reward_tasks(rewards: Sequence[LoadedReward], connection: socket.socket) -> None:
    """Score tasks from the connection and answer one line for each, until the controller closes the
    connection, or a sample has used up the memory.
    """
    own_pid = os.getpid()
    with connection.makefile("rb") as lines:
        for line in lines:
            token, tasks = decode_tasks(line)
            for number, task in tasks.items():
                loaded = rewards[task.component_index]
                limit_memory(loaded.memory_gib)
                result = call_reward(loaded.reward, task.sample, loaded.params)
                if os.getpid() != own_pid:
                    # a child that the reward forked and let come back: the answer is its
                    # parent's to give
                    os._exit(0)
                is_last = result.status == MEMORY_ERROR
                connection.sendall(
                    encode_json_line(
                        asdict(RewardTaskReply(token, number, _to_plain_result(result), is_last))
                    )
                )
                if is_last:
                    return


def _to_plain_result(result: RewardResult) -> RewardResult:
    """Return the result with plain numbers and texts in place of subclasses, for JSON."""
    parts = {str(name): float(value) for name, value in result.parts.items()}
    return RewardResult(float(result.score), str(result.status), parts, result.error)
