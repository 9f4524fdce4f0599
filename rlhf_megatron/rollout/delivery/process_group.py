"""Buckets as broadcasts, in a torch process group that a sender and the ranks of one engine make together.

Two senders that give two engines their weights at once cannot block one another. An engine works on one request at a
time, in the order in which they came; the sender of a request is broadcasting all the while, in a thread of its own
that waits for nothing but this engine. So the request that an engine works on always ends, and the next one begins.
A request that would have to wait on this side, for one of the few broadcasts that run at once, is not made before.
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Medium
from rlhf_megatron.resharding.transports.process_group import UpdateGroup
from rlhf_megatron.rollout.delivery.courier import Traffic, traffic_of, unseen_traffic
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.sglang.verbs import TIMEOUT_S, SGLangVerbs

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 180.0
MAX_AT_ONCE = 8  # broadcasts of a sender, so that all of them are really under way: each takes a share of a GPU
_LEAVE_S = 10.0
_OTHER_SIDE_S = 2.0  # for the side that has not failed to say its part


class Groups:
    """The process groups of this rank by engine, kept from sync to sync. Thread-safe."""

    def __init__(self) -> None:
        self.turns = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._groups: dict[str, tuple[EngineAddress, UpdateGroup]] = {}
        self._lock = threading.Lock()

    def find(self, address: EngineAddress) -> UpdateGroup | None:
        """None where there is none with this server: an engine that was started again has another address."""
        with self._lock:
            kept, group = self._groups.get(address.name, (None, None))
            if kept == address:
                return group
            self._groups.pop(address.name, None)
        if group is not None:
            group.close()
        return None

    def keep(self, address: EngineAddress, group: UpdateGroup) -> None:
        with self._lock:
            self._groups[address.name] = (address, group)

    def drop(self, name: str) -> None:
        """Of an engine where something failed: the next sync makes a new one."""
        with self._lock:
            _, group = self._groups.pop(name, (None, None))
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Leave all groups, on both sides."""
        with self._lock:
            kept, self._groups = list(self._groups.values()), {}
        for address, group in kept:
            _leave(address, group.name)
            group.close()


class ProcessGroupCourier:
    """To stock SGLang, with or without the run's loader; receipts come with the loader only."""

    medium: Medium = "device_memory"

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

    def open(self) -> None:
        """A group with this server, unless there is one."""
        if self._groups.find(self._address) is not None:
            return
        name = f"weights-{uuid.uuid4().hex[:12]}-{self._sender.replace(' ', '-')}-{self.name}"
        address = ""
        try:
            address = own_address(self._address.url)
            group = UpdateGroup(name, address, self._address.tp_size, self._backend, self._join_timeout_s)
        except OSError as error:
            raise EngineError(
                f"{self.name}: no process group for weights: {self._sender} cannot listen on {address or 'any address'}"
                f" towards {self._address.url}: {error}; see to its network, or use another rollout.weight_transport."
            ) from error
        self._groups.keep(self._address, group)
        self._together(f"process group {name}", lambda: self._verbs.join(group), group.join, self._join_timeout_s)

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        group = self._groups.find(self._address)
        assert group is not None, "open comes before deliver"
        with self._groups.turns:  # who has one gives it back by its deadline
            self._together(
                f"bucket {manifest.bucket} of {manifest.sender}",
                lambda: self._verbs.receive(manifest, group.name),
                lambda: group.broadcast(bucket, self._timeout_s),
                self._timeout_s,
            )
        if self._address.has_loader:
            return traffic_of(self._verbs.digest(manifest))
        return unseen_traffic(manifest, self._address.tp_size)

    def close(self) -> None:
        """The group stays for the next sync."""
        self._verbs.close()

    def _together(self, what: str, request: Callable[[], None], here: Callable[[], None], timeout_s: float) -> None:
        """Ask the engine and do this side's part at once. Raises EngineError when one fails or the deadline passes; the
        group is given up then, on both sides, so that neither waits for the other."""
        asked, done = _start(f"{self.name}-request", request), _start(f"{self.name}-group", here)
        finished, running = wait((asked, done), timeout_s, FIRST_EXCEPTION)
        if not running and all(future.exception() is None for future in finished):
            return
        group = self._groups.find(self._address)
        self._groups.drop(self.name)
        if group is not None and asked in finished and not isinstance(asked.exception(), EngineTimeoutError):
            _leave(self._address, group.name)  # the server is free to, and what is under way here ends then
        wait((asked, done), _OTHER_SIDE_S)
        words = [str(error) for future in (asked, done) if future.done() and (error := future.exception()) is not None]
        if not words:
            words = [f"no end within {timeout_s:g} s"]
        raise EngineError(f"{self.name}, {what}: {'; '.join(words)}")


def own_address(url: str) -> str:
    """The address of this host by which the server at `url` reaches it. Nothing is sent. Raises OSError."""
    parts = urlsplit(url)
    family, _, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _leave(address: EngineAddress, name: str) -> None:
    """Have the server end its part of a group. One that is gone already, or hangs, does not matter."""
    verbs = SGLangVerbs(address, Path(), _LEAVE_S)
    with suppress(EngineError):
        verbs.leave(name, _LEAVE_S)
    verbs.close()


def _start(name: str, work: Callable[[], None]) -> Future[None]:
    """Run in a daemon thread: one that is stuck keeps nothing alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # goes to who reads the future
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
