"""Sockets of the control channel and to engines: how many a process may have, and that they notice a machine which
vanished. Without aiohttp, which few ranks need."""

from __future__ import annotations

import errno
import resource
import socket

OPEN_FILES = 65536  # wanted: a connection a group in flight, and one a rank
VANISHED_S = 15  # without a sign from the peer's kernel; then its machine counts as lost
_EVERY_S = VANISHED_S // 3  # between questions, after a silence as long
_OPTIONS = (
    ("TCP_KEEPIDLE", _EVERY_S),
    ("TCP_KEEPALIVE", _EVERY_S),  # macOS calls it so
    ("TCP_KEEPINTVL", _EVERY_S),
    ("TCP_KEEPCNT", 2),
    ("TCP_USER_TIMEOUT", VANISHED_S * 1000),  # bytes that are on the way keep questions from being sent
)


def allow_open_files() -> int:
    """Raise this process's soft limit of file descriptors to OPEN_FILES or the hard one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def notice_vanished(sock: socket.socket) -> None:
    """Make a machine that vanished an error of this socket within VANISHED_S, whether bytes are on the way or not. A
    system that has no TCP_USER_TIMEOUT (macOS) notices it so early only while none are."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        for name, value in _OPTIONS:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_vanished(error: OSError) -> bool:
    """Whether such a socket has failed since the peer's machine gives no sign."""
    return error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
