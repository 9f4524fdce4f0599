"""`rlhf-megatron load-test` against a stub of known latency, on a clock that moves when
nothing else can.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rlhf_megatron.jobs.generation.endpoint_job import fetch_model_name
from rlhf_megatron.jobs.serving.load_test_client import (
    LoadLevel,
    LoadTestPlan,
    RequestOutcome,
    format_level_row,
    load_test_to_json,
    plot_load_levels,
    run_load_test,
    summarize_load_level,
)


class Jumping(selectors.DefaultSelector):
    """Where a loop would sleep, its clock jumps: durations are those that were asked for,
    on any machine.
    """

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        for _ in range(3):
            found = super().select(0)
            if found or not timeout:
                return found or super().select(timeout)
        self.now += timeout or 0.0
        return []


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = Jumping()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class Stub:
    """Answers with five tokens, the first after half of the time that `latency_s` says; every
    eighth time with 503.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.num_asked = 0
        self.keys: set[str] = set()

    def latency_s(self, number: int) -> float:
        return self.scale * (0.2 + 0.6 * (number * 7 % 16) / 15)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        number = self.num_asked
        self.num_asked += 1
        self.keys.add(request.headers["Authorization"])
        body = await request.json()
        assert body["model"] == "stub" and body["stream_options"] == {"include_usage": True}
        if number % 8 == 7:
            raise web.HTTPServiceUnavailable
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.latency_s(number) / 2)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await asyncio.sleep(self.latency_s(number) / 2)
        await response.write(
            b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\ndata: [DONE]\n\n'
        )
        await response.write_eof()
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub"}]})


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[str]:
    """Its address."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", stub.complete), web.get("/v1/models", stub.models)])
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}/v1".format(*runner.addresses[0][:2])
    await runner.cleanup()


async def measure(
    stub: Stub, clients: tuple[int, ...]
) -> tuple[LoadTestPlan, list[LoadLevel], list[str]]:
    lines: list[str] = []
    async with serving(stub) as url:
        plan = LoadTestPlan(
            url,
            await fetch_model_name(url, None, 60.0),
            ("a", "b"),
            clients,
            32,
            8,
            True,
            False,
            "secret",
            60.0,
        )
        return plan, await run_load_test(plan, lines.append), lines


def test_quantiles_are_those_of_the_stub(tmp_path: Path) -> None:
    loop = Loop()
    stub = Stub()
    plan, levels, lines = loop.run_until_complete(measure(stub, (8, 1)))
    loop.close()
    latencies = np.array([stub.latency_s(number) for number in range(32) if number % 8 != 7])
    for level in levels:
        assert (level.requests, level.failed) == (32, 4) and level.reasons == (
            "503: 503: Service Unavailable",
        )
        for quantile in (50, 90, 99):
            expected = np.quantile(latencies, quantile / 100)
            assert level.latency_s[f"p{quantile}"] == pytest.approx(expected, rel=0.03)
            assert level.first_token_s[f"p{quantile}"] == pytest.approx(expected / 2, rel=0.03)
        assert level.tokens_per_s == pytest.approx(28 * 5 / level.seconds)
    assert levels[1].seconds == pytest.approx(latencies.sum(), rel=0.03), (
        "one client asks one after another"
    )
    assert levels[0].seconds < 0.25 * levels[1].seconds
    assert lines[2:] == [format_level_row(level) for level in levels] and lines[2].startswith(
        "      8    28      4"
    )
    assert stub.keys == {"Bearer secret"} and "secret" not in json.dumps(
        load_test_to_json(plan, levels)
    )
    plot_load_levels(levels, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_the_command_measures_a_stub_within_three_per_cent(tmp_path: Path) -> None:
    """In a process of its own, by the clock of this machine; the stub takes 0.8 to 3.2 seconds
    for an answer.
    """
    stub = Stub(4.0)
    figures_file = tmp_path / "load.json"
    (tmp_path / "key").write_text("secret")

    async def work() -> int:
        async with serving(stub) as url:
            words = [
                "load-test",
                url,
                "--clients",
                "8",
                "--requests",
                "64",
                "--completions",
                "--json",
                figures_file,
            ]
            command = [
                sys.executable,
                "-m",
                "rlhf_megatron",
                *words,
                "--api-key-file",
                tmp_path / "key",
            ]
            return await (await asyncio.create_subprocess_exec(*command)).wait()

    assert asyncio.run(work()) == 1, "some requests failed"
    (level,) = json.loads(figures_file.read_text())["levels"]
    latencies = np.array([stub.latency_s(number) for number in range(64) if number % 8 != 7])
    assert (level["requests"], level["failed"]) == (64, 8)
    for quantile in (50, 90, 99):
        expected = np.quantile(latencies, quantile / 100)
        assert level["latency_s"][f"p{quantile}"] == pytest.approx(expected, rel=0.03)
        assert level["first_token_s"][f"p{quantile}"] == pytest.approx(expected / 2, rel=0.03)


def test_figures_of_outcomes_by_hand() -> None:
    outcomes = [
        RequestOutcome(2.0, 1.0, 11),
        RequestOutcome(4.0, 2.0, 5),
        RequestOutcome(9.0, error="no"),
    ]
    level = summarize_load_level(2, outcomes, 8.0)
    assert (level.failed, level.requests_per_s, level.tokens_per_s) == (1, 0.25, 2.0)
    assert level.latency_s == pytest.approx({"p50": 3.0, "p90": 3.8, "p99": 3.98, "mean": 3.0})
    assert (
        level.token_s["mean"] == pytest.approx((0.1 + 0.5) / 2)
        and level.first_token_s["p50"] == 1.5
    )
    assert summarize_load_level(1, [RequestOutcome(1.0, None, 4)], 1.0).first_token_s == {}
