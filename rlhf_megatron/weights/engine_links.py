"""Process groups of ranks of a trainer and the ranks of an engine, apart from torch's
default world.

Rank 0 listens and invites; the other side joins as stock SGLang's `init_custom_process_group` does.
Every call has a deadline, and an error of the other side ends no process here.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlhf_megatron.weights.bound_store import listen_on_address

_POLL_S = 0.002
_LOOK_S = 0.5  # between looks at whether rank 0 has given up
_GIVEN_UP = "given up"
_WATCHDOG_S = (
    24 * 3600.0
)  # NCCL's own deadline, which would end the process: the one of each call comes first
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


@dataclass(frozen=True)
class LinkInvitation:
    """The facts that a rank needs in order to join."""

    name: str
    address: str  # where rank 0 listens
    port: int
    size: int  # ranks
    backend: str  # gloo or nccl


class EngineLink:
    """One rank's end of such a group: `join_group` on all ranks at once, then `broadcast_bucket`
    or `exchange_tensors`.

    After any error it is of no more use. Thread-safe in that `abort` may be called while another
    thread is inside.
    """

    def __init__(
        self, invitation: LinkInvitation, rank: int, timeout_s: float, store: TCPStore | None = None
    ) -> None:
        """`timeout_s`: to join within. `store`: of the rank that invites."""
        self.invitation = invitation
        self.rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        self._backend: Any = None

    @staticmethod
    def make_inviting_link(
        name: str, address: str, num_ranks: int, backend: str, timeout_s: float
    ) -> EngineLink:
        """Rank 0, which listens at `address`, of this host as the others reach it, and nowhere
        else. `name` must be new to them. Raises OSError where it cannot.
        """
        listener = listen_on_address(address, 0)
        port: int = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            num_ranks,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
        return EngineLink(
            LinkInvitation(name, address, port, num_ranks, backend), 0, timeout_s, store
        )

    @property
    def name(self) -> str:
        return self.invitation.name

    def join_group(self) -> None:
        """Returns when all ranks have joined. Raises RuntimeError when they have not by the
        deadline, OSError where rank 0 is not reached.
        """
        place = self.invitation
        if self._store is None:
            self._store = TCPStore(
                place.address,
                place.port,
                place.size,
                False,
                timeout=self._timeout,
                wait_for_workers=False,
            )
        device = "cuda" if place.backend == "nccl" else "cpu"
        store = PrefixStore(
            f"{device}/", PrefixStore(f"{place.name}/", PrefixStore(place.name, self._store))
        )
        make = self._make_nccl_backend if place.backend == "nccl" else self._make_gloo_backend
        self._backend = make(store)

    def open_connections(self, num_senders: int, device: torch.device, timeout_s: float) -> None:
        """Make the connection of each pair that `exchange_tensors` will use: the first
        `num_senders` ranks with all others. All ranks call it.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        others = range(num_senders, self.invitation.size)
        for peer in others if self.rank < num_senders else range(num_senders):
            pair = [(byte, peer)]
            self.exchange_tensors(
                *((pair, []) if self.rank < num_senders else ([], pair)), timeout_s
            )

    def broadcast_bucket(self, bucket: Tensor, timeout_s: float) -> None:
        """Returns when the other ranks have been sent all of `bucket`, by rank 0. Raises
        RuntimeError when they died or do not take it in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        backend = self._get_joined_backend()
        self._run_collectives(
            bucket.device, lambda: [backend.broadcast([bucket], options)], timeout_s
        )

    def exchange_tensors(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        timeout_s: float,
    ) -> None:
        """Send and receive (contiguous tensor, other rank), all at once. Returns when it is done.
        Raises RuntimeError where a rank died or does not come in time.
        """
        if not sends and not receives:
            return
        backend = self._get_joined_backend()

        def start_transfers() -> list[Any]:
            return [
                *(backend.recv([tensor], rank, 0) for tensor, rank in receives),
                *(backend.send([tensor], rank, 0) for tensor, rank in sends),
            ]

        self._run_collectives((*sends, *receives)[0][0].device, start_transfers, timeout_s)

    def abort(self) -> None:
        """Give up what is under way. With gloo that ends when the others leave the group, or
        at its deadline.
        """
        backend = self._backend
        store = self._store
        self._backend = self._store = None
        if backend is not None and self.invitation.backend == "nccl":
            if self.rank == 0 and store is not None:
                store.set(_GIVEN_UP, "1")
            backend.abort()

    close = abort

    def _has_rank_0_given_up(self) -> bool:
        """Whether rank 0 has given up: NCCL does not tell the others."""
        store = self._store
        if self.rank == 0 or store is None:
            return False
        try:
            return bool(store.check([_GIVEN_UP]))
        except RuntimeError:  # it went with rank 0's process
            return True

    def _get_joined_backend(self) -> Any:
        backend = self._backend
        assert backend is not None, "join comes first"
        return backend

    def _run_collectives(
        self, device: torch.device, start_collectives: Callable[[], list[Any]], timeout_s: float
    ) -> None:
        if self.invitation.backend == "gloo":
            for work in start_collectives():
                work.wait(timedelta(seconds=timeout_s))
            return
        deadline = time.monotonic() + timeout_s
        look_s = time.monotonic()
        with torch.cuda.stream(
            torch.cuda.Stream(device)
        ):  # the process's own work does not wait for it
            works = start_collectives()
            for work in works:
                while not work.is_completed():
                    if (now := time.monotonic()) > deadline:
                        raise RuntimeError(
                            f"{self.name}: a bucket was not sent and taken within {timeout_s:g} s."
                        )
                    if now > look_s + _LOOK_S and self._has_rank_0_given_up():
                        raise RuntimeError(f"{self.name}: rank 0 has given it up.")
                    look_s = now if now > look_s + _LOOK_S else look_s
                    time.sleep(_POLL_S)
                work.wait()  # raises what went wrong

    def _make_gloo_backend(self, store: PrefixStore) -> Any:
        gloo: Any = ProcessGroupGloo  # the options are not in torch's type stubs
        place = self.invitation
        own = place.address if self.rank == 0 else find_address_towards(place.address, place.port)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own)]
        options._timeout = self._timeout
        options._threads = 1
        return ProcessGroupGloo(store, self.rank, place.size, options)

    def _make_nccl_backend(self, store: PrefixStore) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_S)
        with _prevent_nccl_process_exit():
            return dist.ProcessGroupNCCL(store, self.rank, self.invitation.size, options)


@contextmanager
def _prevent_nccl_process_exit() -> Iterator[None]:
    """NCCL's watchdog ends a process whose peer died. A trainer outlives its engines, so it only
    cleans up here. A group reads that from the environment when it is made, and there is no other
    way to say it.
    """
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


def find_address_towards_url(url: str) -> str:
    """Return the address of this host by which the server at `url` reaches it. Nothing is sent.
    Raises OSError.
    """
    parts = urlsplit(url)
    return find_address_towards(parts.hostname or "", parts.port or 80)


def find_address_towards(host: str, port: int) -> str:
    """Return the address of this host on the way to another. Nothing is sent. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
