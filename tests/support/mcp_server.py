"""An MCP server of the standard library alone, right or faulty in every way that a test names.

    python mcp_server.py [--http PORT] [--sse] [FAULT ...]

FAULT: `die_at_start`, `hang_at_start`, `ignore_eof`, `noise`, `many_tools`, `odd_schemas`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_MANY_TOOLS = 500
PAGE_SIZE = 200
WRITE_LOCK = threading.Lock()
ODD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "properties": {"a": True, "b": {"type": ["string", "null"]}}},
    {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    },
    {"type": "object", "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
]


def list_tools(faults: set[str]) -> list[dict[str, Any]]:
    if "many_tools" in faults:
        return [
            {"name": f"tool_{number}", "inputSchema": {"type": "object"}}
            for number in range(NUM_MANY_TOOLS)
        ]
    if "odd_schemas" in faults:
        return [
            {"name": f"odd/{number}.x", "title": "odd", "inputSchema": schema}
            for number, schema in enumerate(ODD_SCHEMAS)
        ]
    names = [name.removeprefix("call_") for name in globals() if name.startswith("call_")]
    return [
        {
            "name": name,
            "description": globals()[f"call_{name}"].__doc__ or "",
            "inputSchema": {"type": "object", "properties": {}},
        }
        for name in names
    ]


def make_text(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def call_add(a: int, b: int) -> dict[str, Any]:
    """Add two numbers."""
    return make_text(str(a + b))


def call_echo(**arguments: Any) -> dict[str, Any]:
    return make_text(json.dumps(arguments, sort_keys=True))


def call_fail() -> dict[str, Any]:
    return {"isError": True, **make_text("the disk is full")}


def call_wait(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return make_text("waited")


def call_freeze() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # the signal may reach another thread first
    return make_text("never")


def call_die() -> dict[str, Any]:
    os._exit(3)


def call_large(num_bytes: int) -> dict[str, Any]:
    return make_text("x" * num_bytes)


def call_large_rows(num_rows: int) -> dict[str, Any]:
    rows = [{"id": row, "name": f"row {row}", "tags": ["a", "b"]} for row in range(num_rows)]
    return {"content": [], "structuredContent": {"rows": rows}}


def call_parts() -> dict[str, Any]:
    return {
        "content": [
            {"type": "text", "text": "first"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "resource_link", "name": "log", "uri": "file:///log"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "of a file"}},
            {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAAA"}},
            {"type": "text", "text": "last"},
        ]
    }


def call_structured() -> dict[str, Any]:
    return {"content": [], "structuredContent": {"n": 1, "text": "\u00e4"}}


def call_flood() -> dict[str, Any]:
    """A line without an end."""
    while True:
        sys.stdout.write("x" * (1 << 20))


def call_pid() -> dict[str, Any]:
    return make_text(str(os.getpid()))


def call_environ() -> dict[str, Any]:
    return make_text(json.dumps(dict(os.environ)))


def call_leave_child() -> dict[str, Any]:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    return make_text(str(child.pid))


def answer(message: dict[str, Any], faults: set[str]) -> dict[str, Any] | None:
    """The answer to a message, or None to a notification."""
    if "id" not in message:
        return None
    method, params = message["method"], message.get("params", {})
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        reply["result"] = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    elif method == "tools/list":
        tools = list_tools(faults)
        begin = int(params.get("cursor", 0))
        reply["result"] = {"tools": tools[begin : begin + PAGE_SIZE]}
        if begin + PAGE_SIZE < len(tools):
            reply["result"]["nextCursor"] = str(begin + PAGE_SIZE)
    elif method == "tools/call" and f"call_{params['name']}" in globals():
        function = globals()[f"call_{params['name']}"]
        try:
            reply["result"] = function(**params.get("arguments", {}))
        except TypeError as error:
            reply["error"] = {"code": -32602, "message": f"wrong arguments: {error}"}
    else:
        reply["error"] = {"code": -32601, "message": f"there is no {method}"}
    return reply


def answer_line(line: str, faults: set[str]) -> None:
    reply = answer(json.loads(line), faults)
    if reply is not None:
        with WRITE_LOCK:
            print(json.dumps(reply), flush=True)


def serve_stdio(faults: set[str]) -> None:
    if "noise" in faults:
        print("Welcome to the server!", flush=True)
    for line in sys.stdin:
        threading.Thread(target=answer_line, args=(line, faults), daemon=True).start()
    while "ignore_eof" in faults:
        time.sleep(1)


def serve_http(port: int, faults: set[str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            reply = answer(json.loads(body), faults)
            data = json.dumps(reply).encode()
            content_type = "application/json"
            if "--sse" in faults:
                data = b"event: message\ndata: " + data + b"\n\n"
                content_type = "text/event-stream"
            self.send_response(202 if reply is None else 200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data) if reply else 0))
            self.end_headers()
            self.wfile.write(data if reply else b"")

        def do_GET(self) -> None:
            self.send_error(405)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    arguments = sys.argv[1:]
    faults = set(arguments)
    print(f"the server of {os.getpid()} begins", file=sys.stderr, flush=True)
    if "die_at_start" in faults:
        sys.exit(7)
    while "hang_at_start" in faults:
        time.sleep(1)
    if "--http" in faults:
        serve_http(int(arguments[arguments.index("--http") + 1]), faults)
    serve_stdio(faults)


if __name__ == "__main__":
    main()
