"""Messages between controller, template and workers: a line of JSON each. Nothing that a worker sends is unpickled."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rlhf_megatron.rewards.scorers.base import RewardResult, RewardSample

CONTROL_BYTES = 1 << 17  # of a message between controller and template, at most
READ_BYTES = 1 << 20
REPLY_BYTES = 1 << 24  # of a line that a worker writes, at most


@dataclass(frozen=True)
class Task:
    """One call of a reward. `component` is its position among the rewards that run in processes."""

    component: int
    sample: RewardSample


def encode(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def encode_tasks(token: str, tasks: dict[int, Task]) -> bytes:
    """`token`: a secret of this message, which every reply to it has. The keys number the tasks."""
    return encode([token, [[number, task.component, *asdict(task.sample).values()] for number, task in tasks.items()]])


def decode_tasks(line: bytes) -> tuple[str, dict[int, Task]]:
    token, tasks = json.loads(line)
    return token, {number: Task(component, RewardSample(*fields)) for number, component, *fields in tasks}


@dataclass(frozen=True)
class Reply:
    """The answer of a worker to one task."""

    token: str  # with the number it tells a reply from whatever a reward writes into the worker's socket
    number: int
    result: RewardResult
    is_last: bool  # it ends now, its memory being used up


def decode_reply(line: bytes) -> Reply:
    """Raises ValueError for what is no reply."""
    try:
        return msgspec.convert(json.loads(line), Reply)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} is no reply: {error}.") from None


class Lines:
    """Reads whole lines from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def read(self) -> Iterator[bytes]:
        """Return the lines that one read completes. Raises EOFError at the end, ValueError for an endless line."""
        try:
            data = self.connection.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > REPLY_BYTES:
            raise ValueError(f"a line of more than {REPLY_BYTES} bytes is no reply.")
        yield from lines
