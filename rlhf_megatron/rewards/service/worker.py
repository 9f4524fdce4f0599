"""A worker process: it reads tasks, calls the rewards and answers one line a task. It is forked off the template.

Nothing that a reward raises or returns may pass for a score. The pool deals with what a sample does to the process
(loops, crashes, memory): the worker only answers for what returns.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.rewards.scorers.base import (
    BAD_RESULT,
    MALFORMED,
    TIMEOUT,
    BadResultError,
    Limited,
    Reward,
    RewardResult,
    RewardSample,
    masked,
)
from rlhf_megatron.rewards.service.wire import Reply, decode_tasks, encode

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GIB = 2**30


def set_process(option: int, value: int) -> None:
    """prctl, where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent: int) -> None:
    """This process is killed when its parent ends, however that ends. `parent`: its pid, to notice that it has."""
    set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def limit_memory(gibibytes: float) -> None:
    """Allocations beyond this fail with MemoryError. Counts what the process may write, not libraries or files."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gibibytes * GIB), hard))


TRACEBACK_LINES = 12


def outcome(reward: Reward, sample: RewardSample, params: Any) -> RewardResult:
    """Call the reward. What it raises, or returns in place of a result, is masked, with the end of its traceback."""
    try:
        return checked(reward(sample, params))
    except BadResultError as error:
        return masked(BAD_RESULT, end_of_traceback(error))
    except (Exception, SystemExit) as error:  # somebody else's code: what it raises is told, counted and left out
        return masked(type(error).__name__, end_of_traceback(error))


def checked(result: object) -> RewardResult:
    """Return `result` if it is a score. Raises BadResultError."""
    if not isinstance(result, RewardResult):
        raise BadResultError(f"a reward must return a RewardResult, not {type(result).__name__}.")
    if result.status in (MALFORMED, TIMEOUT) and result.score > 0:
        raise BadResultError(f"score ({result.score}) must be at most 0 when the status is {result.status}.")
    return result


def end_of_traceback(error: BaseException) -> str:
    """Return the last lines of its traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])


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
    """Answer tasks until the controller closes the connection, or a sample has used up the memory."""
    own_pid = os.getpid()
    with connection.makefile("rb") as lines:
        for line in lines:
            token, tasks = decode_tasks(line)
            for number, task in tasks.items():
                loaded = rewards[task.component]
                limit_memory(loaded.memory_gib)
                result = outcome(loaded.reward, task.sample, loaded.params)
                if os.getpid() != own_pid:
                    os._exit(0)  # a child that the reward forked and let come back: the answer is its parent's to give
                is_last = result.status == MEMORY_ERROR
                connection.sendall(encode(asdict(Reply(token, number, _plain(result), is_last))))
                if is_last:
                    return


def _plain(result: RewardResult) -> RewardResult:
    parts = {str(name): float(value) for name, value in result.parts.items()}
    return RewardResult(float(result.score), str(result.status), parts, result.error)
