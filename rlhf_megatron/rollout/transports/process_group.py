"""rollout.weight_transport process_group: buckets as broadcasts, in a torch process group of one sender (rank 0) and
the ranks of one engine. It is made as stock SGLang's `init_custom_process_group` makes the other side, and is no part
of torch's default world.

Two senders cannot block one another: an engine works on one request at a time, whose sender broadcasts all the while in
a thread that waits for nothing but this engine."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlhf_megatron.parallel.bound_store import listen
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.fleet.calls import EngineCalls
from rlhf_megatron.rollout.sglang.weights import TIMEOUT_S, SGLangVerbs
from rlhf_megatron.rollout.transports.base import BucketMemory, Traffic, Transport, traffic_of, unseen_traffic
from rlhf_megatron.rollout.transports.tensor import SharedFiles

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_WATCHDOG_S = 24 * 3600.0  # NCCL's own deadline, which would end the process: the one of `broadcast` comes first
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


class UpdateGroup:
    """Make it, have the engine's ranks join at `address` and `port` while this side is in `join`, then broadcast.

    After any error it is of no more use. Thread-safe in that `abort` may be called while another thread is inside.
    """

    def __init__(self, name: str, address: str, num_engine_ranks: int, backend: str, join_timeout_s: float) -> None:
        """`address`: of this host, as the engine reaches it; the store listens there and nowhere else. `name` must be
        new to the engine. Raises OSError where it cannot listen."""
        self.name = name
        self.address = address
        self.backend_name = backend
        self.world_size = num_engine_ranks + 1
        self._timeout = timedelta(seconds=join_timeout_s)
        listener = listen(address, 0)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            address,
            self.port,
            self.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
        self._backend: Any = None

    def join(self) -> None:
        """Returns when all ranks have joined. Raises RuntimeError when they have not by the deadline."""
        device = "cuda" if self.backend_name == "nccl" else "cpu"
        assert self._store is not None, "the group is closed"
        store = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))
        make = self._nccl if self.backend_name == "nccl" else self._gloo
        self._backend = make(store)

    def broadcast(self, bucket: Tensor, timeout_s: float) -> None:
        """Returns when the engine's ranks have been sent all of `bucket`. Raises RuntimeError when they died or do not
        take it in time."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout_s)
        backend = self._backend
        assert backend is not None, "join comes before broadcast"
        if self.backend_name == "gloo":
            backend.broadcast([bucket], options).wait(options.timeout)
            return
        deadline = time.monotonic() + timeout_s
        with torch.cuda.stream(torch.cuda.Stream(bucket.device)):  # the trainer's own work does not wait for it
            work = backend.broadcast([bucket], options)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name}: the engine has not taken a bucket within {timeout_s:g} s.")
                time.sleep(_POLL_S)
            work.wait()  # raises what went wrong

    def abort(self) -> None:
        """Give up what is under way. With gloo that ends when the engine leaves the group, or at its deadline."""
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None and self.backend_name == "nccl":
            backend.abort()

    close = abort

    def _gloo(self, store: PrefixStore) -> Any:
        gloo: Any = ProcessGroupGloo  # the options are not in torch's type stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.address)]
        options._timeout = self._timeout
        options._threads = 1
        return ProcessGroupGloo(store, 0, self.world_size, options)

    def _nccl(self, store: PrefixStore) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_S)
        with _errors_end_no_process():
            return dist.ProcessGroupNCCL(store, 0, self.world_size, options)


@contextmanager
def _errors_end_no_process() -> Iterator[None]:
    """NCCL's watchdog ends a process whose peer died. A trainer outlives its engines, so it only cleans up here. A
    group reads that from the environment when it is made, and there is no other way to say it."""
    with _environment:
        before = os.environ.get(_NCCL_ERRORS)
        os.environ[_NCCL_ERRORS] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[_NCCL_ERRORS]
            else:
                os.environ[_NCCL_ERRORS] = before


JOIN_TIMEOUT_S = 180.0
MAX_AT_ONCE = 8  # broadcasts of a sender, so that all of them are really under way: each takes a share of a GPU
_LEAVE_S = 10.0
_OTHER_SIDE_S = 2.0  # for the side that has not failed to say its part


class Groups:
    """The process groups of this rank by engine, kept from sync to sync; and its mapped files. Thread-safe."""

    def __init__(self) -> None:
        self.files = SharedFiles()
        self.turns = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._groups: dict[str, tuple[EngineAddress, UpdateGroup]] = {}
        self._lock = threading.Lock()

    def find(self, address: EngineAddress) -> UpdateGroup | None:
        """Returns the group with this server, or None: an engine that was started again has another address."""
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
        """Drops the group of an engine where something failed: the next sync makes a new one."""
        with self._lock:
            _, group = self._groups.pop(name, (None, None))
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Leave all groups, on both sides; remove the files."""
        self.files.close()
        with self._lock:
            kept, self._groups = list(self._groups.values()), {}
        for address, group in kept:
            _leave(address, group.name)
            group.close()


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
        place = (group.name, group.address, group.port, group.world_size, self._backend)
        self._together(f"process group {name}", lambda: self._verbs.join(*place), group.join, self._join_timeout_s)

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        group = self._groups.find(self._address)
        assert group is not None, "open comes before deliver"
        with self._groups.turns:  # who has one gives it back by its deadline
            self._together(
                manifest.place,
                lambda: self._verbs.receive(manifest, group.name),
                lambda: group.broadcast(bucket, self._timeout_s),
                self._timeout_s,
            )
        if self._address.has_loader:
            return traffic_of(self._verbs.digest(manifest))
        return unseen_traffic(manifest, self._address.tp_size)

    def _together(self, what: str, request: Callable[[], None], here: Callable[[], None], timeout_s: float) -> None:
        """Ask the engine and do this side's part at once. Raises EngineError when one fails or the deadline passes; the
        group is given up then, on both sides, so that neither waits for the other."""
        calls = EngineCalls()
        asked, done = calls.start(self.name, "request", request), calls.start(self.name, "group", here)
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
    with suppress(EngineError):
        SGLangVerbs(address, Path(), _LEAVE_S).leave(name, _LEAVE_S)
