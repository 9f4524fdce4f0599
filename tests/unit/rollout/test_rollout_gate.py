"""Generate calls that wait: for the end of a pause, or for one of the connections that a
process may have.
"""

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

from rlhf_megatron.rollout import http_client
from rlhf_megatron.rollout.engine_interface import EngineAddress
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import FleetMember
from rlhf_megatron.rollout.fleet.request_balancer import (
    ChunkAssignment,
    LeastOutstandingBalancer,
    OutstandingLoad,
    RequestChunk,
)
from rlhf_megatron.rollout.generate_gate import GenerateGate
from rlhf_megatron.rollout.http_client import (
    ConnectionSlots,
    ProcessConnectionSlots,
    make_port_slots,
    run_in_event_loop,
    start_in_event_loop,
)
from rlhf_megatron.rollout.router.router_balancer import RouterClient
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine


async def call(
    gate: GenerateGate, name: str = "", hold: asyncio.Event | None = None, timeout_s: float = 30.0
) -> bool:
    """Whether it ran; inside of the gate until `hold` is set."""
    async with gate.admit_call(timeout_s, name) as is_running:
        if hold is not None:
            await hold.wait()
        return is_running


async def made(
    function: Callable[[], asyncio.Event | ConnectionSlots],
) -> asyncio.Event | ConnectionSlots:
    return function()


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that may have eight files: six connections, of which five are taken here."""
    monkeypatch.setattr(http_client, "raise_open_file_limit", lambda: 8)
    few = run_in_event_loop(made(ProcessConnectionSlots), 30.0)
    assert isinstance(few, ProcessConnectionSlots)
    for _ in range(5):
        run_in_event_loop(few.acquire(), 30.0)

    async def swap(new: ProcessConnectionSlots | None) -> ProcessConnectionSlots | None:
        loop = asyncio.get_running_loop()
        old = http_client._slots_by_loop.pop(loop, None)
        if new is not None:
            http_client._slots_by_loop[loop] = new
        return old

    before = run_in_event_loop(swap(few), 30.0)
    yield
    run_in_event_loop(swap(before), 30.0)


def test_a_pause_holds_calls_and_an_abort_ends_them() -> None:
    gate = GenerateGate()
    assert run_in_event_loop(call(gate), 30.0) and gate.wait_until_empty(0.01)
    gate.close_gate()
    with pytest.raises(TimeoutError):
        run_in_event_loop(call(gate, timeout_s=0.01), 30.0)
    for let_through, expected in ((gate.abort_waiting_calls, False), (gate.open_gate, True)):
        future = start_in_event_loop(call(gate))
        with pytest.raises(TimeoutError):
            future.result(0.02)
        let_through()
        assert future.result(30) is expected and gate.wait_until_empty(0.01)


def test_calls_beyond_the_files_of_a_process_wait_and_it_says_so_once(
    one_connection: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three calls is aborted by its name as it waits; the third runs when the
    first has ended.
    """
    gate = GenerateGate()
    threads = threading.active_count()
    hold = run_in_event_loop(made(asyncio.Event), 30.0)
    assert isinstance(hold, asyncio.Event)
    first = start_in_event_loop(call(gate, "first", hold))
    waiting = {name: start_in_event_loop(call(gate, name)) for name in ("second", "third")}
    until(
        lambda: (
            len(
                http_client._slots_by_loop[
                    http_client._get_event_loop(http_client.os.getpid())
                ]._waiters
                or ()
            )
            == 2
        )
    )  # type: ignore[attr-defined]
    assert not gate.wait_until_empty(0.01) and threading.active_count() == threads
    gate.abort_waiting_calls(["second"])
    http_client._get_event_loop(http_client.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
    assert first.result(30) and not waiting["second"].result(30) and waiting["third"].result(30)
    (told,) = caplog.messages
    assert "may not open more than 8 files; raise the hard limit" in told


def test_a_router_is_asked_over_no_more_connections_than_there_are_ports_and_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ports, and four calls: two of them wait. A process that may have fewer files than ports
    waits for these.
    """
    monkeypatch.setattr(http_client, "count_local_ports", lambda: 2)
    gate = RouterClient(
        EngineAddress("router", "sglang", "http://127.0.0.1:9", "key")
    )._generate_gate
    hold = run_in_event_loop(made(asyncio.Event), 30.0)
    assert isinstance(hold, asyncio.Event)
    calls = [start_in_event_loop(call(gate, hold=hold)) for _ in range(4)]
    assert gate._extra_slots is not None
    until(lambda: len(gate._extra_slots._waiters or ()) == 2 and gate._num_running_calls == 2)  # type: ignore[union-attr]
    http_client._get_event_loop(http_client.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
    assert all(each.result(30) for each in calls) and not gate._extra_slots.locked()
    (told,) = caplog.messages
    assert "this machine has 2 ports; widen" in told and "net.ipv4.ip_local_port_range" in told
    monkeypatch.setattr(http_client, "count_local_ports", lambda: 1 << 20)
    assert run_in_event_loop(
        made(GenerateGate(make_port_slots())._choose_scarcer_slots), 30.0
    ) is run_in_event_loop(made(http_client.get_connection_slots), 30.0)


def test_a_place_goes_back_to_where_it_is_from_when_the_process_gets_other_files_meanwhile(
    one_connection: None,
) -> None:
    """The router has more ports than the process may have files, and then fewer."""

    async def grown() -> tuple[int, int]:
        places = ConnectionSlots(10, "ports")
        free = http_client.get_connection_slots()
        async with GenerateGate(places).admit_call(30.0):
            free.add_processes(1)
        return places._value, free._value

    assert run_in_event_loop(grown(), 30.0) == (10, 7)  # of twelve


def test_a_pause_that_begins_as_a_call_waits_for_its_connection_holds_it(
    one_connection: None,
) -> None:
    """It gives the connection to another engine's call meanwhile."""
    gate = GenerateGate()
    other = GenerateGate()
    hold = run_in_event_loop(made(asyncio.Event), 30.0)
    assert isinstance(hold, asyncio.Event)
    first = start_in_event_loop(call(other, hold=hold))
    second: Future[bool] = start_in_event_loop(call(gate))
    gate.close_gate()
    third = start_in_event_loop(call(other))
    http_client._get_event_loop(http_client.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
    assert first.result(30) and third.result(30) and not second.done()
    gate.open_gate()
    assert second.result(30)


class ByRouter(LeastOutstandingBalancer):
    """Gives a piece to any engine, as sglang-router does."""

    def __init__(self, client: RouterClient) -> None:
        self.client = client
        self.abort_waiting_calls = client.abort_waiting_calls

    def place_chunk(
        self,
        chunk: RequestChunk,
        serving_members: Sequence[FleetMember],
        load: OutstandingLoad,
        version: int | None,
    ) -> ChunkAssignment:
        return ChunkAssignment(
            chunk, "router", partial(self.client.generate_async, version=version), None, None
        )


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
        address = EngineAddress(
            "engine0", "sglang", f"http://127.0.0.1:{server.server_port}", "key"
        )
        client = RouterClient(address)
        gate = GenerateGate()
        hold = run_in_event_loop(made(asyncio.Event), 30.0)
        assert isinstance(hold, asyncio.Event)
        first = start_in_event_loop(call(gate, hold=hold))
        fleet = EngineFleet([SGLangEngine(address, tmp_path)], 30.0, 0, balancer=ByRouter(client))
        with fleet.open_session() as session:
            session.submit_requests(1, [request((1, 2), (3, 4), 5)])
            assert session.poll_finished() == []
            until(lambda: len(client._generate_gate._waiting_names) == 2)
            session.abort_keys([1])
            assert not client._generate_gate._waiting_names, "when the abort has returned"
            http_client._get_event_loop(http_client.os.getpid()).call_soon_threadsafe(hold.set)  # type: ignore[attr-defined]
            assert first.result(30) and session.poll_finished() == [] and session.num_running == 0
        until(lambda: client._generate_gate._num_running_calls == 0 and not client._running_tasks)
        until(lambda: "/abort_request" in came)  # engines are told as well
        client.close()
        server.shutdown()
    assert "/generate" not in came


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)
