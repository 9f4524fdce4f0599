"""Functions such as users write, well and badly. Run in worker processes
by tests/unit/rewards/test_rewards_pool.py.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import fcntl
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any


def is_right(response: str, label: str) -> bool:
    return response == label


def is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def behave(response: str, label: str, extra: dict[str, Any]) -> Any:
    """What the response says. Any other response is compared with the label."""
    match response.split("#")[0]:
        case "sleep":
            time.sleep(3600)
        case "stubborn sleep":
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            ctypes.CDLL(None).sleep(3600)
        case "burn":
            pow(3, 10**9)  # in C, which looks at no signal
        case "recurse":
            return behave(response, label, extra)
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die once":
            marker = Path(extra["marker"])
            if not marker.exists():
                marker.touch()
                os._exit(1)
            return 1.0
        case "memory":
            return len(bytearray(64 * 2**30))
        case "garbage":
            return eval(extra["value"], {})
        case "child":
            child = os.fork()
            if child == 0:
                time.sleep(3600)
            with open(extra["pids"], "a") as file:
                file.write(f"{child}\n")
            os._exit(7)
        case "fork":
            os.fork()  # both come back
            return float(extra["number"])
        case "daemon":
            return daemon(extra["pids"])
        case "write":
            for number in range(3, 64):
                if is_socket(number):
                    os.write(number, extra["bytes"].encode("latin-1"))
            return 1.0
        case "stdin":
            return float(sys.stdin.read() == "")
        case "pid":
            return {"score": 1.0, "pid": float(os.getpid()), "parent": float(os.getppid())}
        case "files":
            return {"score": 0.0, "sockets": sum(is_socket(number) for number in range(3, 4096))}
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            return 0.5
        case "print":
            print("a word from the reward")
            return 0.0
        case "cpu":
            end = time.process_time() + float(extra["seconds"])
            while time.process_time() < end:
                pass
            return 1.0
    return float(response == label)


def daemon(pids: str) -> float:
    """Forked twice, in a session of its own: no child of the worker,
    and not in its process group.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            Path(pids).write_text(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)
    os.waitpid(child, 0)
    while not (Path(pids).exists() and Path(pids).read_text()):
        time.sleep(0.01)
    return 1.0


def with_parts(response: str, num_tokens: int, scale: float = 1.0) -> dict[str, float]:
    return {"score": scale * len(response), "tokens": num_tokens}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """As verl's users write it."""
    if solution_str.startswith("["):
        return {"score": 0.0, "place": ast.literal_eval(solution_str).index(ground_truth)}
    is_right = solution_str == ground_truth and extra_info == {"index": 3} and data_source == "test"
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": solution_str}


def needs_more(response: str, judge: object) -> float:
    return 0.0


async def asynchronous(response: str) -> float:
    await asyncio.sleep(0.001)
    if response == "raise":
        raise KeyError("no such thing")
    return float(response)


async def alone(label: str, seconds: float = 0.01) -> float:
    """1 where no other worker is in here. `label`: a file."""
    with open(label, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0.0
        await asyncio.sleep(seconds)
        return 1.0


NUMBER = 3
