"""The process of a worker's connections to MCP servers. What servers send is read and parsed here,
so that a large answer does not hold up the episodes of the worker.

    python -m rlhf_megatron.agents.mcp_host PARENT_PID

reads orders from its standard input and writes replies, as lines of JSON; it closes its connections
and ends when the input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec
from mcp import MCPError, types

from rlhf_megatron.agents.mcp_connection import CLOSED, McpConnection, describe_error
from rlhf_megatron.agents.mcp_server import (
    MAX_MESSAGE_BYTES,
    CallTool,
    GiveUp,
    ListedTool,
    ListTools,
    McpOrder,
    McpReply,
    McpServer,
    McpServerError,
)
from rlhf_megatron.parent_process import end_with_parent

CLOSE_S = 5.0  # for all servers to end


class McpHost:
    """Carries out the orders of a worker."""

    def __init__(self, replies: BinaryIO) -> None:
        """Begin without connections. Replies are written into `replies`."""
        self._replies = replies
        self._connections: dict[McpServer, McpConnection] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the order's number

    async def serve(self, orders: asyncio.StreamReader) -> None:
        """Carry out orders until there are no more, then close all connections."""
        while line := await orders.readline():
            order = msgspec.json.decode(line, type=McpOrder)
            if isinstance(order, GiveUp):
                if order.number in self._tasks:
                    self._tasks[order.number].cancel()
                continue
            self._tasks[order.number] = asyncio.create_task(self._carry_out(order))
        for connection in self._connections.values():
            connection.end(CLOSED)
        ending = [connection.task for connection in self._connections.values()]
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_S)

    async def _carry_out(self, order: ListTools | CallTool) -> None:
        """Carry out an order and write the reply."""
        try:
            reply = await self._make_reply(order)
            line = msgspec.json.encode(reply)
            if len(line) > MAX_MESSAGE_BYTES:
                text = f"the answer has more than {MAX_MESSAGE_BYTES >> 20} MiB."
                line = msgspec.json.encode(McpReply(order.number, text=text, error="tool"))
            self._replies.write(line + b"\n")
            self._replies.flush()
        finally:
            del self._tasks[order.number]

    async def _make_reply(self, order: ListTools | CallTool) -> McpReply:
        """Carry out an order and return the reply, whatever happens."""
        number = order.number
        try:
            connection = await self._open_connection(order.server)
            if isinstance(order, ListTools):
                return McpReply(number, tools=[_describe_tool(tool) for tool in connection.tools])
            result = await connection.call(order.tool_name, order.arguments)
        except McpServerError as error:
            return McpReply(number, text=str(error), error="server")
        except MCPError as error:  # an answer of the server
            return McpReply(number, text=describe_error(error), error="tool")
        except Exception as error:  # an answer that is none
            text = f"the tool's server has not answered as MCP asks: {describe_error(error)}"
            return McpReply(number, text=text, error="tool")
        text = format_content(result.content, result.structured_content)
        return McpReply(number, text=text, error="tool" if result.is_error else "")

    async def _open_connection(self, server: McpServer) -> McpConnection:
        """Return the connection to a server, once the server has listed its tools."""
        connection = self._connections.get(server)
        if connection is None or connection.can_be_replaced():
            connection = self._connections[server] = McpConnection(server, connection)
        await connection.wait_until_started()
        return connection


def _describe_tool(tool: types.Tool) -> ListedTool:
    """Return a tool as workers read it."""
    return ListedTool(tool.name, tool.description or tool.title or "", tool.input_schema)


def format_content(parts: Sequence[types.ContentBlock], structured_content: Any) -> str:
    """Return an answer as text: its texts as they are, its other parts named, and its structured
    content where no part is text.
    """
    texts = [_format_part(part) for part in parts]
    if structured_content is not None and all(part.type != "text" for part in parts):
        texts.append(msgspec.json.encode(structured_content).decode())
    return "\n".join(texts)


def _format_part(part: types.ContentBlock) -> str:
    """Return a part of an answer as text."""
    if isinstance(part, types.TextContent):
        return part.text
    if isinstance(part, (types.ImageContent, types.AudioContent)):
        return f"[{part.type} of type {part.mime_type}, which cannot be shown as text]"
    if isinstance(part, types.ResourceLink):
        return f"[link to the resource {part.name}: {part.uri}]"
    if isinstance(part.resource, types.TextResourceContents):
        return part.resource.text
    return f"[resource {part.resource.uri}, which cannot be shown as text]"


async def _serve_standard_input(replies: BinaryIO) -> None:
    """Carry out the orders of the standard input."""
    orders = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    await McpHost(replies).serve(orders)


def main() -> None:
    """Serve the worker that has started this process. sys.argv has its pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker's end ends it
    end_with_parent(signal.SIGKILL, int(sys.argv[1]))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints does not print a reply
    asyncio.run(_serve_standard_input(replies))


if __name__ == "__main__":
    main()
