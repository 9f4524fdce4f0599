"""A rank of a pool: holds the roles and runs calls on them, one at a time, on the main thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf_megatron.data import codec
from rlhf_megatron.runtime import hang_report as stacks
from rlhf_megatron.runtime.control_messages import HostStatus, RoleCall
from rlhf_megatron.runtime.rank_pools import PoolMember

logger = logging.getLogger(__name__)

IDLE = "waiting for a call"

# called on every rank of the pool at once: role name -> worker
BuildRoles = Callable[[PoolMember], Mapping[str, object]]


class MainThreadActivity:
    """The present stage of the main thread's work. The main thread writes it; the thread that
    answers status requests reads it.
    """

    def __init__(self, rank_label: str) -> None:
        """Watch the calling thread, which must be the main thread."""
        self.rank_label = rank_label
        self._thread_id = threading.get_ident()
        self._current_stage = ("", IDLE, time.monotonic())

    @contextmanager
    def enter_stage(self, method: str, stage: str) -> Iterator[None]:
        """Record within the block that the main thread is in this stage of `method`; afterwards the
        former stage begins again.
        """
        before = self._current_stage
        self._current_stage = (method, stage, time.monotonic())
        try:
            yield
        finally:
            self._current_stage = (before[0], before[1], time.monotonic())

    def make_status(self, ping_id: int) -> HostStatus:
        """Return the answer to a status request: method, stage, its seconds, the collective that
        the main thread is in ("" for none), and the stacks.
        """
        method, stage, since = self._current_stage
        frames = stacks.list_thread_frames(self._thread_id)
        collectives = [
            f.f_code.co_name for f in frames if f.f_code.co_filename.endswith("distributed_c10d.py")
        ]
        return HostStatus(
            id=ping_id,
            rank_label=self.rank_label,
            method=method,
            stage=stage,
            seconds=time.monotonic() - since,
            collective=collectives[-1] if collectives else "",
            stack=stacks.format_frames(frames),
            threads=stacks.list_other_thread_stacks(self._thread_id),
        )


class RoleHost:
    """The roles of this rank. Make and use it on the thread that runs the collectives."""

    def __init__(self, pool: PoolMember, activity: MainThreadActivity) -> None:
        """Keep the pool and the activity; `build_roles` makes the roles."""
        self.pool = pool
        self.activity = activity
        self._roles: Mapping[str, object] = {}

    def build_roles(self, build_roles: BuildRoles) -> None:
        """Call `build_roles` with the pool, and keep the roles. All ranks must call it."""
        with self.activity.enter_stage("", "building roles"):
            self._roles = build_roles(self.pool)

    def run_call(self, call: RoleCall) -> Any:
        """Run one call and return its result. A scattered call takes its shard from the replica's
        leader, so all ranks of the replica must run it, and returns the result on the leader and
        None elsewhere.
        """
        function = self.find_method(call.method)
        if not call.is_scattered:
            with self.activity.enter_stage(call.method, "running"):
                return function(**call.arguments)
        assert not isinstance(call.shard, codec.MessagePieces), "pieces become bytes on the way"
        with self.activity.enter_stage(call.method, "receiving the shard"):
            batch = codec.decode_message(self.pool.broadcast_in_replica(call.shard))
        with self.activity.enter_stage(call.method, "running"):
            result = function(batch=batch, **call.arguments)
        return result if self.pool.is_replica_leader else None

    def close_roles(self) -> None:
        """Close the roles that have a `close` method. Errors are only logged, since the host ends
        anyway.
        """
        for name, role in self._roles.items():
            if hasattr(role, "close"):
                try:
                    role.close()
                except Exception:  # the other roles are still to be closed
                    logger.exception("closing %s failed", name)
        self._roles = {}

    def find_method(self, method: str) -> Callable[..., Any]:
        """Return the method that "role.name" names, of a role on this rank. Raise LookupError where
        there is no such role or public method.
        """
        role, _, name = method.partition(".")
        if role not in self._roles:
            raise LookupError(
                f"{method}: there is no role {role!r} here; the roles are {sorted(self._roles)}."
            )
        function = getattr(self._roles[role], name, None)
        if name.startswith("_") or not callable(function):
            raise LookupError(f"{method}: the role {role!r} has no method {name!r}.")
        return function
