"""Where processes of this machine listen for TCP, as the kernel tells."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

LISTENS = "0A"  # TCP_LISTEN in the kernel's table


def listening(pid: int) -> list[str]:
    """Addresses, with ports, at which a process listens for TCP."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    inodes.add(match[1])
    return [address for inode, address in table() if inode in inodes]


def table() -> list[tuple[str, str]]:
    """(inode, address:port) of all listening sockets of this machine."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                raw, port = fields[1].split(":")
                words = b"".join(bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8))
                found.append((fields[9], f"{socket.inet_ntop(family, words)} {int(port, 16)}"))
    return found


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::1 ", "::ffff:127."))
