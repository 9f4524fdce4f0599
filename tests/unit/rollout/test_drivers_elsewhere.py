"""Drivers of another machine: a gate starts them, their answers come over the network, and each
group comes once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from test_drivers import LONG, WAIT_S, Server, here, is_there, request, work_of

from rlhf_megatron.rollout.drivers import driver_pool
from rlhf_megatron.rollout.drivers.driver_pool import DriverPool, choose_driver_counts
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineRequestError
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.runtime import message_channel
from rlhf_megatron.runtime.driver_gate import DriverGate, enable_remote_drivers

SECRET = b"s" * 64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def gate() -> Iterator[DriverGate]:
    enable_remote_drivers(SECRET)
    gate = DriverGate("127.0.0.1", SECRET)
    yield gate
    driver_pool.connect_through_gate = None


@pytest.fixture(scope="module")
def drivers(gate: DriverGate) -> Iterator[DriverPool]:
    """Two at the gate, none here."""
    drivers = DriverPool(0, 2)
    yield drivers
    pids = pids_of(gate)
    drivers.close()
    deadline = time.monotonic() + WAIT_S
    while any(process.poll() is None for process in gate._drivers.values()):
        assert time.monotonic() < deadline, "a driver ends with the controller's connection"
        time.sleep(0.01)
    assert not any(is_there(pid) for pid in pids)


def pids_of(gate: DriverGate) -> list[int]:
    return [process.pid for process in gate._drivers.values()]


def engine_of(server: Server, gate: str, name: str = "engine0") -> LocalEngine:
    return LocalEngine(EngineAddress(name, "local", server.url, "t" * 32, drivers=gate))


def test_killed_drivers_elsewhere_lose_no_group_and_bring_none_twice(
    server: Server, gate: DriverGate, drivers: DriverPool
) -> None:
    requests = work_of(40)
    expected = here(server, work_of(40))
    fleet = EngineFleet(
        [engine_of(server, gate.address, f"engine{i}") for i in range(2)], WAIT_S, 5
    )
    came = {}
    victims: list[int] = []
    with fleet.open_session() as session:
        for key, one in enumerate(requests):
            session.submit_requests(key, [one])
        while session.num_running:
            for key, groups in session.poll_finished():
                assert key not in came
                came[key] = groups
            if len(came) >= 20 and not victims:
                victims = pids_of(gate)
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    assert len(victims) == 2, "all questions went through the gate's drivers"
    assert [came[key][0] for key in range(len(requests))] == expected
    assert fleet.generate(requests) == expected
    assert fleet.take_counters()["rollout/engine_failures"] == 0, "no engine is to blame"
    assert drivers.take_restart_count() >= 2 and not {*victims} & {*pids_of(gate)}
    fleet.close()


def test_long_answers_and_errors_from_elsewhere_are_the_same(
    server: Server, gate: DriverGate, drivers: DriverPool
) -> None:
    requests = work_of(2, LONG)
    engine = engine_of(server, gate.address)
    assert [engine.generate([one], WAIT_S)[0] for one in requests] == here(server, requests)
    with pytest.raises(EngineRequestError, match="token 400 is not known"):
        engine.generate([request((400,), (1,), 4)], WAIT_S)


def test_who_does_not_hold_the_secret_gets_no_driver(gate: DriverGate) -> None:
    before = pids_of(gate)
    host, _, port = gate.address.rpartition(":")
    with (
        pytest.raises((ConnectionError, EOFError)),
        socket.create_connection((host, int(port)), timeout=10) as connection,
    ):
        message_channel.open_channel(connection, b"t" * 64, 10).send(77)
    assert pids_of(gate) == before and 77 not in gate._drivers


def test_engines_of_a_machine_without_its_gate_are_asked_from_here(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drivers are given up; a run goes on without them."""
    monkeypatch.setattr(driver_pool, "_RECONNECT_DELAY_S", 0.01)
    enable_remote_drivers(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    lost = DriverPool(0, 1)
    try:
        fleet = EngineFleet([engine_of(server, gone)], WAIT_S, 5)
        assert fleet.generate(work_of(3)) == here(server, work_of(3))
        assert [driver.is_given_up for driver in lost._iterate_drivers()] == [True]
        fleet.close()
    finally:
        lost.close()
        driver_pool.connect_through_gate = None


def test_every_machine_with_engines_has_drivers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    # a gate each, under Ray
    far = [f"10.0.0.{machine}:{9000 + i}" for machine in range(4) for i in range(8)]
    assert choose_driver_counts(["", *far[:8]], None) == (0, 0), "small runs have none"
    assert choose_driver_counts(far, None) == (0, 1) and choose_driver_counts(
        [""] * 64 + far, None
    ) == (2, 1)
    assert (
        choose_driver_counts(["", *far], 3) == (3, 3)
        and choose_driver_counts(far, 3) == (0, 3)
        and choose_driver_counts(far, 0) == (0, 0)
    )
