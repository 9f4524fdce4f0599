"""rollout.weight_transport process_group, whole tensors: buckets as broadcasts, in a torch process group of one sender
(rank 0) and the ranks of one engine, for engines that take no parts of tensors (those that do: `links`).

Two senders cannot block one another: an engine works on one request at a time, whose sender broadcasts all the while in
a thread that waits for nothing but this engine."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rlhf_megatron.parallel.links import Link, own_address
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import JOIN_TIMEOUT_S, Roster
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.fleet.calls import EngineCalls
from rlhf_megatron.rollout.sglang.weights import TIMEOUT_S, SGLangVerbs
from rlhf_megatron.rollout.transports.base import BucketMemory, Traffic, Transport, traffic_of, unseen_traffic
from rlhf_megatron.rollout.transports.tensor import SharedFiles

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_AT_ONCE = 8  # engines that a rank sends to, so that all is really under way: each takes a share of a GPU
LEAVE_S = 10.0
_OTHER_SIDE_S = 2.0  # for the side that has not failed to say its part


class Groups:
    """The process groups of this rank by engine, kept from sync to sync; and its mapped files. Thread-safe."""

    def __init__(self) -> None:
        self.files = SharedFiles()
        self.rosters: dict[str, Roster] = {}  # by name of a group: what the ranks of its engine hold
        self.turns = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._groups: dict[str, tuple[EngineAddress, Link]] = {}
        self._leaving: dict[str, Callable[[], None]] = {}  # by name of a group
        self._lock = threading.Lock()

    def find(self, address: EngineAddress) -> Link | None:
        """Returns the group with this server, or None: an engine that was started again has another address."""
        with self._lock:
            kept, group = self._groups.get(address.name, (None, None))
            if kept == address:
                return group
        self.drop(address.name)
        return None

    def keep(self, address: EngineAddress, group: Link, leave: Callable[[], None] | None = None) -> None:
        """`leave`: has the server end its part; None: another rank does. One that was kept before goes."""
        self.drop(address.name)
        with self._lock:
            self._groups[address.name] = (address, group)
            if leave is not None:
                self._leaving[group.name] = leave

    def drop(self, name: str) -> Callable[[], None]:
        """Drops the group of an engine where something failed: the next sync makes a new one. Returns what has the
        server end its part. One that is gone already, or hangs, does not matter."""
        with self._lock:
            _, group = self._groups.pop(name, (None, None))
            leave = self._leaving.pop(group.name, None) if group is not None else None
        if group is not None:
            self.rosters.pop(group.name, None)
            group.abort()

        def end() -> None:
            with suppress(EngineError):
                if leave is not None:
                    leave()

        return end

    def close(self) -> None:
        """Leave all groups, on both sides; remove the files."""
        self.files.close()
        for name in list(self._groups):
            with self._lock:
                _, group = self._groups.get(name, (None, None))
                leave = self._leaving.pop(group.name, None) if group is not None else None
            if leave is not None:
                with suppress(EngineError):
                    leave()
            self.drop(name)

    def together(self, name: str, what: str, request: Callable[[], T], here: Callable[[], None], timeout_s: float) -> T:
        """Ask an engine and do this side's part at once; returns the answer. Raises EngineError when one fails or the
        deadline passes; the group is given up then, on both sides, so that neither waits for the other."""
        calls = EngineCalls()
        asked, done = calls.start(name, "request", request), calls.start(name, "group", here)
        both: tuple[Future[Any], ...] = (asked, done)
        finished, running = wait(both, timeout_s, FIRST_EXCEPTION)
        if not running and all(future.exception() is None for future in finished):
            return asked.result()
        leave = self.drop(name)
        if asked in finished and not isinstance(asked.exception(), EngineTimeoutError):
            leave()  # the server is free to, and what is under way here ends then
        wait(both, _OTHER_SIDE_S)
        words = [str(error) for future in both if future.done() and (error := future.exception()) is not None]
        if not words:
            words = [f"no end within {timeout_s:g} s"]
        raise EngineError(f"{name}, {what}: {'; '.join(words)}")


def inviting(address: EngineAddress, sender: str, num_ranks: int, backend: str, timeout_s: float) -> Link:
    """A new group with an engine, to be joined. Raises EngineError where this host cannot listen."""
    name = f"weights-{uuid.uuid4().hex[:12]}-{sender.replace(' ', '-')}-{address.name}"
    own = ""
    try:
        own = own_address(address.url)
        return Link.inviting(name, own, num_ranks, backend, timeout_s)
    except OSError as error:
        raise EngineError(
            f"{address.name}: no process group for weights: {sender} cannot listen on {own or 'any address'}"
            f" towards {address.url}: {error}; see to its network, or use another rollout.weight_transport."
        ) from error


class ProcessGroupTransport(Transport):
    """Broadcasts to stock SGLang, with or without the run's loader (receipts come with it only). The group stays for
    the next sync."""

    memory: BucketMemory = "device_memory"

    def __init__(
        self,
        address: EngineAddress,
        transfer_dir: Path,
        sender: str,
        backend: str,
        groups: Groups,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`sender`: its coordinates. `backend`: gloo or nccl. `timeout_s`: of one bucket."""
        self.name = address.name
        self._address = address
        self._sender = sender
        self._backend = backend
        self._groups = groups
        self._join_timeout_s = join_timeout_s
        self._timeout_s = timeout_s
        self._verbs = SGLangVerbs(address, transfer_dir, timeout_s)

    def open(self, devices: Collection[str] = ("",)) -> None:
        """A group with this server, unless there is one."""
        if self._groups.find(self._address) is not None:
            return
        group = inviting(self._address, self._sender, self._address.tp_size + 1, self._backend, self._join_timeout_s)
        self._groups.keep(self._address, group, lambda: self._verbs.leave(group.name, LEAVE_S))
        place, what = group.invitation, f"process group {group.name}"
        self._groups.together(self.name, what, lambda: self._verbs.join(place), group.join, self._join_timeout_s)

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        group = self._groups.find(self._address)
        assert group is not None, "open comes before deliver"
        with self._groups.turns:  # who has one gives it back by its deadline
            self._groups.together(
                self.name,
                manifest.place,
                lambda: self._verbs.receive(manifest, group.name),
                lambda: group.broadcast(bucket, self._timeout_s),
                self._timeout_s,
            )
        if self._address.has_loader:
            return traffic_of(self._verbs.digest(manifest))
        return unseen_traffic(manifest, self._address.tp_size)
