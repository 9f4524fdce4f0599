"""How hosts and the controller find each other: a listening socket, registration by rank, deadlines on both sides."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time

from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.channel import AuthenticationError, Channel, FrameError, accept, connect
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.messages import Register
from rlhf_megatron.runtime.pool import where
from rlhf_megatron.runtime.processes import machine_id
from rlhf_megatron.runtime.remote import HostLink

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
RETRY_S = 0.2


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of `address` and of no other. Raises ValueError when it is not ours."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server((place[0], 0), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {address!r} ({error}); MASTER_ADDR must be an address of the machine with node rank 0."
        ) from error


def register_host(host: str, port: int, secret: bytes, rank: int, pool: str, timeout_s: float) -> Channel:
    """Connect to the controller, trying again until `timeout_s`. Raises ConnectionError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no controller at {host}:{port} within {timeout_s:g} s: {error}") from error
            time.sleep(RETRY_S)
    channel = connect(sock, secret, timeout_s=max(HANDSHAKE_TIMEOUT_S, deadline - time.monotonic()))
    channel.send(Register(rank, pool, os.getpid(), machine_id(), socket.gethostname()))
    return channel


def gather_hosts(listener: socket.socket, secret: bytes, layout: Layout, pool: str, timeout_s: float) -> list[HostLink]:
    """Wait until every rank of the pool has registered; closes `listener`. Links in rank order.

    Peers without the secret are refused and logged. Raises HostError naming the ranks missing after `timeout_s`.
    """
    arrived: queue.SimpleQueue[HostLink] = queue.SimpleQueue()
    links: dict[int, HostLink] = {}
    deadline = time.monotonic() + timeout_s
    with listener:
        threading.Thread(target=_accept_hosts, args=(listener, secret, layout, pool, arrived), daemon=True).start()
        while len(links) < layout.world_size:
            try:
                link = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = ", ".join(where(pool, layout, r) for r in range(layout.world_size) if r not in links)
                raise HostError(f"{missing} did not register within {timeout_s:g} s; see their logs.") from None
            if link.rank in links:
                logger.warning("rank %d registered twice; the second is refused", link.rank)
                link.channel.close()
            else:
                links[link.rank] = link
        listener.shutdown(socket.SHUT_RDWR)
    return [links[rank] for rank in range(layout.world_size)]


def _accept_hosts(
    listener: socket.socket, secret: bytes, layout: Layout, pool: str, arrived: queue.SimpleQueue[HostLink]
) -> None:
    with contextlib.suppress(OSError):  # the listener was closed: all are here
        while True:
            sock, address = listener.accept()
            threading.Thread(target=_greet, args=(sock, address[0], secret, layout, pool, arrived), daemon=True).start()


def _greet(
    sock: socket.socket, address: str, secret: bytes, layout: Layout, pool: str, arrived: queue.SimpleQueue[HostLink]
) -> None:
    try:
        channel = accept(sock, secret, HANDSHAKE_TIMEOUT_S)
        message = channel.receive()
        if not isinstance(message, Register) or message.pool != pool or message.rank not in range(layout.world_size):
            raise FrameError(f"{message} does not belong to the pool {pool!r} of {layout.world_size} ranks.")
    except (AuthenticationError, FrameError, EOFError) as error:
        logger.warning("refused a connection from %s: %s", address, error)
        sock.close()
        return
    arrived.put(HostLink(message.rank, where(pool, layout, message.rank), channel, message.pid, message.machine))
