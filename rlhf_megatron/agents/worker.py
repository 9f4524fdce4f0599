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
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_megatron.agents.answer_reader import AnswerReader, make_answer_reader
from rlhf_megatron.agents.dialogue import DialogueFormat, make_dialogue_format
from rlhf_megatron.agents.episode import CLOSE_S, EpisodeAttempt, make_environment
from rlhf_megatron.agents.episode_messages import (
    CancelEpisode,
    DeliverTurn,
    ReportAlive,
    ReportEpisode,
    ReportRelease,
    RequestTurn,
    StartEpisode,
    WorkerReport,
    decode_order,
    encode_worker_message,
)
from rlhf_megatron.agents.mcp_tools import close_mcp_servers
from rlhf_megatron.agents.user_code import CURRENT_CODE, EpisodeCode, TaskOwners
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
MARK_S = 0.2  # between two marks that the event loop turns
WATCH_S = 1.0  # between two reports that the process is alive
# A thread that computes gives Python's lock back after this, in place of 0.005 s: the event loop
# waits for the lock after each system call.
SWITCH_S = 0.0005
OOM_SCORE = "1000"  # the kernel's mark of what is ended first where memory runs out


@dataclass
class _RunningEpisode:
    """An episode of this worker, until its code has come back."""

    order: StartEpisode
    task: asyncio.Task[bool] | None = None
    # the answer that the episode waits for
    awaited_turn: asyncio.Future[DeliverTurn] | None = None
    is_over: bool = False  # it has reported, or was cancelled


