"""Sockets of the control channel and to engines: how many a process may have, and that they notice
a machine which vanished; the interface that leads to an address. Without aiohttp, which
few ranks need.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import resource
import socket
import struct
from pathlib import Path

MAX_OPEN_FILES = 65536  # wanted: a connection a group in flight, and one a rank
DEAD_PEER_TIMEOUT_S = 15  # without a sign from the peer's kernel; then its machine counts as lost
_KEEPALIVE_INTERVAL_S = DEAD_PEER_TIMEOUT_S // 3  # between questions, after a silence as long
_KEEPALIVE_OPTIONS = (
    ("TCP_KEEPIDLE", _KEEPALIVE_INTERVAL_S),
    ("TCP_KEEPALIVE", _KEEPALIVE_INTERVAL_S),  # macOS calls it so
    ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
    ("TCP_KEEPCNT", 2),
    (
        "TCP_USER_TIMEOUT",
        DEAD_PEER_TIMEOUT_S * 1000,
    ),  # bytes that are on the way keep questions from being sent
)

_SIOCGIFADDR = 0x8915


def raise_open_file_limit() -> int:
    """Raise this process's soft limit of file descriptors to MAX_OPEN_FILES, or to the hard limit
    where that is lower. A soft limit that is higher already stays. Return the limit (at most
    MAX_OPEN_FILES where there is none).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def count_local_ports() -> int:
    """Return how many connections to one address this machine can have, by its range of local
    ports.
    """
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:  # not Linux: what IANA gives to such ports
        first = 49152
        last = 65535
    return last - first + 1


def enable_dead_peer_detection(sock: socket.socket) -> None:
    """Make this socket fail within DEAD_PEER_TIMEOUT_S when the peer's machine vanishes, whether
    bytes are on the way or not. A system without TCP_USER_TIMEOUT (macOS) is this fast only while
    no bytes are on the way.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        for name, value in _KEEPALIVE_OPTIONS:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_dead_peer_error(error: OSError) -> bool:
    """Return whether a socket error means that the peer's machine no longer answers."""
    return error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def find_interface_towards(address: str) -> str | None:
    """Return the name of the network interface through which this machine reaches the IPv4
    `address`; None where it cannot be found, as for IPv6.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own: str = probe.getsockname()[0]
            if own.startswith("127."):
                return "lo"
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address
                    request = struct.pack("256s", name.encode())
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                    if socket.inet_ntoa(found) == own:
                        return name
    except OSError:  # the rendezvous will say what is wrong with the address
        return None
    return None
