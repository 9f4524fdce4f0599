"""What names an MCP server, and what a worker and the process of its MCP connections tell each
other: lines of JSON.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import msgspec
from packaging.specifiers import SpecifierSet

from rlhf_megatron.install_hints import format_install_command

MCP_VERSIONS = SpecifierSet(">=2.3,<3")
MAX_MESSAGE_BYTES = 1 << 26  # of a server


class McpServerError(RuntimeError):
    """An MCP server cannot be started or reached, has ended, or has not kept to the protocol."""


@dataclass(frozen=True)
class McpServer:
    """An MCP server: a `command` that is started (stdio), or the `url` of one that runs (streamable
    HTTP).
    """

    command: tuple[str, ...] = ()
    url: str | None = None
    # of the command, beside PATH, HOME and the like; nothing else of the worker's is passed on
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)  # of HTTP requests
    start_timeout_s: float = 30.0  # until the server has listed its tools
    # for a sign of life after a call that failed or was given up; then the connection is replaced
    hang_timeout_s: float = 30.0
    name_prefix: str = ""  # before the names of its tools, where two servers have the same

    def __post_init__(self) -> None:
        """Raise ValueError for a server that cannot be meant, and where `mcp` is not installed."""
        if isinstance(self.command, str):
            raise ValueError(
                f"McpServer.command is the text {self.command!r}; give a tuple of program and"
                f" arguments: {tuple(shlex.split(self.command))}."
            )
        object.__setattr__(self, "command", tuple(self.command))  # hashable, if it was a list
        if bool(self.command) == bool(self.url):
            raise ValueError(
                "McpServer needs either a command, which is started, or the url of a server that"
                f" runs; it has command={self.command} and url={self.url!r}."
            )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"McpServer.url ({self.url}) must begin with http:// or https://.")
        if self.url and self.environment:
            raise ValueError("McpServer.environment is of a command; a url has headers instead.")
        if self.command and self.headers:
            raise ValueError("McpServer.headers are of a url; a command has environment instead.")
        for name in ("start_timeout_s", "hang_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"McpServer.{name} ({getattr(self, name)}) must be above 0.")
        check_mcp_version()

    def __str__(self) -> str:
        """Return what the server is called in messages: without arguments of the command and
        without the query of the URL, which may hold keys.
        """
        if self.url is None:
            return f"the MCP server {' '.join(self.command[:2])}"
        scheme, _, rest = self.url.partition("://")
        return f"the MCP server {scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def check_mcp_version() -> None:
    """Raise ValueError where the package `mcp` is not there, or of a version that does not work."""
    command = format_install_command("agents")
    try:
        installed = version("mcp")
    except PackageNotFoundError:
        raise ValueError(f"MCP servers need the package mcp; {command} installs it.") from None
    if not MCP_VERSIONS.contains(installed, prereleases=True):
        raise ValueError(
            f"MCP servers need the package mcp {MCP_VERSIONS}, and {installed} is installed;"
            f" {command} installs another."
        )


class ListTools(msgspec.Struct, tag=True):
    """Asks for the tools of a server."""

    number: int  # of the order; the reply has the same
    server: McpServer


class CallTool(msgspec.Struct, tag=True):
    """Asks for a call of a tool."""

    number: int
    server: McpServer
    tool_name: str
    arguments: dict[str, Any]


class GiveUp(msgspec.Struct, tag=True):
    """Says that nobody waits for the reply to an order any more."""

    number: int


McpOrder = ListTools | CallTool | GiveUp


class ListedTool(msgspec.Struct):
    """A tool as its server describes it."""

    name: str
    description: str
    input_schema: dict[str, Any]


class McpReply(msgspec.Struct):
    """The reply to an order."""

    number: int
    tools: list[ListedTool] = []
    text: str = ""  # of a call's result, or of the error
    # what has failed: the call itself, or the server
    error: Literal["", "tool", "server"] = ""
