"""The messages between controller and hosts: frozen dataclasses in the encoding of `data.codec`,
never a pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.data import codec

BUILD = 0  # id of the reply that a host sends, unasked, when its roles stand


@codec.register("Register")
@dataclass(frozen=True)
class HostRegistration:
    """Host -> controller, first after authentication."""

    rank: int  # inside the pool
    pool: str
    pid: int
    machine: str  # equal for processes that can signal each other by pid
    hostname: str


@codec.register("Call")
@dataclass(frozen=True)
class RoleCall:
    """Controller -> host. `method` is "role.method"."""

    id: int
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    # the shard is broadcast in the replica; only its leader answers with the result
    is_scattered: bool = False
    # an encoded TokenBatch; None: this rank gets it from its leader
    shard: bytes | codec.MessagePieces | None = None


@codec.register("Failure", {"rank_label": "where"})
@dataclass(frozen=True)
class HostFailure:
    """An exception on a host."""

    rank_label: str  # "[actor dp1 pp0 tp3]"
    kind: str  # name of the exception's class
    message: str
    traceback: str
    is_value_error: bool  # something that the user can fix


@codec.register("Reply")
@dataclass(frozen=True)
class RoleCallReply:
    """Host -> controller, one for each call."""

    id: int
    value: Any = None
    failure: HostFailure | None = None


@codec.register("Ping")
@dataclass(frozen=True)
class StatusRequest:
    """Controller -> host. Answered at once with a Status, whatever the main thread does."""

    id: int


@codec.register("Status", {"rank_label": "where"})
@dataclass(frozen=True)
class HostStatus:
    """Host -> controller: the present work of the main thread."""

    id: int
    rank_label: str
    method: str  # of the current call; "" between calls
    # "joining the pool", "building roles", "waiting for a call", "receiving the shard", "running"
    stage: str
    seconds: float  # in this stage
    collective: str  # torch.distributed function on the stack, "" when none
    stack: tuple[str, ...]  # of the main thread, innermost frame last: "file.py:12 function"
    threads: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the others that run Python: name, stack


@codec.register("Signalled")
@dataclass(frozen=True)
class HostSignalNotice:
    """Host -> controller: this process got a signal to stop. The process stays until the controller
    tells it to leave.
    """

    signal: str  # "SIGTERM"
    is_urgent: bool  # for the second time: the run shall end where it is


@codec.register("Leave")
@dataclass(frozen=True)
class LeaveRequest:
    """Controller -> host: close the roles and end. A main thread that is not done after `grace_s`
    is not waited for.
    """

    reason: str
    grace_s: float
