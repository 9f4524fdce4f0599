"""Messages between controller, template and workers: a line of JSON each. Nothing that a worker sends is unpickled."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.rewards.scorers.base import RewardResult, RewardSample

CONTROL_BYTES = 1 << 17  # of a message between controller and template, at most
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Task:
    """One call of a reward. `component` is its position among the rewards that run in processes."""

    component: int
    sample: RewardSample


def encode(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def encode_tasks(tasks: list[Task]) -> bytes:
    return encode([[task.component, *asdict(task.sample).values()] for task in tasks])


def decode_tasks(line: bytes) -> list[Task]:
    return [Task(component, RewardSample(*fields)) for component, *fields in json.loads(line)]


@dataclass(frozen=True)
class Reply:
    """The answer of a worker to one task."""

    result: RewardResult
    is_last: bool  # it ends now, its memory being used up


def encode_reply(reply: Reply) -> bytes:
    return encode([asdict(reply.result), reply.is_last])


def decode_reply(line: bytes) -> Reply:
    result, is_last = json.loads(line)
    return Reply(RewardResult(**result), is_last)


class Lines:
    """Reads whole lines from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def read(self) -> Iterator[bytes]:
        """Return the lines that one read completes. Raises EOFError at the end of the stream."""
        try:
            data = self.connection.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from lines