class EpisodeWorker:
    """Runs the episodes that the controller orders, in one event loop."""

    def __init__(
        self,
        dialogue_format: DialogueFormat,
        answer_reader: AnswerReader,
        connection: socket.socket,
    ) -> None:
        """Take what all episodes share. `connection` leads to the controller."""
        self._dialogue_format = dialogue_format
        self._answer_reader = answer_reader
        self._connection = connection
        self._episodes: dict[int, _RunningEpisode] = {}  # by attempt
        self._task_owners = TaskOwners()
        self._write_lock = threading.Lock()
        self._loop_turned_at = time.monotonic()
        self._pid = os.getpid()

    async def serve(self) -> None:
        """Carry out orders until the controller closes its side of the connection; then end all
        episodes, and close their environments.
        """
        loop = asyncio.get_running_loop()
        self._task_owners.watch_loop(loop)
        os.register_at_fork(after_in_child=partial(_detach_child, self._connection.fileno()))
        reader, _ = await asyncio.open_connection(sock=self._connection, limit=MAX_LINE_BYTES)
        threading.Thread(target=self._watch_loop, args=(loop,), daemon=True).start()
        turning = asyncio.create_task(self._mark_turns())
        try:
            while line := await reader.readline():
                self._carry_out(line)
        except ConnectionError:
            pass
        for episode in list(self._episodes.values()):
            self._cancel_episode(episode)
        leaving = [one.task for one in self._episodes.values() if one.task is not None]
        if leaving:
            await asyncio.wait(leaving, timeout=CLOSE_S)
        turning.cancel()
        await close_mcp_servers()

    def _carry_out(self, line: bytes) -> None:
        """Carry out one order."""
        self._exit_if_forked()
        order = decode_order(line)
        if isinstance(order, StartEpisode):
            episode = _RunningEpisode(order)
            self._episodes[order.attempt] = episode
            episode.task = asyncio.create_task(self._run_episode(episode))
            # also where the task is cancelled before it has begun
            episode.task.add_done_callback(partial(self._release_episode, episode))
            return
        running = self._episodes.get(order.attempt)
        if running is None:
            return  # it has ended meanwhile
        if isinstance(order, CancelEpisode):
            self._cancel_episode(running)
        elif running.awaited_turn is not None and not running.awaited_turn.done():
            running.awaited_turn.set_result(order)

    @staticmethod
    def _cancel_episode(episode: _RunningEpisode) -> None:
        """End an episode that goes on; do not disturb the closing of one that is over."""
        assert episode.task is not None, "an episode has a task from its start on"
        if not episode.is_over:
            episode.is_over = True
            episode.task.cancel()

    async def _run_episode(self, episode: _RunningEpisode) -> bool:
        """Run one episode, and report how it ended unless it was cancelled. Get its code back, and
        return whether all of it has come.
        """
        order = episode.order
        try:
            code = EpisodeCode(order.attempt)
            CURRENT_CODE.set(code)
            attempt = EpisodeAttempt(
                order,
                self._dialogue_format,
                self._answer_reader,
                partial(self._take_turn, episode),
                code,
            )
            with suppress(asyncio.CancelledError):
                report = await attempt.run()
                episode.is_over = True
                self._send_report(report)
            return await attempt.leave()
        except Exception as error:  # no fault of the environment's: its own are in the report
            if not episode.is_over:
                episode.is_over = True
                text = format_traceback_end(error)
                self._send_report(
                    ReportEpisode(order.key, order.attempt, "environment_failed", None, error=text)
                )
            return False

    def _release_episode(self, episode: _RunningEpisode, task: asyncio.Task[bool]) -> None:
        """Report that an episode's code has come back, or that it never will."""
        attempt = episode.order.attempt
        del self._episodes[attempt]
        self._send_report(ReportRelease(attempt, task.cancelled() or task.result()))

    async def _take_turn(self, episode: _RunningEpisode, request: RequestTurn) -> DeliverTurn:
        """Ask the controller for a turn of the policy, and wait for it."""
        episode.awaited_turn = asyncio.get_running_loop().create_future()
        self._send_report(request)
        return await episode.awaited_turn

    def _send_report(self, report: WorkerReport) -> None:
        """Write a report into the connection. The controller reads all the time, so this does not
        wait for long.
        """
        self._exit_if_forked()
        line = encode_worker_message(report)
        with self._write_lock:
            _send_all(self._connection, line)

    def _exit_if_forked(self) -> None:
        """End this process where it is a child that user code has forked and let come back: the
        episodes are its parent's to run.
        """
        if os.getpid() != self._pid:
            os._exit(0)

    async def _mark_turns(self) -> None:
        """Note again and again that the event loop turns."""
        while True:
            self._exit_if_forked()
            self._loop_turned_at = time.monotonic()
            await asyncio.sleep(MARK_S)

    def _watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the controller, on a thread of its own, that this process is alive, and whose async
        code keeps the event loop to itself. Code in C that holds Python's lock stops this thread
        too; the controller then misses its reports.
        """
        former_task = None
        while True:
            time.sleep(WATCH_S)
            blocked_s = max(0.0, time.monotonic() - self._loop_turned_at - MARK_S)
            task = asyncio.current_task(loop)
            attempt = None
            # a loop that gets no CPU is at another task each time, and none of them is to blame
            if blocked_s > 0 and task is not None and task is former_task:
                attempt = self._task_owners.find_attempt(task)
            former_task = task
            self._send_report(ReportAlive(blocked_s, attempt))


def _detach_child(connection_fd: int) -> None:
    """Put nothing in the place of the connection, in a child that user code has forked: it must
    neither read orders nor keep the connection open.
    """
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, connection_fd)
        os.close(nothing)


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


def serve_episodes(
    dialogue_format: DialogueFormat, answer_reader: AnswerReader, connection: socket.socket
) -> None:
    """Run a worker until the controller closes the connection. Where memory runs out, the kernel
    ends workers first: their episodes start again.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)
    sys.setswitchinterval(SWITCH_S)
    # not asyncio.run, which would wait for threads that do not come back
    loop = asyncio.new_event_loop()
    loop.run_until_complete(EpisodeWorker(dialogue_format, answer_reader, connection).serve())


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


def find_fork_hazards() -> list[str]:
    """Return a note where plugins have started threads in this process: a fork has none of them,
    and waits for ever for a lock that one of them holds.
    """
    with suppress(OSError):
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            return [
                f"plugins have started {num_threads - 1} threads in the process that workers of"
                " episodes are forked off, and a fork has no threads; start them in the"
                " environment's __init__ or reset."
            ]
    return []


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
    answer_reader = make_answer_reader(dialogue_format, data.apply_chat_template_kwargs)
    notes = find_fork_hazards()
    gc.collect()
    gc.freeze()  # keeps the memory that workers share from being copied for nothing
    sys.stdout.flush()
    control.send(encode_json_line({"ready": True, "notes": notes}))
    WorkerTemplate(
        partial(serve_episodes, dialogue_format, answer_reader), control
    ).serve_controller()


if __name__ == "__main__":
    main()
