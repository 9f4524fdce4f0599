"""The worker process of episodes: one event loop, in which the episodes of a part of a step run.

    python -m rlhf_megatron.agents.worker CONTROL_FD PARENT_PID

starts the template that workers are forked off: it has imported the plugins and loaded the
tokenizer, so that a new worker costs milliseconds. A worker ends when the controller closes its
connection.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_megatron.agents.dialogue import DialogueFormat, make_dialogue_format
from rlhf_megatron.agents.episode import make_environment, run_episode
from rlhf_megatron.agents.episode_messages import (
    CancelEpisode,
    DeliverTurn,
    ReportBlockedLoop,
    ReportEpisode,
    RequestTurn,
    StartEpisode,
    WorkerReport,
    decode_order,
    encode_worker_message,
)
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.import_folders import protect_imports
from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.registry import load_registry
from rlhf_megatron.rewards.service.reward_worker import format_traceback_end
from rlhf_megatron.rewards.service.worker_messages import CONTROL_BYTES, encode_json_line
from rlhf_megatron.rewards.service.worker_template import WorkerTemplate

MAX_LINE_BYTES = 1 << 26  # of an order
BLOCKED_S = 1.0  # until the watching thread reports code that keeps the event loop to itself
WATCH_S = 0.2


@dataclass
class _RunningEpisode:
    """An episode of this worker."""

    order: StartEpisode
    task: asyncio.Task[None] | None = None
    # the answer that the episode waits for
    awaited_turn: asyncio.Future[DeliverTurn] | None = None


class EpisodeWorker:
    """Runs the episodes that the controller orders, in one event loop."""

    def __init__(self, dialogue_format: DialogueFormat, connection: socket.socket) -> None:
        """Take what all episodes share. `connection` leads to the controller."""
        self._dialogue_format = dialogue_format
        self._connection = connection
        self._episode_by_key: dict[int, _RunningEpisode] = {}
        self._write_lock = threading.Lock()
        self._loop_turned_at = time.monotonic()

    async def serve(self) -> None:
        """Carry out orders until the controller closes the connection."""
        reader, _ = await asyncio.open_connection(sock=self._connection, limit=MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch_loop, args=(loop,), daemon=True).start()
        turning = asyncio.create_task(self._mark_turns())
        try:
            while line := await reader.readline():
                self._carry_out(line)
        except ConnectionError:
            pass
        finally:
            turning.cancel()

    def _carry_out(self, line: bytes) -> None:
        """Carry out one order."""
        order = decode_order(line)
        if isinstance(order, StartEpisode):
            episode = _RunningEpisode(order)
            self._episode_by_key[order.key] = episode
            episode.task = asyncio.create_task(self._run_episode(episode), name=str(order.key))
            return
        running = self._episode_by_key.get(order.key)
        if running is None or running.order.attempt != order.attempt:
            return  # it has ended meanwhile
        if isinstance(order, CancelEpisode):
            assert running.task is not None
            running.task.cancel()
        elif running.awaited_turn is not None and not running.awaited_turn.done():
            running.awaited_turn.set_result(order)

    async def _run_episode(self, episode: _RunningEpisode) -> None:
        """Run one episode, and report how it ended; an episode that is cancelled reports
        `aborted`, so that the controller knows that its code has come back.
        """
        order = episode.order

        async def take_turn(request: RequestTurn) -> DeliverTurn:
            """Ask the controller for a turn of the policy, and wait for it."""
            episode.awaited_turn = asyncio.get_running_loop().create_future()
            self._send_report(request)
            return await episode.awaited_turn

        try:
            report = await run_episode(order, self._dialogue_format, take_turn)
        except asyncio.CancelledError:
            report = ReportEpisode(order.key, order.attempt, "aborted", None)
        except Exception as error:  # no fault of the environment's: its own are in the report
            report = ReportEpisode(
                order.key,
                order.attempt,
                "environment_failed",
                None,
                error=format_traceback_end(error),
            )
        if self._episode_by_key.get(order.key) is episode:
            del self._episode_by_key[order.key]
        self._send_report(report)

    def _send_report(self, report: WorkerReport) -> None:
        """Write a report into the connection. The controller reads all the time, so this does not
        wait for long. Messages of an environment that JSON does not have are left out.
        """
        try:
            line = encode_worker_message(report)
        except (TypeError, ValueError) as error:
            assert isinstance(report, ReportEpisode), "all else is numbers"
            note = [{"role": "note", "content": f"The talk cannot be shown: {error}."}]
            line = encode_worker_message(
                ReportEpisode(
                    report.key,
                    report.attempt,
                    report.end,
                    report.reward,
                    report.turn_rewards,
                    report.metrics,
                    note,
                    report.error,
                )
            )
        with self._write_lock:
            _send_all(self._connection, line)

    async def _mark_turns(self) -> None:
        """Note again and again that the event loop turns."""
        while True:
            self._loop_turned_at = time.monotonic()
            await asyncio.sleep(WATCH_S)

    def _watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report, on a thread of its own, the episode whose async code keeps the event loop to
        itself. Code in C that holds Python's lock stops this thread too; the controller then misses
        everything.
        """
        while True:
            time.sleep(WATCH_S)
            blocked_s = time.monotonic() - self._loop_turned_at
            task = asyncio.current_task(loop)
            if blocked_s < BLOCKED_S or task is None:
                continue
            running = next(
                (one for one in list(self._episode_by_key.values()) if one.task is task), None
            )
            if running is not None:
                order = running.order
                self._send_report(ReportBlockedLoop(order.key, order.attempt, blocked_s))


