"""MCP servers as a source of tools.

    FILES = McpServer(command=("npx", "-y", "@modelcontextprotocol/server-filesystem", "/data"))

    class Files(ToolEnvironment):
        async def list_tools(self, task):
            return await list_mcp_tools(FILES)

A worker has one connection to each server, which all of its episodes share. The servers of commands
are started at the first use, started again when they have died, and end with the worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

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
from rlhf_megatron.agents.tools import Tool, ToolError
from rlhf_megatron.import_folders import make_import_environment

__all__ = ["McpServer", "McpServerError", "McpToolError", "close_mcp_servers", "list_mcp_tools"]

CLOSE_S = 8.0  # for the process of the connections to end

_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, McpHostClient] = WeakKeyDictionary()


class McpToolError(ToolError):
    """A tool of an MCP server has answered that it failed."""


async def list_mcp_tools(server: McpServer) -> list[Tool]:
    """Return the tools of a server, as it listed them when it started. Raise McpServerError where
    the server cannot be started or reached.
    """
    client = _get_client()
    reply = await client.carry_out(ListTools(client.take_number(), server))
    return [_make_mcp_tool(server, tool) for tool in reply.tools]


async def close_mcp_servers() -> None:
    """Close the connections that this event loop has to MCP servers, and end the servers that were
    started for it.
    """
    client = _CLIENTS.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


def _make_mcp_tool(server: McpServer, listed: ListedTool) -> Tool:
    """Return a tool of a server."""
    name = server.name_prefix + listed.name
    # templates read these two keys of each tool
    parameters = {"type": "object", "properties": {}, **listed.input_schema}
    described = {"name": name, "description": listed.description, "parameters": parameters}

    async def call(**arguments: Any) -> str:
        """Call the tool at its server, and return its text."""
        return await _call_mcp_tool(server, listed.name, arguments)

    return Tool(name, {"type": "function", "function": described}, call, has_own_checks=True)


async def _call_mcp_tool(server: McpServer, name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a tool's answer. Raise McpToolError where the answer is an error."""
    client = _get_client()
    order = CallTool(client.take_number(), server, name, dict(arguments))
    return (await client.carry_out(order)).text


def _get_client() -> McpHostClient:
    """Return the client of the running event loop. It is made at the first call, and again after
    its process has died.
    """
    loop = asyncio.get_running_loop()
    client = _CLIENTS.get(loop)
    if client is None or client.has_ended or client.owner_pid != os.getpid():
        client = _CLIENTS[loop] = McpHostClient()
    return client


class McpHostClient:
    """An event loop's side of the process that has its connections to MCP servers (`mcp_host`)."""

    def __init__(self) -> None:
        """Start the process."""
        self.has_ended = False
        self.owner_pid = os.getpid()
        self._numbers = itertools.count()
        self._orders: asyncio.StreamWriter | None = None  # until the process has started
        self._waiting_lines: list[bytes] = []
        self._replies: dict[int, asyncio.Future[McpReply]] = {}  # by the order's number
        # in a context of its own: the episode that needs it first does not own it
        loop = asyncio.get_running_loop()
        self._task = contextvars.Context().run(loop.create_task, self._run())

    def take_number(self) -> int:
        """Return a number for the next order."""
        return next(self._numbers)

    async def carry_out(self, order: ListTools | CallTool) -> McpReply:
        """Send an order and return its reply. Raise McpToolError or McpServerError for an error."""
        future = self._replies[order.number] = asyncio.get_running_loop().create_future()
        try:
            self._send_order(order)
            reply = await future
        except asyncio.CancelledError:
            self._send_order(GiveUp(order.number))
            raise
        finally:
            del self._replies[order.number]
        if reply.error == "server":
            raise McpServerError(reply.text)
        if reply.error == "tool":
            raise McpToolError(reply.text or "the tool has failed without a message.")
        return reply

    async def close(self) -> None:
        """End the process, and with it the servers that it has started."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _send_order(self, order: McpOrder) -> None:
        """Write an order for the process, which reads all the time."""
        line = msgspec.json.encode(order) + b"\n"
        if self._orders is None:
            self._waiting_lines.append(line)
        elif not self._orders.is_closing():
            self._orders.write(line)

    async def _run(self) -> None:
        """Start the process and hand out its replies until it ends, or until this task is
        cancelled.
        """
        exit_text = "cannot be started"
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rlhf_megatron.agents.mcp_host", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=make_import_environment(os.environ),
                limit=2 * MAX_MESSAGE_BYTES,
            )
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            self._orders = process.stdin
            self._orders.writelines(self._waiting_lines)
            while line := await process.stdout.readline():
                self._take_reply(msgspec.json.decode(line, type=McpReply))
        finally:
            self.has_ended = True
            if process is not None:
                exit_text = f"has ended with exit code {await _end_host(process)}"
            for number, future in self._replies.items():
                text = (
                    f"the process of the connections to MCP servers {exit_text}; its messages are"
                    " in the log of the workers of episodes."
                )
                if not future.done():
                    future.set_result(McpReply(number, text=text, error="server"))

    def _take_reply(self, reply: McpReply) -> None:
        """Hand a reply to whoever waits for it, if anybody still does."""
        future = self._replies.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)


async def _end_host(process: asyncio.subprocess.Process) -> int:
    """End the process by the end of its input, else by force. Return its exit code."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            return await process.wait()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()
