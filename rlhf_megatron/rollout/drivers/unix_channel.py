"""One end of the connection between the controller and a driver, on an event loop of its process.

A message is a number and bytes, of `data.codec` or none. Many bytes go through memory that both
processes have: a file without a name, which ends with its last reader.
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
_MAX_INLINE_BYTES = 1 << 15  # bytes that go with the message itself
_MAX_MESSAGES_AT_ONCE = 64  # messages; then others of the loop have their turn


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected Unix sockets, which keep the borders of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class UnixMessageChannel:
    """One end of the connection between the controller and a driver on the same machine. Make and
    use it in the running loop.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[int, bytearray], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Read messages from `connection` in the running loop: call `on_message` with the number
        and bytes of each, and `on_closed` when the other end is gone.
        """
        self._connection = connection
        self._on_message = on_message
        self._on_closed = on_closed
        self._event_loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[int, Sequence[codec.Buffer]]] = deque()
        connection.setblocking(False)
        self._event_loop.add_reader(connection, self._read_messages)

    @property
    def is_outbox_empty(self) -> bool:
        """Return whether nothing waits to be sent."""
        return not self._outbox

    def send_message(self, message_number: int, payload_parts: Sequence[codec.Buffer] = ()) -> None:
        """Queue a message, send what the socket takes, and return at once. Messages that the other
        end no longer reads are lost.
        """
        self._outbox.append((message_number, payload_parts))
        if len(self._outbox) == 1:
            self._flush_outbox()

    def close(self) -> None:
        """Close the connection and drop what waits to be sent, without calling `on_closed`. Safe to
        call twice.
        """
        if self._connection.fileno() >= 0:
            self._event_loop.remove_reader(self._connection)
            self._event_loop.remove_writer(self._connection)
            self._outbox.clear()
            self._connection.close()

    def _flush_outbox(self) -> None:
        """Send queued messages until the socket is full; the loop then calls this again when there
        is room. Drop all messages where the socket fails.
        """
        while self._outbox:
            try:
                self._send_now(*self._outbox[0])
            except BlockingIOError:
                self._event_loop.add_writer(self._connection, self._flush_outbox)
                return
            except OSError:  # the reader hears of it
                self._outbox.clear()
                break
            self._outbox.popleft()
        if self._connection.fileno() >= 0:
            self._event_loop.remove_writer(self._connection)

    def _send_now(self, message_number: int, payload_parts: Sequence[codec.Buffer]) -> None:
        """Send one message, in the socket where it is small, else in a memory file whose descriptor
        the socket carries. Raise BlockingIOError where the socket is full.
        """
        size = sum(map(len, payload_parts))
        header = _HEADER.pack(message_number, size)
        if size <= _MAX_INLINE_BYTES:
            self._connection.send(b"".join((header, *payload_parts)))
            return
        with open(os.memfd_create("driver"), "wb", buffering=0) as file:
            for part in payload_parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[file.write(view) :]
            socket.send_fds(self._connection, [header], [file.fileno()])

    def _read_messages(self) -> None:
        """Call `on_message` for the messages that are there, a limited number at once. Where the
        other end is gone, close and call `on_closed`.
        """
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            try:
                data, files, _, _ = socket.recv_fds(
                    self._connection, _HEADER.size + _MAX_INLINE_BYTES, 1
                )
            except BlockingIOError:
                return
            except OSError:
                data = b""
                files = []
            if not data:
                self.close()
                self._on_closed()
                return
            number, size = _HEADER.unpack_from(data)
            self._on_message(
                number,
                _copy_file_content(files[0], size) if files else bytearray(data[_HEADER.size :]),
            )
            if self._connection.fileno() < 0:
                return


def _copy_file_content(descriptor: int, size: int) -> bytearray:
    """Return the first `size` bytes of the file and close the descriptor. A copy, so that the
    file's memory is freed, however long the columns live.
    """
    try:
        data = bytearray(size)
        view = memoryview(data)
        position = 0
        while position < size:
            count = os.preadv(descriptor, [view[position:]], position)
            assert count, f"{position} of {size} bytes of a message are there"
            position += count
        return data
    finally:
        os.close(descriptor)
