"""What a client says of a server that is not there, and of one that does not answer; and the loop
that all share.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_megatron.rollout import http_client, socket_limits
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.http_client import HttpClient


def client(port: int) -> HttpClient:
    return HttpClient(EngineAddress("engine0", "local", f"http://127.0.0.1:{port}", "token"))


def test_a_refused_connection_is_no_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        EngineError, match=r"engine0 .*/health\): no connection .*[Rr]efused"
    ) as caught:
        client(port).get("/health", 60.0)
    assert not isinstance(caught.value, EngineTimeoutError)


def test_a_server_that_never_answers_is_one() -> None:
    no_answer = pytest.raises(EngineTimeoutError, match=r"no answer within 0.2 s\.")
    with socket.create_server(("127.0.0.1", 0)) as server, no_answer:
        client(server.getsockname()[1]).get("/health", 0.2)


def test_a_process_that_stood_still_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits is the first to go on, before the loop has looked at the deadline."""
    monkeypatch.setattr(http_client, "_GRACE_S", -59.9)
    no_answer = pytest.raises(
        EngineTimeoutError, match=r"engine0 .*/health\): no answer within 60 s\."
    )
    with socket.create_server(("127.0.0.1", 0)) as server, no_answer:
        client(server.getsockname()[1]).get("/health", 60.0)


class Kept(BaseHTTPRequestHandler):
    """Answers, and keeps its connections and their ports."""

    protocol_version = "HTTP/1.1"
    ports: list[int] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.ports.append(self.client_address[1])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def options_of(sock: socket.socket) -> tuple[int, ...]:
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return tuple(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)


def test_a_connection_to_an_engine_notices_that_its_machine_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []

    def noted(sock: socket.socket) -> None:
        socket_limits.enable_dead_peer_detection(sock)
        made.append(sock)

    monkeypatch.setattr(http_client, "enable_dead_peer_detection", noted)
    with ThreadingHTTPServer(("127.0.0.1", 0), Kept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client(server.server_port).get("/health", 60.0)
        server.shutdown()
    (sock,) = made
    idle, every, count, unanswered = options_of(sock)
    assert sock.getsockname()[1] == Kept.ports[-1], "the one that was used"
    assert (
        idle + every * count <= socket_limits.DEAD_PEER_TIMEOUT_S
        and unanswered == socket_limits.DEAD_PEER_TIMEOUT_S * 1000
    )
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_system_with_other_names_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no TCP_USER_TIMEOUT, and another name for the first silence."""
    with socket.socket() as sock:
        before = options_of(sock)
        with monkeypatch.context() as patched:
            patched.setattr(socket, "TCP_KEEPALIVE", socket.TCP_KEEPIDLE, raising=False)
            patched.delattr(socket, "TCP_KEEPIDLE")
            patched.delattr(socket, "TCP_USER_TIMEOUT")
            socket_limits.enable_dead_peer_detection(sock)
        assert options_of(sock) == (5, 5, 2, before[3])


def test_all_threads_get_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ask for the first one at once."""
    new_loop = asyncio.new_event_loop
    both = threading.Barrier(2)
    made = []

    def slow_loop() -> asyncio.AbstractEventLoop:
        made.append(new_loop())
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for the other thread, where that makes one as well
        return made[-1]

    monkeypatch.setattr(http_client, "_event_loop_by_pid", {})
    monkeypatch.setattr(asyncio, "new_event_loop", slow_loop)
    found: list[asyncio.AbstractEventLoop] = []
    threads = [
        threading.Thread(target=lambda: found.append(http_client._get_event_loop(os.getpid())))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1 and found == made * 2
    for loop in made:
        loop.call_soon_threadsafe(loop.stop)


def test_work_that_nobody_awaits_gives_its_connection_back() -> None:
    ended: list[asyncio.Task[None]] = []
    has_ended = threading.Event()

    def tell(task: asyncio.Task[None]) -> None:
        ended.append(task)
        has_ended.set()

    async def endless() -> None:
        async with http_client.get_connection_slots():
            await asyncio.Event().wait()

    async def num_free() -> int:
        return http_client.get_connection_slots()._value

    before = http_client.run_in_event_loop(num_free(), 60.0)
    spawned = http_client.EventLoopTask(endless(), tell)
    assert http_client.run_in_event_loop(num_free(), 60.0) == before - 1
    spawned.cancel_after(0.0)
    assert (
        has_ended.wait(60)
        and ended[0].cancelled()
        and http_client.run_in_event_loop(num_free(), 60.0) == before
    )
