"""A plugin: environments that do what the label of a row says, {"fault", "turn", ...}. Turn -1 is
`reset`, and 99 `close`; a row without a fault is a game that answers with digits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from rlhf_megatron.agents.environment import (
    ENVIRONMENTS,
    Chat,
    Environment,
    EpisodeOver,
    Observation,
    Outcome,
    Task,
    Turn,
    TurnEnvironment,
)

IN_CLOSE = 99


class StrangeError(BaseException):
    """No Exception."""


def find_worker() -> Any:
    """The worker that this process is."""
    [worker] = [thing for thing in gc.get_objects() if type(thing).__name__ == "EpisodeWorker"]
    return worker


def write_as_worker(data: bytes) -> None:
    """Into the worker's own socket."""
    connection = socket.socket(fileno=os.dup(find_worker()._connection.fileno()))
    connection.setblocking(True)
    connection.sendall(data)


def commit_fault(fault: str, label: dict[str, Any]) -> Observation | None:
    """Do it, in plain code. Returns an observation that nobody should take, or None."""
    if fault == "raise":
        raise KeyError("no such thing")
    if fault == "stop_iteration":
        next(iter(()))
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "strange":
        raise StrangeError("strange")
    if fault == "cancelled":
        raise asyncio.CancelledError
    if fault == "exit":
        os._exit(3)
    if fault == "sys_exit":
        sys.exit("bye")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill_template":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "hang":
        time.sleep(label.get("seconds", 1000))
    if fault == "burn":
        while True:
            pass
    if fault == "hold_lock":
        ctypes.PyDLL(None).sleep(label.get("seconds", 1000))  # C code that keeps Python's lock
    if fault == "fork":
        os.fork()
    if fault == "children":
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if fault == "print":
        for _ in range(50):
            print("x" * 100, flush=True)
        print("y" * 100, file=sys.stderr)
    if fault == "close_descriptors":
        os.closerange(3, 1000)
    if fault == "socket_garbage":
        write_as_worker(b"garbage\n")
    if fault == "socket_flood":
        write_as_worker(b"x" * (1 << 25))
    if fault == "forged_request":
        for episode in list(find_worker()._episodes.values()):
            order = episode.order
            fields = {
                "key": order.key,
                "attempt": order.attempt,
                "new_ids": [2],
                "max_new_tokens": label["max_new_tokens"],
            }
            write_as_worker(json.dumps(["RequestTurn", fields]).encode() + b"\n")
    return {
        "nothing": None,
        "text": "1",
        "reward_nan": Observation("1", reward=float("nan")),
        "reward_text": Observation("1", reward="1"),  # type: ignore[arg-type]
        "messages_set": Observation({"1"}),  # type: ignore[arg-type]
        "message_text": Observation(["1"]),  # type: ignore[list-item]
        "message_number": Observation([{"role": "user", "content": 1}]),
        "message_object": Observation([{"role": "user", "content": "1", "x": object()}]),
        "surrogate": Observation("1\ud800"),
        "metric_text": Observation("1", metrics={"x": "y"}),  # type: ignore[dict-item]
        "many_metrics": Observation("1", metrics={str(number): 1.0 for number in range(1000)}),
        "flood": Observation("1" * 100_000_000),
        "many_messages": Observation([{"role": "user", "content": ""}] * 1_000_000),
        "error_flood": Observation("1"),
    }.get(fault, Observation("0"))  # type: ignore[return-value]


class Game:
    """What both kinds share."""

    def begin(self, task: Task) -> Observation:
        self.label = json.loads(task.label)
        self.random = random.Random(task.seed)
        self.num_turns = self.label.get("num_turns") or self.random.randint(2, 5)
        self.number = 0
        return Observation(f"{task.seed % 100}")

    def answer(self, turn: Turn) -> Observation:
        self.number += 1
        texts = "".join(str(self.random.randint(0, 9)) for _ in range(self.random.randint(1, 4)))
        is_right = turn.text.startswith("1")
        is_done = self.number == self.num_turns
        return Observation(texts, float(is_right), is_done, {"right": float(is_right)})

    def is_due(self, turn: int) -> bool:
        if not self.label.get("fault") or self.label.get("turn", -1) != turn:
            return False
        once = self.label.get("once")  # the fault does not come again
        if once and os.path.exists(once):
            return False
        if once:
            with open(once, "w"):
                pass
        return True


