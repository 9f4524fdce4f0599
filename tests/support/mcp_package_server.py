"""An MCP server as its authors write one, with the package `mcp`.

python mcp_package_server.py [PORT]
"""

from __future__ import annotations

import sys

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def divide(a: float, b: float) -> str:
    """Divide two numbers."""
    return f"{a / b:g}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    server.run()
