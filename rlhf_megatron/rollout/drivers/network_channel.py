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
    """One end, used as a `UnixMessageChannel`. What is sent before it has a connection goes
    out with that.
    """

    def __init__(
        self, on_message: Callable[[int, bytearray], None], on_closed: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._writer: asyncio.StreamWriter | None = None
        self._unsent_pieces: list[codec.Buffer] = []
        self.is_closed = False

    async def attach_socket(self, connection: socket.socket) -> None:
        """Send and receive over a connected socket from now on."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._writer.writelines(self._unsent_pieces)
        self._read_task = asyncio.get_running_loop().create_task(self._read_messages(reader))
        if self.is_closed:
            self.close()

    @property
    def is_outbox_empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._writer is not None and not self._writer.transport.get_write_buffer_size()

    def send_message(self, message_number: int, payload_parts: Sequence[codec.Buffer] = ()) -> None:
        """Does not wait. What the other end does not read any more is lost."""
        pieces = [_HEADER.pack(message_number, sum(map(len, payload_parts))), *payload_parts]
        if self._writer is None:
            self._unsent_pieces += pieces
        else:
            self._writer.writelines(pieces)

    def close(self) -> None:
        """Safe to call twice."""
        self.is_closed = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
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
