"""A driver: a process that asks engines what the controller would ask, with the same client code, and hands over what
they answer as columns. It ends with the controller.

    python -m rlhf_megatron.rollout.drivers.process FILE_DESCRIPTOR NUMBER [PLUGIN ...]
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from rlhf_megatron import faults
from rlhf_megatron.data import codec
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.rollout.columns import GroupColumns
from rlhf_megatron.rollout.drivers.messages import BEAT, Answered
from rlhf_megatron.rollout.drivers.port import Port
from rlhf_megatron.rollout.drivers.stream import Stream
from rlhf_megatron.rollout.local import client as _local  # noqa: F401  registers its questions
from rlhf_megatron.rollout.router import balancer as _router  # noqa: F401
from rlhf_megatron.rollout.sglang import client as _sglang  # noqa: F401
from rlhf_megatron.rollout.sockets import allow_open_files

BEAT_S = 1.0


class Driver:
    """The work of a driver: its questions are tasks of one loop, by number."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, sock: socket.socket) -> None:
        """Answer the controller at the other end, until that is gone."""
        self._port: Port | Stream
        if sock.family == socket.AF_UNIX:
            self._port = Port(sock, self._take, lambda: os._exit(0))
        else:
            self._port = Stream(self._take, lambda: os._exit(0))
            await self._port.use(sock)
        while True:
            if self._port.is_free:
                self._port.send(BEAT)
            await asyncio.sleep(BEAT_S)

    def _take(self, number: int, data: bytearray) -> None:
        """Begin with a question; without data, cancel it."""
        if data:
            self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, data))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, data: bytearray) -> None:
        try:
            try:
                answer, data = codec.decode(data).answer(), bytearray()  # one of both is enough while the engine works
                groups = await answer
                answered = Answered(tuple(map(GroupColumns.of, groups)))
            except Exception as error:  # told to who has asked
                answered = Answered.failed(error)
            faults.reach("driver.before_reply")
            self._port.send(number, codec.encode_parts(answered))
        finally:
            del self._tasks[number]


def main() -> None:
    descriptor, number, *plugins = sys.argv[1:]
    faults.install_planned(f"driver{number}")
    load_plugins(plugins)
    allow_open_files()
    asyncio.run(Driver().serve(socket.socket(fileno=int(descriptor))))


if __name__ == "__main__":
    main()
