"""Drivers: questions that other processes ask, over real HTTP, and what becomes of them when
those are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from aiohttp import web
from rollout_tools import request

from rlhf_megatron import faults
from rlhf_megatron.rollout import http_client
from rlhf_megatron.rollout.drivers.driver_pool import DriverPool, choose_driver_counts
from rlhf_megatron.rollout.engine_interface import (
    DriverLostError,
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    EngineUnreachableError,
    GenerateRequest,
    SampleGroups,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.local.local_client import LocalEngine, LocalGenerationQuery

WAIT_S = 120.0
LONG = 20_000  # tokens: more than a message holds


class Server:
    """Answers as the bundled server, in the loop of the clients. What a sample is follows from
    prompt and seed.
    """

    def __init__(self) -> None:
        self.answered: list[int] = []  # seeds
        self.num_inside = 0
        self.is_held = False
        self.url = http_client.run_in_event_loop(self._start(), WAIT_S)

    async def _start(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.get("/health", self._ok),
                web.get("/info", self._ok),
            ]
        )
        app.router.add_post("/abort", self._ok)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"version": None, "max_num_seqs": 64})

    async def generate(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read())["requests"]
        self.num_inside += 1
        try:
            await asyncio.sleep(0.01)
            while self.is_held:
                await asyncio.sleep(0.01)
        finally:
            self.num_inside -= 1
        first = asked[0]["prompt_ids"][0]
        if first == 400:
            return web.json_response({"error": "token 400 is not known"}, status=400)
        if first == 503:
            return web.json_response({"error": "STALE: a sync is under way"}, status=503)
        self.answered += [seed for one in asked for seed in one["seeds"]]
        groups = [[self._sample(one, seed) for seed in one["seeds"]] for one in asked]
        return web.json_response({"groups": groups[:-1] if first == 1 else groups})

    def _sample(self, asked: dict, seed: int) -> dict:  # type: ignore[type-arg]
        draw = random.Random(f"{asked['prompt_ids']}{seed}")
        length = asked["params"]["max_new_tokens"]
        return {
            "token_ids": [draw.randrange(150_000) for _ in range(length)],
            "log_probs": [-draw.random() for _ in range(length)],
            "finish_reason": "length",
            "policy_version": 3,
            "version_spans": [{"version": 3, "start": 0, "end": length}],
            "num_cached_tokens": 2,
        }

    def close(self) -> None:
        http_client.run_in_event_loop(self._runner.cleanup(), WAIT_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverPool]:
    """Two. The first one dies before it tells the third thing that an engine has answered."""
    directory = tmp_path_factory.mktemp("faults")
    plan = "kill@driver.before_reply:who=driver0,nth=3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.PLAN_ENV, plan)
        patch.setenv(faults.DIRECTORY_ENV, str(directory))
        drivers = DriverPool(2)
        yield drivers
        pids = drivers.pids
        drivers.close()
    assert not any(is_there(pid) for pid in pids)
    drivers.close()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def engine_of(server: Server, name: str = "engine0", url: str | None = None) -> LocalEngine:
    return LocalEngine(EngineAddress(name, "local", url or server.url, "t" * 32))


def work_of(num_groups: int, length: int = 16) -> list[GenerateRequest]:
    return [request((5 + i, 6), (10 * i, 10 * i + 1), length) for i in range(num_groups)]


def wait_for(condition: object, drivers: DriverPool) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, drivers.pids
        time.sleep(0.01)


def here(server: Server, requests: list[GenerateRequest]) -> SampleGroups:
    """As the controller's own loop gets them."""

    async def ask() -> SampleGroups:
        questions = [
            LocalGenerationQuery(engine_of(server).address, (one,), WAIT_S, WAIT_S, "")
            for one in requests
        ]
        return [group for question in questions for group in await question.fetch_groups()]

    return http_client.run_in_event_loop(ask(), WAIT_S)


def test_killed_drivers_lose_no_group_and_bring_none_twice(
    server: Server, drivers: DriverPool
) -> None:
    """A session, while one driver is killed, and then all are; then a call of `generate`."""
    requests = work_of(40)
    expected = here(server, work_of(40))
    wait_for(lambda: drivers.are_all_ready, drivers)
    fleet = EngineFleet([engine_of(server, f"engine{i}") for i in range(2)], WAIT_S, 5)
    came: dict[int, SampleGroups] = {}
    victims = []
    with fleet.open_session() as session:
        for key, one in enumerate(requests):
            session.submit_requests(key, [one])
        while session.num_running:
            for key, groups in session.poll_finished():
                assert key not in came
                came[key] = groups
            if len(came) >= 20 and not victims:
                victims = drivers.pids
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    assert [came[key][0] for key in range(len(requests))] == expected
    assert fleet.generate(requests) == expected
    assert drivers._num_restarts >= 2
    assert fleet.take_counters()["rollout/engine_failures"] == 0, "no engine is to blame"
    fleet.close()


def test_long_answers_are_the_same_to_the_last_bit(server: Server, drivers: DriverPool) -> None:
    requests = work_of(2, LONG)
    assert [engine_of(server).generate([one], WAIT_S)[0] for one in requests] == here(
        server, requests
    )


@pytest.mark.parametrize(
    ("first", "kind", "words"),
    [
        (400, EngineRequestError, "token 400 is not known"),
        (503, EngineStaleError, "STALE"),
        (1, EngineError, "samples for requests"),
    ],
)
def test_errors_are_those_of_the_client(
    server: Server, drivers: DriverPool, first: int, kind: type[EngineError], words: str
) -> None:
    with pytest.raises(kind, match=words) as error:
        engine_of(server).generate([request((first,), (1,), 4), request((2,), (1,), 4)], WAIT_S)
    assert type(error.value) is kind


def test_a_server_that_is_away_or_late_is_told_as_such(server: Server, drivers: DriverPool) -> None:
    with pytest.raises(EngineUnreachableError, match="no connection"):
        engine_of(server, url="http://127.0.0.1:9").generate(work_of(1), WAIT_S)
    server.is_held = True
    try:
        with pytest.raises(EngineTimeoutError, match=r"within 0\.5 s"):
            engine_of(server).generate(work_of(1), 0.5)
    finally:
        server.is_held = False


def test_what_nobody_awaits_any_more_gives_its_connection_back(
    server: Server, drivers: DriverPool
) -> None:
    wait_for(lambda: server.num_inside == 0, drivers)
    server.is_held = True
    asked = http_client.start_in_event_loop(engine_of(server).generate_async(work_of(1), WAIT_S))
    try:
        wait_for(lambda: server.num_inside == 1, drivers)
        asked.cancel()
        wait_for(lambda: server.num_inside == 0, drivers)
    finally:
        server.is_held = False


def test_a_driver_that_never_comes_up_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlhf_megatron.rollout.drivers.driver_pool.DRIVER_MODULE", "rlhf_megatron.no_such_module"
    )
    drivers = DriverPool(1)
    try:
        with pytest.raises(DriverLostError):
            while True:
                engine_of(server).generate(work_of(1), WAIT_S)
        wait_for(lambda: drivers._local_drivers[0].is_given_up, drivers)
        with pytest.raises(
            DriverLostError, match=r"no driver is left: .* code 1.*set rollout\.num_drivers to 0"
        ):
            engine_of(server).generate(work_of(1), WAIT_S)
    finally:
        drivers.close()


def test_small_runs_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert [choose_driver_counts([""] * number, None) for number in (1, 31, 32, 1024)] == [
        (0, 0),
        (0, 0),
        (1, 0),
        (16, 0),
    ]
