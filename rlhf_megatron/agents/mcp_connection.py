"""A connection to an MCP server, from its start to its end, in the process of MCP connections."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
from mcp import Client, MCPError, types
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from rlhf_megatron.agents.mcp_guard import make_guarded_command
from rlhf_megatron.agents.mcp_server import MAX_MESSAGE_BYTES, McpServer, McpServerError

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # after a start that failed, before the next one
EXIT_S = 1.0  # for a server to end once its input has ended, or its output
KILL_S = 5.0  # for the guard of a server to kill it
CLOSED = "was closed"  # why a connection has ended: nobody needs it any more


class McpConnection:
    """A connection to a server, from its start to its end."""

    def __init__(self, server: McpServer, predecessor: McpConnection | None) -> None:
        """Begin to connect, once `predecessor` has ended: its server may hold what the next one
        needs.
        """
        self.tools: list[types.Tool] = []
        self._server = server
        self._predecessor = predecessor
        self._session: Any = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._end_reason = ""
        self._failed_at: float | None = None  # of a start
        self._check: asyncio.Task[None] | None = None
        # contexts of anyio must be left in the task that has entered them
        self.task = asyncio.create_task(self._run())

    async def wait_until_started(self) -> None:
        """Wait until the server has listed its tools. Raise McpServerError if it does not."""
        await asyncio.shield(self._started)

    def can_be_replaced(self) -> bool:
        """Return whether the connection is of no use any more. One that could not start stands for
        a while, so that a thousand episodes do not start a broken server a thousand times.
        """
        if self._failed_at is not None:
            return time.monotonic() - self._failed_at > RETRY_S
        return self._ended.is_set()

    def end(self, reason: str) -> None:
        """End the connection. The first reason counts."""
        if not self._ended.is_set():
            self._end_reason = reason
            self._ended.set()

    async def call(self, tool_name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Return the server's answer to a call. Raise McpServerError where the server ends
        meanwhile, and MCPError where it refuses the call.
        """
        params = types.CallToolRequestParams(name=tool_name, arguments=dict(arguments))
        # the server's text is the model's to read; whether it keeps to its own output schema is not
        # checked, as `call_tool` of the package does
        request = self._session.send_request(
            types.CallToolRequest(params=params), types.CallToolResult
        )
        answering = asyncio.ensure_future(request)
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({answering, ending}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not (self._ended.is_set() and answering.exception()):
                return answering.result()
            raise McpServerError(f"the tool's server {self._end_reason} during the call.")
        except MCPError as error:
            self._start_check()
            if error.code == types.CONNECTION_CLOSED:
                raise McpServerError("the tool's server closed the connection.") from error
            raise
        except asyncio.CancelledError:
            self._start_check()
            raise
        finally:
            for task in (answering, ending):
                task.cancel()

    async def _run(self) -> None:
        """Connect, stay connected until the end, and release everything."""
        failure = ""
        if self._predecessor is not None:
            await asyncio.wait({self._predecessor.task})
            self._predecessor = None
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.start_timeout_s):
                    client = await stack.enter_async_context(self._make_client())
                    self.tools = await _fetch_tools(client.session)
                self._session = client.session
                self._started.set_result(None)
                await self._ended.wait()
        except TimeoutError:
            failure = f"has not listed its tools within {self._server.start_timeout_s:g} s"
        except Exception as error:  # of the package, of the network, of the program
            failure = f"failed: {describe_error(error)}"
        self.end(failure)
        if self._started.done():
            if self._end_reason != CLOSED:
                logger.warning("%s %s", self._server, self._end_reason)
            return
        self._failed_at = time.monotonic()
        self._started.set_exception(
            McpServerError(
                f"{self._server} {self._end_reason}; its own messages are in the log of the workers"
                " of episodes."
            )
        )
        self._started.exception()  # it may be that nobody waits any more

    def _make_client(self) -> AbstractAsyncContextManager[Any]:
        """Return the package's client, not yet connected."""
        server = self._server
        transport = _connect_url(server) if server.url else _start_command(server, self.end)
        return Client(transport, cache=None)

    def _start_check(self) -> None:
        """Find out whether the server still answers, after a call that failed or was given up."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._check_answers())

    async def _check_answers(self) -> None:
        """End the connection where the server does not even list its tools any more."""
        timeout_s = self._server.hang_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._session.list_tools()
        except TimeoutError:
            self.end(f"has not answered anything for {timeout_s:g} s and was given up")
        except Exception as error:
            self.end(f"failed: {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Return the text of an error, or of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


async def _fetch_tools(session: Any) -> list[types.Tool]:
    """Return all tools that the server lists, page by page."""
    page = await session.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        params = types.PaginatedRequestParams(cursor=page.next_cursor)
        page = await session.list_tools(params=params)
        tools += page.tools
    return tools


@asynccontextmanager
async def _connect_url(server: McpServer) -> AsyncIterator[Any]:
    """Yield the streams of messages from and to a server that is reached over HTTP."""
    assert server.url is not None, "the caller tells servers with a url from commands"
    async with (
        create_mcp_http_client(headers=dict(server.headers)) as http_client,
        streamable_http_client(
            server.url, http_client=http_client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams


@asynccontextmanager
async def _start_command(
    server: McpServer, note_end: Callable[[str], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start the server and yield the streams of messages from and to it; end it afterwards. Call
    `note_end` with the reason when the server has ended before.

    The package's own `stdio_client` would let a server that ignores the end of its input outlive a
    worker that is killed.
    """
    environment = get_default_environment() | dict(server.environment)
    program = server.command[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise McpServerError(f"there is no program {program} on the PATH of the server")
    process = await asyncio.create_subprocess_exec(
        *make_guarded_command(server.command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        limit=MAX_MESSAGE_BYTES,
        # what kills the group of the worker must leave the guard the time to kill the others
        start_new_session=True,
    )
    incoming_sender, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, outgoing_receiver = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_read_messages(process, incoming_sender, server, note_end)),
        asyncio.create_task(_write_messages(process, outgoing_receiver)),
    ]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _end_process(server, process)
        for stream in (incoming_sender, incoming, outgoing, outgoing_receiver):
            stream.close()