def _send_all(connection: socket.socket, data: bytes) -> None:
    """Write all bytes into a socket that may not block; wait where it is full. A controller that is
    gone is no error: this process ends with it.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            return


def serve_episodes(dialogue_format: DialogueFormat, connection: socket.socket) -> None:
    """Run a worker until the controller closes the connection."""
    asyncio.run(EpisodeWorker(dialogue_format, connection).serve())


def check_environments(environments: list[Mapping[str, Any]]) -> list[str]:
    """Make each environment once, and return the problems: a wrong parameter shows at the start of
    a run, not in its first episode. Each entry has the name, the params and the setting.
    """
    problems = []
    for entry in environments:
        try:
            make_environment(entry["name"], entry["params"])
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"{entry['key']}: {error}")
        except (Exception, SystemExit) as error:  # code of a user
            problems.append(
                f"{entry['key']} ({entry['name']}) cannot be made:\n{format_traceback_end(error)}"
            )
    return problems


def main() -> None:
    """Run the template: load plugins and tokenizer, report problems or readiness, and fork workers
    for the controller. sys.argv has the control socket's descriptor and the parent's pid.
    """
    control_fd, parent = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the controller answers to them
    end_with_parent(signal.SIGKILL, parent)
    faulthandler.enable()
    protect_imports()
    control = socket.socket(fileno=control_fd)
    message = json.loads(control.recv(CONTROL_BYTES))
    load_registry("environment")
    load_plugins(message["plugins"])  # the controller has run them too, so they can be
    problems = check_environments(message["environments"])
    if problems:
        control.send(encode_json_line({"problems": [problem[:4000] for problem in problems[:8]]}))
        return
    tokenizer = load_tokenizer(message["tokenizer_path"], message["model_path"])
    data = build_params(DataConfig, message["data"], "data")
    dialogue_format = make_dialogue_format(tokenizer, data, message["stop"])
    gc.collect()
    gc.freeze()  # keeps the memory that workers share from being copied for nothing
    sys.stdout.flush()
    control.send(encode_json_line({"ready": True, "notes": []}))
    WorkerTemplate(partial(serve_episodes, dialogue_format), control).serve_controller()


if __name__ == "__main__":
    main()
