"""The guard in front of the servers: one set of rules, which engines, `serve` and `serve-rewards`
share, asked over real sockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rlhf_megatron.data.tokenizer import load_tokenizer, write_character_tokenizer
from rlhf_megatron.http_guard import (
    GuardedServer,
    GuardRules,
    Refusal,
    RequestGuard,
    SharedBudget,
    has_bearer_key,
    is_from_web_page,
    make_plain_error_response,
)
from rlhf_megatron.jobs.serving.http_front import ServingFront, ServingLimits
from rlhf_megatron.jobs.serving.openai_requests import ServedModel
from rlhf_megatron.rewards.service.reward_http_server import RewardHttpServer
from rlhf_megatron.rollout.local import local_server

KEY = "a-secret-key-of-clients"
RULES = GuardRules(
    bearer_key=KEY,
    is_loopback=True,
    max_body_bytes=1000,
    max_held_bytes=2000,
    key_hint="the test has it",
    body_timeout_s=0.3,
    idle_timeout_s=0.6,
)


@dataclass
class ListeningServer:
    """A server that listens in a thread of this process."""

    host: str
    port: int
    path: str  # that takes a POST
    open_path: str | None  # that needs no key

    def send_bytes(self, data: bytes, timeout_s: float = 30.0) -> bytes:
        """Return all that the server answers to these bytes until it closes the connection."""
        with socket.create_connection((self.host, self.port), timeout_s) as connection:
            connection.sendall(data)
            pieces = []
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces)

    def post(self, body: bytes = b"{}", **headers: str) -> tuple[int, str]:
        """Return status and body of the answer to a POST. A header None leaves a default out."""
        defaults = {
            "Host": f"{self.host}:{self.port}",
            "Authorization": f"Bearer {KEY}",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [
            f"POST {self.path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in (defaults | named).items()),
        ]
        answer = self.send_bytes("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        head, _, text = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), text.decode()


@contextmanager
def run_in_thread(server: GuardedServer) -> Iterator[tuple[str, int]]:
    """Let a server listen in an event loop of its own for the duration of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    try:
        yield run(server.listen("127.0.0.1", 0))
    finally:
        run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class NoEngines:
    """A backend of `serve` whose engines are away: what passes the guard gets 503 or 400."""

    policy_version = 1
    num_running = 0
    engine_counts = (0, 1)

    def __init__(self) -> None:
        from concurrent.futures import Future

        self.end_future: Future[None] = Future()


@contextmanager
def serve_model(directory: Path) -> Iterator[ListeningServer]:
    write_character_tokenizer(directory)
    served = ServedModel("m", load_tokenizer(directory), None, (1,), 40, 32)
    front = ServingFront(NoEngines(), served, KEY, is_loopback=True)  # type: ignore[arg-type]
    with run_in_thread(GuardedServer(front.make_application(), front.guard)) as (host, port):
        yield ListeningServer(host, port, "/v1/completions", "/health")


@contextmanager
def serve_engine(directory: Path) -> Iterator[ListeningServer]:
    rules = GuardRules(KEY, True, local_server._MAX_BODY_BYTES, 1 << 27, "the token file has it")
    guard = RequestGuard(rules, make_plain_error_response, local_server._describe_engine_error)
    application = guard.make_application()
    handlers = local_server.EngineVerbHandlers(None, {})  # type: ignore[arg-type]
    application.add_routes(handlers.make_route_table())
    with run_in_thread(GuardedServer(application, guard)) as (host, port):
        yield ListeningServer(host, port, "/generate", "/health")


@contextmanager
def serve_rewards(directory: Path) -> Iterator[ListeningServer]:
    server = RewardHttpServer("127.0.0.1", 0, KEY)
    ended = threading.Event()
    thread = threading.Thread(
        target=server.score_until_over,
        args=(SimpleNamespace(components=()), ended.is_set),
    )
    thread.start()
    host, port = server.server_address
    try:
        yield ListeningServer(host, port, "/score", None)
    finally:
        ended.set()
        thread.join()


SERVERS = {"serve": serve_model, "engine": serve_engine, "serve-rewards": serve_rewards}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ListeningServer]:
    with SERVERS[request.param](tmp_path) as listening:
        yield listening


def test_all_servers_refuse_the_same_requests(server: ListeningServer) -> None:
    assert server.post(b"[")[0] == 400, "what passes the guard is read"
    assert server.post(Host="evil.example")[0] == 403
    assert server.post(Host="localhost:1")[0] != 403
    assert server.post(Origin="http://page")[0] == 403
    assert server.post(Authorization="")[0] == 401
    assert server.post(Authorization=f"Bearer {KEY}x")[0] == 401
    assert server.post(Authorization=KEY)[0] == 401
    assert server.post(Authorization="Bearer \xff\xfe")[0] == 401
    assert server.post(Content_Length=str(300 << 20))[0] == 413


