"""One end of the connection between the controller and a driver, on an event loop of its process.

A message is a number and bytes, of `data.codec` or none. Many bytes go through memory that both processes have: a file
without a name, which ends with its last reader.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from rlhf_megatron.data import codec

_HEADER = struct.Struct("<QQ")  # number, bytes
_INLINE = 1 << 15  # bytes that go with the message itself
_AT_ONCE = 64  # messages; then others of the loop have their turn


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends, which keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Port:
    """One end of the connection between controller and driver. Make and use it in the loop that runs."""

    def __init__(self, sock: socket.socket, take: Callable[[int, bytearray], None], ended: Callable[[], None]) -> None:
        """`take` is called with each message, `ended` when the other end is gone."""
        self._socket = sock
        self._take, self._ended = take, ended
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[int, Sequence[codec.Buffer]]] = deque()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    @property
    def is_free(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._outbox

    def send(self, number: int, parts: Sequence[codec.Buffer] = ()) -> None:
        """Does not wait. What the other end does not read any more is lost."""
        self._outbox.append((number, parts))
        if len(self._outbox) == 1:
            self._write()

    def close(self) -> None:
        """Safe to call twice."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._outbox.clear()
            self._socket.close()

    def _write(self) -> None:
        while self._outbox:
            try:
                self._send(*self._outbox[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._write)
                return
            except OSError:  # the reader hears of it
                self._outbox.clear()
                break
            self._outbox.popleft()
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)

    def _send(self, number: int, parts: Sequence[codec.Buffer]) -> None:
        size = sum(map(len, parts))
        header = _HEADER.pack(number, size)
        if size <= _INLINE:
            self._socket.send(b"".join((header, *parts)))
            return
        with open(os.memfd_create("driver"), "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[file.write(view) :]
            socket.send_fds(self._socket, [header], [file.fileno()])

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _HEADER.size + _INLINE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, files = b"", []
            if not data:
                self.close()
                self._ended()
                return
            number, size = _HEADER.unpack_from(data)
            self._take(number, _content(files[0], size) if files else bytearray(data[_HEADER.size :]))
            if self._socket.fileno() < 0:
                return


def _content(file: int, size: int) -> bytearray:
    """A copy in memory of this process: the file is gone with it, whatever becomes of the columns."""
    try:
        data = bytearray(size)
        view, position = memoryview(data), 0
        while position < size:
            count = os.preadv(file, [view[position:]], position)
            assert count, f"{position} of {size} bytes of a message are there"
            position += count
        return data
    finally:
        os.close(file)
