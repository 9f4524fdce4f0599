"""Messages between controller, template and workers: a line of JSON each. Nothing that a worker
sends is unpickled.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from rlhf_megatron.rewards.scorers.reward_types import RewardResult, RewardSample

CONTROL_BYTES = 1 << 17  # of a message between controller and template, at most
READ_BYTES = 1 << 20
REPLY_BYTES = 1 << 24  # of a line that a worker writes, at most


@dataclass(frozen=True)
class RewardTask:
    """One call of a reward. `component_index` is its position among the rewards that
    run in processes.
    """

    component_index: int
    sample: RewardSample


def encode_json_line(message: Any) -> bytes:
    """Return the message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def encode_tasks(batch_token: str, tasks: dict[int, RewardTask]) -> bytes:
    """Return the line that sends tasks to a worker. `batch_token` is a secret that every reply must
    carry; the keys of `tasks` number the replies.
    """
    return encode_json_line(
        [
            batch_token,
            [
                [number, task.component_index, *asdict(task.sample).values()]
                for number, task in tasks.items()
            ],
        ]
    )


def decode_tasks(line: bytes) -> tuple[str, dict[int, RewardTask]]:
    """Return (batch token, tasks by number) of a line that `encode_tasks` made."""
    token, tasks = json.loads(line)
    field_names = [field.name for field in fields(RewardSample)]
    return token, {
        number: RewardTask(
            component_index,
            msgspec.convert(dict(zip(field_names, values, strict=True)), RewardSample),
        )
        for number, component_index, *values in tasks
    }


@dataclass(frozen=True)
class RewardTaskReply:
    """The answer of a worker to one task."""

    # with the number it tells a reply from whatever a reward writes into the worker's socket
    token: str
    number: int
    result: RewardResult
    is_last: bool  # it ends now, its memory being used up


def decode_reply(line: bytes) -> RewardTaskReply:
    """Return the reply in a worker's line. Raise ValueError for a line that is no reply."""
    try:
        return msgspec.convert(json.loads(line), RewardTaskReply)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} is no reply: {error}.") from None


class SocketLineReader:
    """Reads whole lines from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Read from `connection`, which the caller closes."""
        self.connection = connection
        self._unread_bytes = b""

    def read_lines(self) -> Iterator[bytes]:
        """Read once from the socket and yield the lines that are complete. Raise EOFError at the
        end, ValueError for a line over REPLY_BYTES.
        """
        try:
            data = self.connection.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._unread_bytes = (self._unread_bytes + data).split(b"\n")
        if len(self._unread_bytes) > REPLY_BYTES:
            raise ValueError(f"a line of more than {REPLY_BYTES} bytes is no reply.")
        yield from lines
