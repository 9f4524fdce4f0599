"""Where the ranks of a server find one another on a machine, and which ports servers listen to."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.rollout.engine_interface import EngineError

INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def make_loopback_environment(
    env: Mapping[str, str], inherited_env: Mapping[str, str], is_one_machine: bool
) -> dict[str, str]:
    """Return environment variables that make the ranks of a server listen on the loopback interface
    only. Leave out variables that are set already; return none where other machines must reach the
    ranks.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {
        name: "lo"
        for name in names
        if is_one_machine and name not in env and name not in inherited_env
    }


class RendezvousFiles:
    """Makes the files in which the ranks of each server find one another. SGLang's own way is a TCP
    store, which torch binds to all addresses of the machine, at a port that another process can
    have taken.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="rlhf-engines-", ignore_cleanup_errors=True
        )

    def __reduce__(self) -> tuple[type[RendezvousFiles], tuple[()]]:
        """Pickle as a new object, with a new directory in the process that loads it."""
        return RendezvousFiles, ()

    def make_environment(self, server_name: str, port: int) -> dict[str, str]:
        """Return environment variables that name a fresh rendezvous file for the server of this
        name.
        """
        path = Path(self._folder.name) / f"{server_name}-{port}"
        path.unlink(missing_ok=True)
        # SGLang names segments of shared memory after the port, where there is one.
        return {INIT_METHOD: f"file://{path}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class PortAllocator:
    """Finds free loopback ports below the range of ports that the kernel assigns by itself, and
    returns none twice. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        self._next_port = 20000 + os.getpid() * 37 % max(1, low - 21000)

    def __reduce__(self) -> tuple[type[PortAllocator], tuple[()]]:
        """Pickle as a new object, which finds the ports of the machine that loads it."""
        return PortAllocator, ()

    def reserve_ports(self, num_ports: int = 1) -> int:
        """Return the first of `num_ports` free ports in a row, and never return them again. Nothing
        listens on them yet. Raise EngineError when none of a thousand is free.
        """
        with self._lock:
            for first in range(self._next_port, self._next_port + 1000):
                try:
                    for port in range(first, first + num_ports):
                        with socket.socket() as probe:
                            probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                self._next_port = first + num_ports
                return first
        raise EngineError(
            f"no free port on 127.0.0.1 in {self._next_port}..{self._next_port + 999}; end"
            " what uses them."
        )
