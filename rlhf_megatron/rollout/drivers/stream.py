"""The connection between the controller and a driver of another machine: the messages of `port`, over the network."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence

from rlhf_megatron.data import codec

_HEADER = struct.Struct("<QQ")  # number, bytes


class Stream:
    """One end, used as a `Port`. What is sent before it has a connection goes out with that."""

    def __init__(self, take: Callable[[int, bytearray], None], ended: Callable[[], None]) -> None:
        self._take, self._ended = take, ended
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: list[codec.Buffer] = []
        self.is_closed = False

    async def use(self, sock: socket.socket) -> None:
        """Send and receive over a connected socket from now on."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self._writer.writelines(self._waiting)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        if self.is_closed:
            self.close()

    @property
    def is_free(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._writer is not None and not self._writer.transport.get_write_buffer_size()

    def send(self, number: int, parts: Sequence[codec.Buffer] = ()) -> None:
        """Does not wait. What the other end does not read any more is lost."""
        pieces = [_HEADER.pack(number, sum(map(len, parts))), *parts]
        if self._writer is None:
            self._waiting += pieces
        else:
            self._writer.writelines(pieces)

    def close(self) -> None:
        """Safe to call twice."""
        self.is_closed = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                self._take(number, bytearray(await reader.readexactly(size)))
        except (OSError, EOFError):
            pass
        finally:
            if not self.is_closed:
                self.close()
                self._ended()
