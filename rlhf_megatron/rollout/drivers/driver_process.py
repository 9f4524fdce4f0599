"""A driver: a process that asks engines what the controller would ask, with the same client code,
and hands over what they answer as columns. It ends with the controller.

    python -m rlhf_megatron.rollout.drivers.driver_process FILE_DESCRIPTOR NUMBER [PLUGIN ...]
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from rlhf_megatron import faults
from rlhf_megatron.data import codec
from rlhf_megatron.import_folders import protect_imports
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.rollout.drivers.driver_reply import HEARTBEAT, DriverReply
from rlhf_megatron.rollout.drivers.network_channel import NetworkMessageChannel
from rlhf_megatron.rollout.drivers.unix_channel import UnixMessageChannel
from rlhf_megatron.rollout.group_columns import GroupColumns

# registers its questions
from rlhf_megatron.rollout.local import local_client as _local  # noqa: F401
from rlhf_megatron.rollout.router import router_balancer as _router  # noqa: F401
from rlhf_megatron.rollout.sglang import sglang_client as _sglang  # noqa: F401
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit

HEARTBEAT_INTERVAL_S = 1.0


class DriverServer:
    """Answer the controller's queries in a driver process; each query is a task of one loop, by its
    number.
    """

    def __init__(self) -> None:
        self._task_by_query: dict[int, asyncio.Task[None]] = {}

    async def serve_controller(self, connection: socket.socket) -> None:
        """Answer queries that come over `connection` and send heartbeats, forever. The process
        exits with code 0 when the controller's end is gone.
        """
        self._channel: UnixMessageChannel | NetworkMessageChannel
        if connection.family == socket.AF_UNIX:
            self._channel = UnixMessageChannel(
                connection, self._handle_message, lambda: os._exit(0)
            )
        else:
            self._channel = NetworkMessageChannel(self._handle_message, lambda: os._exit(0))
            await self._channel.attach_socket(connection)
        while True:
            if self._channel.is_outbox_empty:
                self._channel.send_message(HEARTBEAT)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _handle_message(self, query_number: int, data: bytearray) -> None:
        """Start to answer the query in `data`; where `data` is empty, cancel the query of that
        number.
        """
        if data:
            self._task_by_query[query_number] = asyncio.get_running_loop().create_task(
                self._answer_query(query_number, data)
            )
        elif query_number in self._task_by_query:
            self._task_by_query[query_number].cancel()

    async def _answer_query(self, query_number: int, data: bytearray) -> None:
        """Send the query to its engine, and send the samples, or the error, back to the
        controller.
        """
        try:
            try:
                # one of both is enough while the engine works
                answer = codec.decode_message(data).fetch_groups()
                data = bytearray()
                groups = await answer
                answered = DriverReply(tuple(map(GroupColumns.from_samples, groups)))
            except Exception as error:  # told to who has asked
                answered = DriverReply.from_error(error)
            faults.reach_fault_point("driver.before_reply")
            self._channel.send_message(query_number, codec.encode_message_pieces(answered))
        finally:
            del self._task_by_query[query_number]


def main() -> None:
    """Run a driver with the command line of the module's docstring; it returns only by an error."""
    descriptor, number, *plugins = sys.argv[1:]
    faults.install_fault_plan_from_env(f"driver{number}")
    protect_imports()
    load_plugins(plugins)
    raise_open_file_limit()
    asyncio.run(DriverServer().serve_controller(socket.socket(fileno=int(descriptor))))


if __name__ == "__main__":
    main()
