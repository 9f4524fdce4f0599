"""`rlhf-megatron load-test` against servers that are gone or that are no model servers: one line
names the address and the fix, and no traceback reaches the user.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_megatron.cli.main import main


@contextmanager
def serve_bytes(status: int, body: bytes) -> Iterator[str]:
    """Answer each request with the status and the body; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.rfile.read(length)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def find_closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"http://127.0.0.1:{find_closed_port()}"
    assert main(["load-test", address, "--clients", "1", "--requests", "2"]) == 1
    error = capsys.readouterr().err
    assert f"error: {address}/v1/models names no model" in error
    assert "correct the address" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>a web page</html>"),
        (200, b"[]"),
        (200, b'{"data": []}'),
        (200, b'{"data": [{"name": "no id"}]}'),
        (200, b"\xff\xfe\x00"),
        (404, b"not found"),
        (500, b""),
    ],
)
def test_a_server_that_lists_no_model(
    capsys: pytest.CaptureFixture[str], status: int, body: bytes
) -> None:
    with serve_bytes(status, body) as address:
        assert main(["load-test", address, "--clients", "1", "--requests", "2"]) == 1
    error = capsys.readouterr().err
    assert f"error: {address}/v1/models names no model" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>a web page</html>"), (200, b"{}"), (404, b"no such path"), (503, b"busy")],
)
@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--completions"]])
def test_a_server_that_answers_no_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int, body: bytes, flags: list[str]
) -> None:
    with serve_bytes(status, body) as address:
        words = ["load-test", address, "--model", "m", "--clients", "2", "--requests", "4", *flags]
        assert main([*words, "--json", str(tmp_path / "figures.json")]) == 1
    output = capsys.readouterr()
    assert "failed with 2 clients: " in output.out
    assert "Traceback" not in output.out + output.err
    assert (tmp_path / "figures.json").is_file()


@contextmanager
def serve_model_that_refuses(status: int) -> Iterator[tuple[str, list[str]]]:
    """List a model and answer every request to the model with the status. Yield the address and the
    paths of those requests.
    """
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.write_answer(200, json.dumps({"data": [{"id": "model"}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.write_answer(status, b"no chat template")

        def write_answer(self, answer_status: int, body: bytes) -> None:
            self.send_response(answer_status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_refuses_every_chat_is_asked_with_one_number_of_clients_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve_model_that_refuses(400) as (address, paths):
        assert main(["load-test", address, "--clients", "1,2,4", "--requests", "3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert paths == ["/v1/chat/completions"] * 3
    assert lines[-2:] == [
        "failed with 1 clients: 400: no chat template",
        "more clients were not tried: the server refuses every request. Chats need a model with a"
        " chat template; --completions asks for texts.",
    ]


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_on(status: int) -> None:
    with serve_model_that_refuses(status) as (address, paths):
        words = ["load-test", address, "--clients", "1,2", "--requests", "2", "--completions"]
        assert main(words) == 1
    assert paths == ["/v1/completions"] * 4
