"""Messages between the controller and the workers of episodes: a line of JSON each, made of plain
values. Nothing that a worker sends is unpickled.

    controller  StartEpisode, DeliverTurn, CancelEpisode
    worker      RequestTurn, ReportEpisode, ReportRelease, ReportAlive

Each start of an episode has a number of its own, its attempt, which is unique within a run. What a
worker says of an attempt that is over is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

# What ends an episode, and who caused it.
EpisodeEnd = Literal[
    "done",  # the environment says so
    "max_turns",
    "max_tokens",
    "timeout",
    "environment_failed",
    "engine_failed",
    "refused",  # new messages have no exact join to the sampled tokens
    "aborted",  # the run needs the episode no longer
]
EPISODE_ENDS: tuple[EpisodeEnd, ...] = (
    "done",
    "max_turns",
    "max_tokens",
    "timeout",
    "environment_failed",
    "engine_failed",
    "refused",
    "aborted",
)


@dataclass(frozen=True)
class EpisodeLimits:
    """What bounds an episode."""

    max_turns: int  # of the policy
    max_tokens: int  # ids behind the first prompt, sampled or not
    max_turn_tokens: int  # sampled in one turn
    max_prompt_tokens: int  # of the first prompt


@dataclass(frozen=True)
class StartEpisode:
    """Order to a worker: run an episode."""

    key: int  # of the episode within a call
    attempt: int  # unique within a run
    environment: str  # a registered name
    params: dict[str, Any]
    limits: EpisodeLimits
    deadline: float  # in the seconds of time.monotonic, which all processes of a machine share
    # the row: see `environment.Task`
    messages: list[dict[str, Any]]
    prompt: str
    label: str
    source: str
    extra: str  # JSON object of the row's other columns, or ""
    seed: int
    prompt_ids: list[int]  # what the data pipeline made of `messages`


@dataclass(frozen=True)
class DeliverTurn:
    """Answer to a RequestTurn: what the policy has said."""

    key: int
    attempt: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    policy_version: int
    version_spans: list[tuple[int, int, int]]  # (version, start, end); []: all of policy_version


@dataclass(frozen=True)
class CancelEpisode:
    """Order to a worker: end an episode now. Its worker reports its release alone."""

    key: int
    attempt: int


@dataclass(frozen=True)
class RequestTurn:
    """Request of a worker: let the policy go on behind all ids so far and `new_ids`."""

    key: int
    attempt: int
    new_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class ReportEpisode:
    """Report of a worker: an episode has ended, and how."""

    key: int
    attempt: int
    end: EpisodeEnd
    reward: float | None  # of the environment, without those of turns; None: it gives none
    turn_rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)  # the talk, for people
    error: str = ""  # of the environment, or why a join was refused


@dataclass(frozen=True)
class ReportRelease:
    """Report of a worker, the last one of each attempt: the episode's environment is closed.
    `is_clean`: all its code has come back; else it goes on in a thread or a task that cannot be
    ended.
    """

    attempt: int
    is_clean: bool


@dataclass(frozen=True)
class ReportAlive:
    """Report of a worker's watching thread, again and again: how long something has kept the event
    loop from the worker's episodes, and the attempt whose code that is (None: not known).
    """

    blocked_s: float
    attempt: int | None


WorkerOrder: TypeAlias = StartEpisode | DeliverTurn | CancelEpisode
WorkerReport: TypeAlias = RequestTurn | ReportEpisode | ReportRelease | ReportAlive
_ORDERS: dict[str, type] = {
    kind.__name__: kind for kind in (StartEpisode, DeliverTurn, CancelEpisode)
}
_REPORTS: dict[str, type] = {
    kind.__name__: kind for kind in (RequestTurn, ReportEpisode, ReportRelease, ReportAlive)
}


def encode_worker_message(message: WorkerOrder | WorkerReport) -> bytes:
    """Return the message as a line of JSON. Raise TypeError or ValueError for values that JSON does
    not have, and for texts that UTF-8 does not have.
    """
    return msgspec.json.encode((type(message).__name__, message)) + b"\n"


def decode_order(line: bytes) -> WorkerOrder:
    """Return the controller's message in a line."""
    order: WorkerOrder = _decode_message(line, _ORDERS)
    return order


def decode_report(line: bytes) -> WorkerReport:
    """Return the worker's message in a line. Raise ValueError for a line that is none: user code
    can write into a worker's socket.
    """
    try:
        report: WorkerReport = _decode_message(line, _REPORTS)
    except (msgspec.MsgspecError, KeyError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} is no report of an episode: {error}.") from None
    return report


def _decode_message(line: bytes, kinds: dict[str, type]) -> Any:
    """Return the message of one of these kinds that a line holds."""
    name, fields = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
    return msgspec.json.decode(fields, type=kinds[name])
