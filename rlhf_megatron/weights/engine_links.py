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
# NCCL's own deadline, which would end the process: the one of each call comes first
_WATCHDOG_S = 24 * 3600.0
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
        """Prepare rank `rank` of the group. `timeout_s`: the deadline for joining. `store`: the
        store of the inviting rank; None on the ranks that are invited.
        """
        self.invitation = invitation
        self.rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        self._backend: Any = None

    @staticmethod
    def make_inviting_link(
        name: str, address: str, num_ranks: int, backend: str, timeout_s: float
    ) -> EngineLink:
        """Return the link of rank 0, which listens at `address` only: this host's address as the
        other ranks reach it. `name` must be new to them. Raise OSError where it cannot listen.
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
        """Return the name of the link, as in the invitation."""
        return self.invitation.name

    def join_group(self) -> None:
        """Join the group, and return when all ranks have joined. Raise RuntimeError when they have
        not by the deadline, OSError where rank 0 cannot be reached.
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
        """Open the connection of each pair of ranks that `exchange_tensors` will use: each of the
        first `num_senders` ranks with each of the others. All ranks must call it.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        others = range(num_senders, self.invitation.size)
        for peer in others if self.rank < num_senders else range(num_senders):
            pair = [(byte, peer)]
            self.exchange_tensors(
                *((pair, []) if self.rank < num_senders else ([], pair)), timeout_s
            )

    def broadcast_bucket(self, bucket: Tensor, timeout_s: float) -> None:
        """Broadcast `bucket` from rank 0 into the same tensor of the other ranks. All ranks must
        call it. Raise RuntimeError when a rank died or is late.
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
        """Send and receive all of the (contiguous tensor, other rank) pairs at once, and return
        when all are done; received tensors are overwritten. Raise RuntimeError where a rank died or
        is late.
        """
        if not sends and not receives:
            return
        backend = self._get_joined_backend()

        def start_transfers() -> list[Any]:
            """Start all transfers and return their work handles."""
            return [
                *(backend.recv([tensor], rank, 0) for tensor, rank in receives),
                *(backend.send([tensor], rank, 0) for tensor, rank in sends),
            ]

        self._run_collectives((*sends, *receives)[0][0].device, start_transfers, timeout_s)

    def abort(self) -> None:
        """Give up the link and all transfers in progress. With gloo these end only when the other
        ranks leave the group, or at their deadline.
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
        """Return whether rank 0 has given up the link or died: NCCL does not tell the other
        ranks.
        """
        store = self._store
        if self.rank == 0 or store is None:
            return False
        try:
            return bool(store.check([_GIVEN_UP]))
        except RuntimeError:  # it went with rank 0's process
            return True

    def _get_joined_backend(self) -> Any:
        """Return the process group. Assert that the link was joined and not closed."""
        backend = self._backend
        assert backend is not None, "join comes first"
        return backend

    def _run_collectives(
        self, device: torch.device, start_collectives: Callable[[], list[Any]], timeout_s: float
    ) -> None:
        """Start the collectives and wait until all are done. Raise RuntimeError at the deadline, or
        where rank 0 has given up.
        """
        if self.invitation.backend == "gloo":
            for work in start_collectives():
                work.wait(timedelta(seconds=timeout_s))
            return
        deadline = time.monotonic() + timeout_s
        look_s = time.monotonic()
        # the process's own work does not wait for it
        with torch.cuda.stream(torch.cuda.Stream(device)):
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
        """Join and return the gloo process group, over this host's address towards rank 0."""
        gloo: Any = ProcessGroupGloo  # the options are not in torch's type stubs
        place = self.invitation
        own = place.address if self.rank == 0 else find_address_towards(place.address, place.port)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own)]
        options._timeout = self._timeout
        options._threads = 1
        return ProcessGroupGloo(store, self.rank, place.size, options)

    def _make_nccl_backend(self, store: PrefixStore) -> Any:
        """Join and return the NCCL process group, one that does not end this process on an
        error.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_S)
        with _prevent_nccl_process_exit():
            return dist.ProcessGroupNCCL(store, self.rank, self.invitation.size, options)


@contextmanager
def _prevent_nccl_process_exit() -> Iterator[None]:
    """Within the block, set the environment so that a new NCCL group only cleans up when a peer
    died. By default NCCL's watchdog ends the process, and a trainer must outlive its engines. A
    group reads the environment when it is made; there is no other way to set this.
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
    """Return the address of this host at which the server of `url` can reach it. Nothing is sent.
    Raise OSError where the host is unknown or there is no route.
    """
    parts = urlsplit(url)
    return find_address_towards(parts.hostname or "", parts.port or 80)


def find_address_towards(host: str, port: int) -> str:
    """Return the address of this host from which it reaches another. Nothing is sent. Raise OSError
    where the other is unknown or there is no route.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
