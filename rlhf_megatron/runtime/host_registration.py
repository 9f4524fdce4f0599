"""How hosts and the controller find each other: a listening socket, registration by rank, deadlines
on both sides.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rlhf_megatron.rollout.socket_limits import raise_open_file_limit
from rlhf_megatron.runtime.channel_listener import ChannelListener
from rlhf_megatron.runtime.control_messages import HostRegistration
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.message_channel import FrameError, MessageChannel, open_channel
from rlhf_megatron.runtime.process_control import read_machine_id
from rlhf_megatron.runtime.rank_pools import PoolSpec
from rlhf_megatron.runtime.remote_worker_group import HostLink

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
RETRY_S = 0.2
LOOK_S = 1.0


def register_host(
    host: str, port: int, secret: bytes, rank: int, pool_name: str, timeout_s: float
) -> MessageChannel:
    """Connect to the controller, authenticate and send this rank's registration. Return the
    channel. Try the connection again until `timeout_s`. Raise ConnectionError where no controller
    answers or the secrets differ.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no controller at {host}:{port} within {timeout_s:g} s: {error}"
                ) from error
            time.sleep(RETRY_S)
    channel = open_channel(
        sock, secret, timeout_s=max(HANDSHAKE_TIMEOUT_S, deadline - time.monotonic())
    )
    channel.send(
        HostRegistration(rank, pool_name, os.getpid(), read_machine_id(), socket.gethostname())
    )
    return channel


def gather_hosts(
    listener: socket.socket,
    secret: bytes,
    pools: Sequence[PoolSpec],
    timeout_s: float,
    find_lost_host: Callable[[], HostError | None] = lambda: None,
) -> dict[str, list[HostLink]]:
    """Wait until every rank of all pools has registered. Return the links by the name of the pool,
    in rank order. Close `listener`.

    Raise this process's soft limit of open files, since each rank keeps a connection. Peers without
    the secret are refused and logged. Raise HostError with the ranks that are missing after
    `timeout_s`, or earlier the error that `find_lost_host`, called every LOOK_S, returns.
    """
    arrived: queue.SimpleQueue[tuple[str, HostLink]] = queue.SimpleQueue()
    refused: list[str] = []  # why the kernel gave no connection, the last time
    places = [(pool.name, rank) for pool in pools for rank in range(pool.layout.world_size)]
    links: dict[tuple[str, int], HostLink] = {}
    deadline = time.monotonic() + timeout_s
    by_name = {pool.name: pool for pool in pools}
    raise_open_file_limit()
    with listener:
        greeter = ChannelListener(
            listener,
            secret,
            HANDSHAKE_TIMEOUT_S,
            lambda channel, _, address: _register_peer(channel, address, by_name, arrived),
            lambda error: _log_accept_error(error, refused),
        )
        threading.Thread(
            target=greeter.accept_until_closed, name="registration", daemon=True
        ).start()
        while len(links) < len(places):
            try:
                name, link = arrived.get(timeout=min(LOOK_S, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if (error := find_lost_host()) is not None:
                    raise error from None
                if time.monotonic() < deadline:
                    continue
                missing = [
                    by_name[n].format_rank_label(r) for n, r in places if (n, r) not in links
                ]
                raise HostError(
                    f"{', '.join(missing)} did not register within {timeout_s:g} s; see"
                    f" their logs.{''.join(refused)}"
                ) from None
            if (name, link.rank) in links:
                logger.warning("%s registered twice; the second is refused", link.rank_label)
                link.channel.close()
            else:
                links[name, link.rank] = link
        listener.shutdown(socket.SHUT_RDWR)
    return {
        pool.name: [links[pool.name, rank] for rank in range(pool.layout.world_size)]
        for pool in pools
    }


def _log_accept_error(error: OSError | RuntimeError, refusal_messages: list[str]) -> None:
    """Log an error of accepting once, and put it into `refusal_messages`, which the message of a
    failed registration quotes.
    """
    said = f" The controller could not take connections: {error}."
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        said += (
            f" It may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files; raise the hard"
            " limit (ulimit -Hn)."
        )
    if said not in refusal_messages:
        logger.warning("%s It goes on trying.", said.strip())
        refusal_messages[:] = [said]


def _register_peer(
    channel: MessageChannel,
    peer_address: str,
    pools: Mapping[str, PoolSpec],
    registered_links: queue.SimpleQueue[tuple[str, HostLink]],
) -> None:
    """Receive the registration of an authenticated peer, and put (pool name, link) into
    `registered_links`. Close the connection of a peer of no pool.
    """
    try:
        message = channel.receive(time.monotonic() + HANDSHAKE_TIMEOUT_S)
        pool = pools.get(message.pool) if isinstance(message, HostRegistration) else None
        if pool is None or message.rank not in range(pool.layout.world_size):
            known = ", ".join(map(str, pools.values()))
            raise FrameError(f"{message} belongs to none of the pools {known}.")
    except (FrameError, EOFError, TimeoutError) as error:
        logger.warning("refused a connection from %s: %s", peer_address, error)
        channel.close()
        return
    name = pool.format_rank_label(message.rank)
    host = f"{message.hostname} ({channel.peer_address or peer_address})"
    registered_links.put(
        (pool.name, HostLink(message.rank, name, channel, message.pid, message.machine, host))
    )
