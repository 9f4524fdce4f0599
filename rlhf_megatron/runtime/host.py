"""A rank of a pool: holds the roles and runs calls on them, one at a time, on the main thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf_megatron.data import codec
from rlhf_megatron.runtime import hang as stacks
from rlhf_megatron.runtime.messages import Call, Status
from rlhf_megatron.runtime.pool import Pool

logger = logging.getLogger(__name__)

IDLE = "waiting for a call"

BuildRoles = Callable[[Pool], Mapping[str, object]]  # called on every rank of the pool at once: role name -> worker


class Activity:
    """The work of the main thread, which writes it; the thread that answers pings reads it."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._thread_id = threading.get_ident()
        self._now = ("", IDLE, time.monotonic())

    @contextmanager
    def doing(self, method: str, stage: str) -> Iterator[None]:
        before = self._now
        self._now = (method, stage, time.monotonic())
        try:
            yield
        finally:
            self._now = (before[0], before[1], time.monotonic())

    def status(self, ping_id: int) -> Status:
        method, stage, since = self._now
        frames = stacks.frames_of(self._thread_id)
        collectives = [f.f_code.co_name for f in frames if f.f_code.co_filename.endswith("distributed_c10d.py")]
        return Status(
            id=ping_id,
            where=self.where,
            method=method,
            stage=stage,
            seconds=time.monotonic() - since,
            collective=collectives[-1] if collectives else "",
            stack=stacks.describe(frames),
            threads=stacks.other_threads(self._thread_id),
        )


class Host:
    """Must be made and used on the thread that runs the collectives."""

    def __init__(self, pool: Pool, activity: Activity) -> None:
        self.pool = pool
        self.activity = activity
        self._roles: Mapping[str, object] = {}

    def build(self, build_roles: BuildRoles) -> None:
        """Make the roles. All ranks of the pool must call it."""
        with self.activity.doing("", "building roles"):
            self._roles = build_roles(self.pool)

    def call(self, call: Call) -> Any:
        """Run one call and return its result: of a scattered call on the leader only, None elsewhere."""
        function = self.find(call.method)
        if not call.is_scattered:
            with self.activity.doing(call.method, "running"):
                return function(**call.arguments)
        assert not isinstance(call.shard, codec.Parts), "pieces become bytes on the way"
        with self.activity.doing(call.method, "receiving the shard"):
            batch = codec.decode(self.pool.broadcast_in_replica(call.shard))
        with self.activity.doing(call.method, "running"):
            result = function(batch=batch, **call.arguments)
        return result if self.pool.is_leader else None

    def close(self) -> None:
        """Close the roles that can be closed. Errors are logged: the host ends anyway."""
        for name, role in self._roles.items():
            if hasattr(role, "close"):
                try:
                    role.close()
                except Exception:  # the other roles are still to be closed
                    logger.exception("closing %s failed", name)
        self._roles = {}

    def find(self, method: str) -> Callable[..., Any]:
        """Return the method "role.name" of a role that stands here. Raises LookupError."""
        role, _, name = method.partition(".")
        if role not in self._roles:
            raise LookupError(f"{method}: there is no role {role!r} here; the roles are {sorted(self._roles)}.")
        function = getattr(self._roles[role], name, None)
        if name.startswith("_") or not callable(function):
            raise LookupError(f"{method}: the role {role!r} has no method {name!r}.")
        return function
