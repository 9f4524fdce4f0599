"""torch's rendezvous store on one address: its own server listens on all of them, and takes
commands from anyone.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore


class AddressBoundStore(TCPStore):
    """A TCPStore whose server listens on the address `host_name` and on no other."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(minutes=5),  # torch's own
        **options: Any,
    ) -> None:
        """Start or join the store as TCPStore does; a master listens on `host_name` only. Port 0
        takes a free port.
        """
        if is_master and options.get("master_listen_fd") is None:
            try:
                listener = listen_on_address(host_name, port)
            except OSError:
                pass  # torch then says what is wrong, or the control channel does
            else:
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, timeout, **options)


def listen_on_address(host_name: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only; port 0 takes a free port. Raise OSError
    where that fails.
    """
    # ranks are given the first, torchrun the second
    address = "127.0.0.1" if host_name == "localhost" else host_name
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=2048)