def test_requests_that_are_no_http_leave_no_key_and_no_traceback(
    server: ListeningServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    head = f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}"
    malformed = [
        f"{head}\0\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        f"{head}\r\nContent-Length: \N{SUPERSCRIPT TWO}\r\n\r\n{{}}".encode("latin-1"),
        f"{head}\r\nContent-Length: -1\r\n\r\n".encode(),
        f"{head}\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}".encode(),
        f"{head}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n".encode(),
        f"{head}\r\nX: {'a' * 100_000}\r\n\r\n".encode(),
        b"\0" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        f"GET {'/a' * 10_000} HTTP/1.1\r\n\r\n".encode(),
    ]
    with caplog.at_level(logging.DEBUG):
        for request in malformed:
            answer = server.send_bytes(request)
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (request[:200], answer[:200])
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        assert KEY not in text and "Traceback" not in text


def test_bodies_that_do_not_come_hold_up_nobody(server: ListeningServer) -> None:
    """Idle connections, half requests, and clients that go away in the middle."""
    idle = [socket.create_connection((server.host, server.port), 30.0) for _ in range(100)]
    half = [socket.create_connection((server.host, server.port), 30.0) for _ in range(60)]
    head = f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    for number, connection in enumerate(half):
        whole = f"{head}Content-Length: 900000\r\n\r\n".encode() + b"[" * 1000
        connection.sendall(whole[: len(whole) * (number % 3 + 1) // 4])
    for connection in half[::2]:
        connection.close()
    try:
        start = time.monotonic()
        assert server.post(b"[")[0] == 400
        if server.open_path is not None:
            request = f"GET {server.open_path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close"
            assert server.send_bytes(f"{request}\r\n\r\n".encode()).startswith(b"HTTP/1.1")
        assert time.monotonic() - start < 5.0
    finally:
        for connection in (*idle, *half):
            connection.close()


def test_bodies_of_all_sizes_are_answered_in_little_memory(server: ListeningServer) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (1 << 10, 1 << 20, 8 << 20):
        assert server.post(b"[" * size)[0] in (400, 413)
    # of unknown length, longer than any server takes
    head = (
        f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    piece = b"100000\r\n" + b"[" * (1 << 20) + b"\r\n"
    answer = b""
    with socket.create_connection((server.host, server.port), 60.0) as connection:
        connection.sendall(head.encode())
        try:
            for _ in range(300):
                connection.sendall(piece)
        except OSError:
            pass  # the server has closed
        with suppress(OSError):
            answer = connection.recv(1 << 16)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 700 << 10


async def answer_slowly(request: web.Request) -> web.Response:
    """Answer with the length of the body, after as many seconds as the query says."""
    await asyncio.sleep(float(request.query.get("seconds", "0")))
    return web.Response(text=str(len(await request.read())))


@contextmanager
def serve_slowly(rules: GuardRules, describe_error: Any = None) -> Iterator[ListeningServer]:
    guard = RequestGuard(rules, make_plain_error_response, describe_error or (lambda error: None))
    application = guard.make_application()
    application.add_routes([web.post("/slow", answer_slowly), web.get("/health", answer_slowly)])
    with run_in_thread(GuardedServer(application, guard)) as (host, port):
        yield ListeningServer(host, port, "/slow", "/health")


def test_a_body_must_arrive_in_time() -> None:
    with serve_slowly(RULES) as server:
        start = time.monotonic()
        status, text = server.post(b"1", Content_Length="10")
        assert (status, json.loads(text)["error"]) == (
            408,
            "the body did not arrive within 0.3 s",
        )
        assert time.monotonic() - start < 5.0


def test_connections_that_ask_nothing_are_closed() -> None:
    """Also those with half a request; not one whose request is being answered."""
    with serve_slowly(RULES) as server:
        address = (server.host, server.port)
        silent = socket.create_connection(address, 20.0)
        half = socket.create_connection(address, 20.0)
        half.sendall(b"POST /slow HTTP/1.1\r\nHost: 127.0")
        busy = socket.create_connection(address, 20.0)
        request = (
            f"POST /slow?seconds=2 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        )
        busy.sendall(f"{request}Content-Length: 1\r\n\r\n1".encode())
        assert silent.recv(1) == b"" and half.recv(1) == b""
        assert busy.recv(1000).startswith(b"HTTP/1.1 200")
        for connection in (silent, half, busy):
            connection.close()


def test_bodies_that_are_held_are_bounded_over_all_requests() -> None:
    """Two bodies fit; the third is read when one of them is answered."""
    rules = replace(RULES, body_timeout_s=30.0, idle_timeout_s=30.0)
    entered: list[str] = []
    may_answer = {name: threading.Event() for name in ("first", "second", "third")}

    async def answer_when_told(request: web.Request) -> web.Response:
        name = request.query["name"]
        entered.append(name)
        await asyncio.to_thread(may_answer[name].wait, 60.0)
        return web.Response(text=name)

    guard = RequestGuard(rules, make_plain_error_response)
    application = guard.make_application()
    application.add_routes([web.post("/held", answer_when_told)])

    def wait_for_entries(count: int) -> None:
        deadline = time.monotonic() + 30.0
        while len(entered) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with run_in_thread(GuardedServer(application, guard)) as (host, port):
        threads = []
        for count, name in enumerate(may_answer, start=1):
            asked = ListeningServer(host, port, f"/held?name={name}", None)
            threads.append(threading.Thread(target=asked.post, args=(b"1" * 1000,)))
            threads[-1].start()
            if name != "third":
                wait_for_entries(count)
        time.sleep(0.3)
        assert entered == ["first", "second"], "the third one waits for its turn"
        may_answer["second"].set()
        wait_for_entries(3)
        for event in may_answer.values():
            event.set()
        for thread in threads:
            thread.join(30.0)


def test_errors_of_handlers_become_answers() -> None:
    async def fail(request: web.Request) -> web.Response:
        raise {"value": ValueError("wrong"), "key": KeyError("x"), "known": OSError("known")}[
            request.query["kind"]
        ]

    def describe_error(error: Exception) -> Refusal | None:
        return Refusal(503, "away") if isinstance(error, OSError) else None

    guard = RequestGuard(RULES, make_plain_error_response, describe_error)
    application = guard.make_application()
    application.add_routes([web.post("/fail", fail)])
    with run_in_thread(GuardedServer(application, guard)) as (host, port):
        found = {
            kind: ListeningServer(host, port, f"/fail?kind={kind}", None).post(b"1")
            for kind in ("value", "key", "known")
        }
    assert {
        kind: (status, json.loads(text)["error"]) for kind, (status, text) in found.items()
    } == {
        "value": (400, "wrong"),
        "key": (500, "KeyError: 'x'"),
        "known": (503, "away"),
    }


def test_shared_budget_serves_in_order() -> None:
    async def use_budget() -> list[str]:
        budget = SharedBudget(10)
        order: list[str] = []

        async def hold(name: str, amount: int, seconds: float) -> None:
            async with budget.hold(amount):
                order.append(name)
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold("8", 8, 0.2))
        await asyncio.sleep(0.01)
        large = asyncio.create_task(hold("more than all", 99, 0.1))
        await asyncio.sleep(0.01)
        small = asyncio.create_task(hold("behind it", 1, 0.0))
        given_up = asyncio.create_task(hold("given up", 5, 0.0))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.gather(first, large, small, given_up, return_exceptions=True)
        assert budget.num_free == 10
        return order

    assert asyncio.run(use_budget()) == ["8", "more than all", "behind it"]


@pytest.mark.parametrize(
    ("host", "has_origin", "is_loopback", "expected"),
    [
        ("127.0.0.1:8000", False, True, False),
        ("[::1]:8000", False, True, False),
        ("localhost", False, True, False),
        ("evil.example", False, True, True),
        ("evil.example", False, False, False),
        ("127.0.0.1", True, True, True),
        ("node7", True, False, True),
        ("", False, True, True),
        ("[", False, True, True),
    ],
)
def test_web_pages(host: str, has_origin: bool, is_loopback: bool, expected: bool) -> None:
    assert is_from_web_page(host, has_origin, is_loopback) == expected


def test_bearer_keys() -> None:
    assert has_bearer_key(f"Bearer {KEY}", KEY)
    assert not any(
        has_bearer_key(text, KEY) for text in ("", KEY, f"bearer {KEY}", f"Bearer {KEY} ", "\udcff")
    )


def test_serve_bounds_the_texts_of_requests(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.longest_token_characters == len("<unused18>")
    served = ServedModel("m", tokenizer, None, (1,), 40, 32)
    limits = ServingLimits(most_characters=300)
    front = ServingFront(NoEngines(), served, KEY, True, limits)  # type: ignore[arg-type]

    def ask(port: int, **body: Any) -> tuple[int, str]:
        listening = ListeningServer("127.0.0.1", port, "/v1/completions", None)
        status, text = listening.post(json.dumps(body).encode())
        return status, json.loads(text)["error"]["message"]

    with run_in_thread(GuardedServer(front.make_application(), front.guard)) as (_, port):
        status, message = ask(port, prompt="1" * 401, max_tokens=1)
        assert status == 400 and "has 401 characters" in message and "(400)" in message
        status, message = ask(port, prompt=["1" * 200, "1" * 101], max_tokens=1)
        assert status == 413 and "have 301 characters" in message and "--max-characters" in message
        status, message = ask(port, prompt="1" * 100, max_tokens=1)
        assert status == 400 and "the prompt has 100 tokens" in message
        status, message = ask(port, prompt="1", stop=["1"] * 65)
        assert status == 400 and "64 texts" in message
    with pytest.raises(ValueError, match=r"most_characters \(0\) must be at least 1"):
        ServingLimits(most_characters=0)
