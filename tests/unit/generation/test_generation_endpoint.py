"""`rlhf-megatron generate URL` against a stub that fails in every way that may pass, and a job
that is stopped.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.jobs.generation.answer_file import read_answer_rows
from rlhf_megatron.jobs.generation.endpoint_job import EndpointJob
from rlhf_megatron.jobs.generation.model_source import load_job_config
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.stop import RunStopped, StopRequest

NUM_PROMPTS = 60


class Stub:
    """Each question fails once or twice before it is answered: with 503, 429, a broken
    connection, or nonsense.
    """

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self.answered: Counter[str] = Counter()
        self.url = ""
        self.num_before_stop = 0  # answers that it gives until it may go on; 0: all
        self.may_go_on = threading.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        (message,) = body["messages"]
        key = (message["content"], body["seed"])
        self.asked[key] += 1
        number = int(message["content"].split()[1])
        if number == 999:
            raise web.HTTPBadRequest(text="that cannot be asked")
        if self.asked[key] <= 1 + number % 2:
            if number % 4 == 0:
                raise web.HTTPServiceUnavailable
            if number % 4 == 1:
                raise web.HTTPTooManyRequests
            if number % 4 == 2 and request.transport is not None:
                request.transport.abort()
            return web.json_response({"choices": []})
        while 0 < self.num_before_stop <= self.answered.total() and not self.may_go_on.is_set():
            await asyncio.sleep(0.01)
        self.answered[message["content"]] += 1
        choice = {
            "message": {"content": f"{message['content']} {body['seed']}"},
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": number}})

    async def serve(self, is_up: threading.Event, is_over: threading.Event) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self.complete)])
        runner = web.AppRunner(app, handle_signals=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}/v1".format(*runner.addresses[0][:2])
        is_up.set()
        while not is_over.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr("rlhf_megatron.jobs.generation.endpoint_job.PAUSE_S", 0.01)
    found = Stub()
    is_up = threading.Event()
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(found.serve(is_up, is_over)))
    thread.start()
    assert is_up.wait(30)
    yield found
    is_over.set()
    thread.join(30)


def job_of(config: RunConfig, url: str, out: Path) -> EndpointJob:
    seed = config.trainer.seed
    return EndpointJob.from_config(
        config.data, config.rollout, seed, url, "stub", None, out, 8, True, False
    )


def job(
    stub: Stub, directory: Path, numbers: range, name: str = "answers.parquet", *words: str
) -> EndpointJob:
    rows = [
        {"prompt": f"question {number}", "answer": str(number), "level": number % 3}
        for number in numbers
    ]
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_job_config(
        None, [str(path)], ["rollout.val_kwargs.n=2", "rollout.request_timeout_s=120", *words]
    )
    return job_of(config, stub.url, directory / name)


def test_every_prompt_has_its_answers_once_whatever_fails(stub: Stub, tmp_path: Path) -> None:
    """The job is stopped on its way and goes on; what it has is not asked again."""
    stop = StopRequest()
    first = job(stub, tmp_path, range(NUM_PROMPTS))
    lines = tmp_path / "answers.parquet.job" / "answers.jsonl"

    def stop_soon() -> None:
        while not lines.exists() or lines.read_bytes().count(b"\n") < 10:
            threading.Event().wait(0.01)
        stop.request("SIGTERM")

    stub.num_before_stop = NUM_PROMPTS
    threading.Thread(target=stop_soon).start()
    with pytest.raises(RunStopped, match="SIGTERM"):
        first.run(stop, lambda line: None)
    stub.may_go_on.set()
    kept = [row["prompt"] for row in read_answer_rows(lines)]
    assert 10 <= len(kept) < NUM_PROMPTS and not (tmp_path / "answers.parquet").exists()
    said: list[str] = []
    figures = job(stub, tmp_path, range(NUM_PROMPTS)).run(StopRequest(), said.append)
    assert said[0] == f"{len(kept)} of {NUM_PROMPTS} prompts have an answer already"
    assert figures["prompts"] == NUM_PROMPTS - len(kept)
    rows = list(read_answer_rows(tmp_path / "answers.parquet"))
    assert [(row["index"], row["prompt"]) for row in rows] == [
        (n, f"question {n}") for n in range(NUM_PROMPTS)
    ]
    assert all(
        row["num_tokens"] == [row["index"]] * 2 and row["answer"] == str(row["index"])
        for row in rows
    )
    assert all(len(set(row["responses"])) == 2 for row in rows), "each sample has a seed of its own"
    assert json.loads(rows[4]["extra"]) == {"level": 1}
    assert {stub.answered[prompt] for prompt in kept} == {2}, "what was kept was not asked again"
    with pytest.raises(ValueError, match="has answers of another job"):
        job(stub, tmp_path, range(3)).run(StopRequest(), said.append)


def test_what_does_not_pass_ends_the_job(stub: Stub, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"refuses .*prompts.jsonl:1: 400: that cannot be asked"):
        job(stub, tmp_path, range(999, 1000)).run(StopRequest(), lambda line: None)
    dead = job(stub, tmp_path, range(2), "dead.jsonl", "rollout.request_timeout_s=0.2")
    stub.url = "http://127.0.0.1:9/v1"
    dead = EndpointJob(**{**dead.__dict__, "url": stub.url})
    with pytest.raises(EngineError, match=r"has not answered .*within rollout.request_timeout_s"):
        dead.run(StopRequest(), lambda line: None)
    with pytest.raises(ValueError, match="needs files of prompts"):
        job_of(load_job_config(None, [], []), stub.url, tmp_path / "a.jsonl")
