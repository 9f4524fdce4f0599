"""The stores that torchrun makes listen on one address, as `weights.bound_store` says."""

from __future__ import annotations

import importlib
from typing import Any

from torch.distributed import TCPStore

from rlhf_megatron.weights.bound_store import AddressBoundStore

_USERS = (  # modules of torch that make the store of a run
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)


def bind_torchrun_stores() -> None:
    """Replace torch's store classes in this process, so that stores which torchrun makes from now
    on listen on one address only.
    """
    for name in _USERS:
        module: Any = importlib.import_module(name)
        assert module.TCPStore in (TCPStore, AddressBoundStore), (
            f"{name}.TCPStore is another class in this torch"
        )
        module.TCPStore = AddressBoundStore
    dynamic: Any = importlib.import_module(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    )
    assert hasattr(dynamic.DynamicRendezvousHandler, "_create_tcp_store_server"), (
        "this torch makes it elsewhere"
    )
    dynamic.DynamicRendezvousHandler._create_tcp_store_server = _make_shared_store


def _make_shared_store(self: Any, master_addr: str, master_port: int) -> TCPStore:
    """Return the store that the ranks use, as torch's rendezvous handler makes it, bound to
    `master_addr`.
    """
    return AddressBoundStore(master_addr, master_port, is_master=True, multi_tenant=True)