@ENVIRONMENTS.register("faulty")
class FaultyEnvironment(Game, TurnEnvironment):
    """Of plain functions."""

    is_deterministic = True

    def reset(self, task: Task) -> Observation:
        observation = self.begin(task)
        if self.is_due(-1):
            return commit_fault(self.label["fault"], self.label)  # type: ignore[return-value]
        return observation

    def step(self, turn: Turn) -> Observation:
        time.sleep(self.label.get("step_s", 0.0))
        if self.is_due(turn.number):
            observation = commit_fault(self.label["fault"], self.label)
            if self.label["fault"] not in ("fork", "print", "children"):
                return observation  # type: ignore[return-value]
        return self.answer(turn)

    def close(self) -> None:
        if path := getattr(self, "label", {}).get("closed"):
            with open(path, "a") as file:
                file.write("closed\n")
        if getattr(self, "label", None) and self.is_due(IN_CLOSE):
            commit_fault(self.label["fault"], self.label)


@ENVIRONMENTS.register("faulty_async")
class FaultyAsyncEnvironment(Game, TurnEnvironment):
    """Of async functions, with faults that only they have."""

    async def reset(self, task: Task) -> Observation:
        observation = self.begin(task)
        if self.is_due(-1):
            return await self.commit()
        return observation

    async def step(self, turn: Turn) -> Observation:
        await asyncio.sleep(self.label.get("step_s", 0.0))
        return await self.commit() if self.is_due(turn.number) else self.answer(turn)

    async def close(self) -> None:
        if path := getattr(self, "label", {}).get("closed"):
            with open(path, "a") as file:
                file.write("closed\n")
        if getattr(self, "label", None) and self.is_due(IN_CLOSE):
            await self.commit()

    async def commit(self) -> Observation:
        fault = self.label["fault"]
        if fault == "hang":
            await asyncio.sleep(1000)
        if fault == "block":
            time.sleep(self.label.get("seconds", 1000))
        if fault == "ignore_cancel":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
        if fault == "hang_in_thread":
            await asyncio.to_thread(time.sleep, 1000)
        if fault == "leave_task":
            self.left = asyncio.create_task(asyncio.to_thread(time.sleep, 0.01))
            return Observation("0")
        if fault == "stop_loop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(1000)
        return commit_fault(fault, self.label)  # type: ignore[return-value]


@ENVIRONMENTS.register("faulty_run")
class FaultyRun(Environment):
    """Code that calls `chat` by itself."""

    async def run(self, task: Task, chat: Chat) -> Outcome:
        label = json.loads(task.label)
        fault = label["fault"]
        messages = [*task.messages]
        num_turns = 0
        while True:
            try:
                turn = await chat(messages)
            except EpisodeOver as over:
                if fault == "return_at_end":
                    return Outcome(0.5, (1.0,) * num_turns, {"turns": float(num_turns)})
                if fault == "swallow":
                    continue
                if fault == "raise_at_end":
                    raise ValueError("at the end") from over
                raise
            except BaseException:
                if fault == "swallow_all":
                    continue
                raise
            num_turns += 1
            messages += [turn.message, {"role": "user", "content": "1"}]
            if fault == "change_past":
                messages[0] = {"role": "user", "content": "2"}
            if fault == "early_over":
                raise EpisodeOver("max_turns")
            if fault == "two_calls":
                await asyncio.gather(chat(messages), chat(messages))
            if fault == "wrong_count":
                return Outcome(1.0, (1.0,) * 5)
            if fault == "no_reward":
                return Outcome()
            if fault == "return_at_deadline":
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    return Outcome(1.0)
