"""torch's rendezvous store on one address: its own server listens on all of them, and takes commands from anyone."""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

_USERS = (  # modules of torch that make the store of a run
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)


class BoundStore(TCPStore):
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
        listener = _listen(host_name, port) if is_master and options.get("master_listen_fd") is None else None
        if listener is not None:
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, timeout, **options)


def bind_stores() -> None:
    """The stores that torchrun makes in this process listen on one address from now on."""
    for name in _USERS:
        module: Any = importlib.import_module(name)
        assert module.TCPStore in (TCPStore, BoundStore), f"{name}.TCPStore is another class in this torch"
        module.TCPStore = BoundStore
    dynamic: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    assert hasattr(dynamic.DynamicRendezvousHandler, "_create_tcp_store_server"), "this torch makes it elsewhere"
    dynamic.DynamicRendezvousHandler._create_tcp_store_server = _shared_store


def _shared_store(self: Any, master_addr: str, master_port: int) -> TCPStore:
    """The one that the ranks use."""
    return BoundStore(master_addr, master_port, is_master=True, multi_tenant=True)


def _listen(host_name: str, port: int) -> socket.socket | None:
    """None where that cannot be: torch then says what is wrong, or the control channel does."""
    address = "127.0.0.1" if host_name == "localhost" else host_name  # ranks are given the first, torchrun the second
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=2048)
    except OSError:
        return None
