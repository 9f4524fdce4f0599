"""Generate calls that wait: for the end of a pause, or for one of the connections that a process may have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rollout_tools import request

from rlhf_megatron.rollout import http
from rlhf_megatron.rollout.engine import EngineAddress
from rlhf_megatron.rollout.fleet.balancer import Chunk, LeastOutstanding, Load, Sent
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.fleet.supervisor import Member
from rlhf_megatron.rollout.gate import Gate
from rlhf_megatron.rollout.http import Connections, Places, ports, run, start
from rlhf_megatron.rollout.router.balancer import RouterClient
from rlhf_megatron.rollout.sglang.client import SGLangEngine


async def call(gate: Gate, name: str = "", hold: asyncio.Event | None = None, timeout_s: float = 30.0) -> bool:
    """Whether it ran; inside of the gate until `hold` is set."""
    async with gate.passing(timeout_s, name) as is_running:
        if hold is not None:
            await hold.wait()
        return is_running


async def made(function: Callable[[], asyncio.Event | Places]) -> asyncio.Event | Places:
    return function()


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that may have eight files: six connections, of which five are taken here."""
    monkeypatch.setattr(http, "allow_open_files", lambda: 8)
    few = run(made(Connections), 30.0)
    assert isinstance(few, Connections)
    for _ in range(5):
        run(few.acquire(), 30.0)

    async def swap(new: Connections | None) -> Connections | None:
        loop = asyncio.get_running_loop()
        old = http._connections.pop(loop, None)
        if new is not None:
            http._connections[loop] = new
        return old

    before = run(swap(few), 30.0)
    yield
    run(swap(before), 30.0)


def test_a_pause_holds_calls_and_an_abort_ends_them() -> None:
    gate = Gate()
    assert run(call(gate), 30.0) and gate.wait_until_empty(0.01)
    gate.close()
    with pytest.raises(TimeoutError):
        run(call(gate, timeout_s=0.01), 30.0)
    for let_through, expected in ((gate.abort, False), (gate.open, True)):
        future = start(call(gate))
        with pytest.raises(TimeoutError):
            future.result(0.02)
        let_through()
        assert future.result(30) is expected and gate.wait_until_empty(0.01)


def test_calls_beyond_the_files_of_a_process_wait_and_it_says_so_once(
    one_connection: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three calls is aborted by its name as it waits; the third runs when the first has ended."""
    gate, threads = Gate(), threading.active_count()
    hold = run(made(asyncio.Event), 30.0)
    assert isinstance(hold, asyncio.Event)
    first = start(call(gate, "first", hold))
    waiting = {name: start(call(gate, name)) for name in ("second", "third")}
    until(lambda: len(http._connections[http._loop(http.os.getpid())]._waiters or ()) == 2)  # type: ignore[attr-defined]
    assert not gate.wait_until_empty(0.01) and threading.active_count() == threads
    gate.abort(["second"])
    http._loop(http.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
    assert first.result(30) and not waiting["second"].result(30) and waiting["third"].result(30)
    (told,) = caplog.messages
    assert "may not open more than 8 files; raise the hard limit" in told


def test_a_router_is_asked_over_no_more_connections_than_there_are_ports_and_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ports, and four calls: two of them wait. A process that may have fewer files than ports waits for these."""
    monkeypatch.setattr(http, "local_ports", lambda: 2)
    gate = RouterClient(EngineAddress("router", "sglang", "http://127.0.0.1:9", "key"))._gate
    hold = run(made(asyncio.Event), 30.0)
    assert isinstance(hold, asyncio.Event)
    calls = [start(call(gate, hold=hold)) for _ in range(4)]
    assert gate._places is not None
    until(lambda: len(gate._places._waiters or ()) == 2 and gate._num_inside == 2)  # type: ignore[union-attr]
    http._loop(http.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
    assert all(each.result(30) for each in calls) and not gate._places.locked()
    (told,) = caplog.messages
    assert "this machine has 2 ports; widen" in told and "net.ipv4.ip_local_port_range" in told
    monkeypatch.setattr(http, "local_ports", lambda: 1 << 20)
    assert run(made(Gate(ports())._free), 30.0) is run(made(http.connections), 30.0)


def test_a_place_goes_back_to_where_it_is_from_when_the_process_gets_other_files_meanwhile(
    one_connection: None,
) -> None:
    """The router has more ports than the process may have files, and then fewer."""

    async def grown() -> tuple[int, int]:
        places, free = Places(10, "ports"), http.connections()
        async with Gate(places).passing(30.0):
            free.grow(1)
        return places._value, free._value

    assert run(grown(), 30.0) == (10, 7)  # of twelve


def test_a_pause_that_begins_as_a_call_waits_for_its_connection_holds_it(one_connection: None) -> None:
    """It gives the connection to another engine's call meanwhile."""
    gate, other = Gate(), Gate()
    hold = run(made(asyncio.Event), 30.0)
    assert isinstance(hold, asyncio.Event)
    first = start(call(other, hold=hold))
    second: Future[bool] = start(call(gate))
    gate.close()
    third = start(call(other))
    http._loop(http.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
    assert first.result(30) and third.result(30) and not second.done()
    gate.open()
    assert second.result(30)


class ByRouter(LeastOutstanding):
    """Gives a piece to any engine, as sglang-router does."""

    def __init__(self, client: RouterClient) -> None:
        self.client, self.abort = client, client.abort

    def place(self, chunk: Chunk, serving: Sequence[Member], load: Load, version: int | None) -> Sent:
        return Sent(chunk, "router", partial(self.client.generate_async, version=version), None, None)


def test_a_group_that_is_dropped_as_it_waits_for_a_connection_is_never_sent_to_the_router(
    one_connection: None, tmp_path: Path
) -> None:
    came: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(self.path)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = EngineAddress("engine0", "sglang", f"http://127.0.0.1:{server.server_port}", "key")
        client, gate = RouterClient(address), Gate()
        hold = run(made(asyncio.Event), 30.0)
        assert isinstance(hold, asyncio.Event)
        first = start(call(gate, hold=hold))
        fleet = EngineFleet([SGLangEngine(address, tmp_path)], 30.0, 0, balancer=ByRouter(client))
        with fleet.open_session() as session:
            session.submit(1, [request((1, 2), (3, 4), 5)])
            assert session.poll() == []
            until(lambda: len(client._gate._waiting) == 2)
            session.abort([1])
            assert not client._gate._waiting, "when the abort has returned"
            http._loop(http.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
            assert first.result(30) and session.poll() == [] and session.num_running == 0
        until(lambda: client._gate._num_inside == 0 and not client._running)
        until(lambda: "/abort_request" in came)  # engines are told as well
        client.close()
        server.shutdown()
    assert "/generate" not in came


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)