async def _read_messages(
    process: asyncio.subprocess.Process,
    messages: Any,
    server: McpServer,
    note_end: Callable[[str], None],
) -> None:
    """Pass on the messages that the server writes, a line each, until it ends."""
    assert process.stdout is not None, "the process was started with pipes"
    has_warned = False
    try:
        while line := await process.stdout.readline():
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                if not has_warned and line.strip():
                    logger.warning("%s writes lines that are no messages: %r", server, line[:200])
                    has_warned = True
                continue
            await messages.send(SessionMessage(message))
        reason = await _describe_exit(process)
    except ValueError:  # of readline
        reason = f"has written a line of more than {MAX_MESSAGE_BYTES >> 20} MiB and was ended"
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # this side has ended
    note_end(reason)
    messages.close()


async def _describe_exit(process: asyncio.subprocess.Process) -> str:
    """Return how a server that has closed its output has ended."""
    if await _wait_for_exit(process, EXIT_S):
        return f"ended with exit code {process.returncode}"
    return "has closed its output and was ended"


async def _write_messages(process: asyncio.subprocess.Process, messages: Any) -> None:
    """Write the messages for the server, a line each. The end of the server shows in its output."""
    assert process.stdin is not None, "the process was started with pipes"
    with suppress(ConnectionError):
        async for session_message in messages:
            text = session_message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _end_process(server: McpServer, process: asyncio.subprocess.Process) -> None:
    """End a server: by the end of its input, else by its guard."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    process.stdin.close()
    # `wait` comes back at the end of the output too, which nobody reads any more
    draining = asyncio.create_task(_drain(process.stdout))
    for timeout_s, end_by_force in ((EXIT_S, process.terminate), (KILL_S, process.kill)):
        if await _wait_for_exit(process, timeout_s):
            return
        with suppress(ProcessLookupError):
            end_by_force()
    if not await _wait_for_exit(process, KILL_S):
        draining.cancel()
        logger.warning("%s (process %d) cannot be killed", server, process.pid)


async def _wait_for_exit(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Wait until a process has ended, and return whether it has."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
    return process.returncode is not None


async def _drain(output: asyncio.StreamReader) -> None:
    """Read to the end."""
    while await output.read(1 << 16):
        pass
