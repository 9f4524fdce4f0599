"""The processes behind a pool, as the controller sees them: one template, and the workers
that it forks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.plugins import list_loaded_plugins
from rlhf_megatron.rewards.process_stopwatch import ProcessStopwatch
from rlhf_megatron.rewards.service.worker_messages import (
    CONTROL_BYTES,
    RewardTask,
    RewardTaskReply,
    SocketLineReader,
    decode_reply,
    encode_json_line,
    encode_tasks,
)

logger = logging.getLogger(__name__)
STARTUP_S = 300.0  # for imports
SEND_S = 30.0  # a worker that reads nothing for so long is broken
STOP_S = 5.0
MAX_LOG_BYTES = 1 << 24
REWARD_TEMPLATE = "rlhf_megatron.rewards.service.worker_template"
Worker = TypeVar("Worker")


@dataclass(eq=False)
class RewardWorkerProcess:
    """One forked worker process. The batch that uses it gives it tasks."""

    pid: int
    connection: socket.socket
    line_reader: SocketLineReader = field(init=False)
    # numbers of the tasks that it has, the one it works at first
    task_numbers: deque[int] = field(default_factory=deque)
    batch_token: str = ""  # of these
    started_at: float = 0.0  # that one, as far as the controller knows
    stopwatch: ProcessStopwatch = field(init=False)  # of that one, once it has taken a while
    is_used: bool = False
    is_ending: bool = False  # it has said that it ends

    def __post_init__(self) -> None:
        """Make the reader and the stopwatch of the process."""
        self.line_reader = SocketLineReader(self.connection)
        self.stopwatch = ProcessStopwatch(self.pid)

    @property
    def is_connected(self) -> bool:
        """Return whether the connection to the worker is open on this side."""
        return self.connection.fileno() >= 0

    @property
    def is_idle(self) -> bool:
        """Return whether the worker can take tasks: connected, not about to end, without tasks."""
        return self.is_connected and not self.is_ending and not self.task_numbers

    def start_task_clock(self) -> None:
        """Start the clock of the worker's first task anew."""
        self.started_at = time.monotonic()
        self.stopwatch.reset()

    def send_tasks(self, tasks: dict[int, RewardTask]) -> None:
        """Send the tasks to the worker, which keeps them as its own, and start the clock. Raise
        OSError where the worker cannot be reached; where it had ended before, it keeps no tasks.
        """
        self.batch_token = secrets.token_hex(16)
        data = encode_tasks(self.batch_token, tasks)
        self.connection.settimeout(SEND_S)
        num_sent = self.connection.send(data)
        self.task_numbers.extend(tasks)
        self.is_used = True
        self.start_task_clock()
        # sending nothing fails, too, where the task has ended the worker already
        if num_sent < len(data):
            self.connection.sendall(data[num_sent:])

    def read_replies(self) -> Iterator[RewardTaskReply]:
        """Read once and yield the replies that are complete. Each reply must be to the first task,
        which it removes.

        Raise ValueError for anything else that was written into the worker's socket, EOFError or
        OSError at the end of the socket.
        """
        for line in self.line_reader.read_lines():
            reply = decode_reply(line)
            if not self.task_numbers or (reply.token, reply.number) != (
                self.batch_token,
                self.task_numbers[0],
            ):
                raise ValueError(f"a reply to task {reply.number} was not asked for.")
            self.task_numbers.popleft()
            self.start_task_clock()
            self.is_ending = reply.is_last
            yield reply


@dataclass(frozen=True)
class WorkerEnd:
    """A worker process is gone."""

    pid: int
    exit_code: int  # negative: the signal that ended it


@cache
def log_note_once(note: str) -> None:
    """Log the note as a warning, once in this process."""
    logger.warning(note)


