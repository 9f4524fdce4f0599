"""The connection between the controller and a driver of another machine: the messages of `port`,
over the network.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence

from rlhf_megatron.data import codec

_HEADER = struct.Struct("<QQ")  # number, bytes


class NetworkMessageChannel:
    """One end of a connection over the network, with the interface of `UnixMessageChannel`.
    Messages that are sent before `attach_socket` go out with the attached connection.
    """

    def __init__(
        self, on_message: Callable[[int, bytearray], None], on_closed: Callable[[], None]
    ) -> None:
        """Make a channel without a connection. The loop calls `on_message` with each message, and
        `on_closed` when the other end is gone, not after `close`.
        """
        self._on_message = on_message
        self._on_closed = on_closed
        self._writer: asyncio.StreamWriter | None = None
        self._unsent_pieces: list[codec.Buffer] = []
        self.is_closed = False

    async def attach_socket(self, connection: socket.socket) -> None:
        """Send the waiting messages over this connected socket, and send and receive over it from
        now on. A channel that was closed before closes the socket.
        """
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._writer.writelines(self._unsent_pieces)
        self._read_task = asyncio.get_running_loop().create_task(self._read_messages(reader))
        if self.is_closed:
            self.close()

    @property
    def is_outbox_empty(self) -> bool:
        """Return whether the channel is connected and nothing waits to be sent."""
        return self._writer is not None and not self._writer.transport.get_write_buffer_size()

    def send_message(self, message_number: int, payload_parts: Sequence[codec.Buffer] = ()) -> None:
        """Queue a message and return at once. Messages that the other end no longer reads are
        lost.
        """
        pieces = [_HEADER.pack(message_number, sum(map(len, payload_parts))), *payload_parts]
        if self._writer is None:
            self._unsent_pieces += pieces
        else:
            self._writer.writelines(pieces)

    def close(self) -> None:
        """Close the connection without sending what waits, and without calling `on_closed`. Safe to
        call twice.
        """
        self.is_closed = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        """Call `on_message` with each message until the connection ends, then close and call
        `on_closed`.
        """
        try:
            while True:
                number, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                self._on_message(number, bytearray(await reader.readexactly(size)))
        except (OSError, EOFError):
            pass
        finally:
            if not self.is_closed:
                self.close()
                self._on_closed()