def shorten_log(log_path: Path) -> None:
    """Keep the last MAX_LOG_BYTES / 2 bytes of a log that is longer than MAX_LOG_BYTES. Template
    and workers append to it.
    """
    with contextlib.suppress(OSError):
        if log_path.stat().st_size > MAX_LOG_BYTES:
            with log_path.open("r+b") as file:
                file.seek(-MAX_LOG_BYTES // 2, os.SEEK_END)
                rest = file.read(MAX_LOG_BYTES // 2)
                file.seek(0)
                file.write(b"[what was before is left out]\n" + rest)
                file.truncate()


def start_reward_template(
    rewards: Sequence[Mapping[str, Any]], log_path: Path | None, num_machines: int
) -> TemplateProcess[RewardWorkerProcess]:
    """Start the template process of reward workers and return it. `rewards` has the name, the
    params and the configuration key of each reward. The process writes its output to `log_path`
    (None: nowhere). `num_machines` is the number of machines with workers of the run. Raise
    ValueError where the parameters are too long to send.
    """
    message = {"rewards": list(rewards), "num_machines": num_machines}
    return TemplateProcess(REWARD_TEMPLATE, message, log_path, "rewards", RewardWorkerProcess)


class TemplateProcess(Generic[Worker]):
    """A process that forks workers for code of users: rewards, or environments. It starts in the
    background; call `wait_until_ready` first. Make it on a thread that outlives it, such as the
    main thread.
    """

    def __init__(
        self,
        module: str,
        message: Mapping[str, Any],
        log_path: Path | None,
        part_name: str,
        make_worker: Callable[[int, socket.socket], Worker],
    ) -> None:
        """Start the process, which runs `module` and gets `message` and the plugins of this
        process. It writes its output to `log_path` (None: nowhere). `part_name` is what its workers
        run, in the plural, for messages. `make_worker` makes of a worker's pid and socket what
        `read_messages` yields. Raise ValueError where the message is too long to send.
        """
        data = encode_json_line({"plugins": list_loaded_plugins(), **message})
        if len(data) > CONTROL_BYTES:
            raise ValueError(
                f"the parameters of the {part_name} have {len(data)} bytes, at most"
                f" {CONTROL_BYTES} can be sent; put long texts into a file that the code reads."
            )
        self.log_path = log_path
        self._part_name = part_name
        self._make_worker = make_worker
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(log_path or os.devnull, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is not for it
                env={
                    "OMP_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    **make_import_environment(os.environ),
                    "PYTHONUNBUFFERED": "1",
                },
            )
        self.control.send(data)

    @property
    def pid(self) -> int:
        """Return the pid of the template process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the template has loaded the users' code, and log its notes. Raise ConfigError
        with the problems of that code, ValueError where the template ends or takes longer than
        STARTUP_S.
        """
        self.control.settimeout(STARTUP_S)
        try:
            data = self.control.recv(CONTROL_BYTES)
        except TimeoutError:
            raise ValueError(
                f"the {self._part_name} were not loaded after {STARTUP_S:.0f} s; look for a"
                " module that waits or downloads when it is imported."
            ) from None
        except ConnectionResetError:
            data = b""
        message = json.loads(data) if data else {}
        if "problems" in message:
            raise ConfigError(message["problems"])
        if "ready" not in message:
            code = self._process.wait(STOP_S)
            raise ValueError(
                f"the process that loads the {self._part_name} ended with"
                f" code {code}{self._format_log_tail()}"
            )
        for note in message["notes"]:
            log_note_once(note)

    def request_workers(self, num_workers: int) -> None:
        """Ask the template to fork workers; `read_messages` yields each of them. A template that is
        gone raises nothing here.
        """
        with contextlib.suppress(OSError):  # it has gone itself, which `read_messages` tells
            self.control.send(encode_json_line({"fork": num_workers}))

    def kill_worker(self, pid: int) -> None:
        """Ask the template to kill a worker and its process group; `read_messages` yields a
        `WorkerEnd`, as for any other end.
        """
        with contextlib.suppress(OSError):
            self.control.send(encode_json_line({"kill": pid}))

    def read_messages(self) -> Iterator[Worker | WorkerEnd]:
        """Wait for one message and yield it: a worker that was forked, or the end of a worker.
        Raise EOFError when the template is gone.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, CONTROL_BYTES, 1)
        except ConnectionResetError:
            data = b""
            descriptors = []
        if not data:
            raise EOFError
        message = json.loads(data)
        if "worker" in message:
            yield self._make_worker(message["worker"], socket.socket(fileno=descriptors[0]))
        else:
            yield WorkerEnd(message["ended"], message["code"])

    def close(self) -> None:
        """End the template and all its workers. Safe to call twice."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._process.kill()
        self._process.wait()

    def _format_log_tail(self, num_lines: int = 20) -> str:
        """Return the end of a message with the last lines of the log; "." without a log."""
        if self.log_path is None:
            return "."
        lines = self.log_path.read_text(errors="replace").splitlines()[-num_lines:]
        return f"; the end of {self.log_path}:\n" + "\n".join(lines)
