"""The front over a backend that answers from a list: paths, keys, streams and the end,
without an engine.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from published_templates import write_published
from serve_tools import KEY, ask_with_openai, needs_openai

from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.tokenizer import load_tokenizer, write_character_tokenizer
from rlhf_megatron.jobs.serving.http_front import ServingFront
from rlhf_megatron.jobs.serving.openai_requests import ServedModel
from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    FinishReason,
    GeneratedSample,
    GenerateRequest,
    VersionSpan,
)


class Counting:
    """Draws the token after the last one, from version 3 and from the third token on
    from version 4.
    """

    policy_version = 4
    num_running = 0
    engine_counts = (1, 2)
    counters = Counter({"rollout/engine_restarts": 5})  # noqa: RUF012

    def __init__(self) -> None:
        self.end_future: Future[None] = Future()
        self.fails = False

    async def generate_samples(self, request: GenerateRequest) -> list[GeneratedSample]:
        if self.fails:
            raise EngineError("no engine is left")
        last = request.prompt_ids[-1]
        count = request.params.max_new_tokens
        ids = tuple(2 + (last - 1 + i) % 9 for i in range(count))
        old = max(0, min(count, 2 - request.num_given))
        spans = tuple(
            s for s in (VersionSpan(3, 0, old), VersionSpan(4, old, count)) if s.start < s.end
        )
        return [
            GeneratedSample(ids, (-0.5,) * count, "length", spans[0].version, spans)
            for _ in request.seeds
        ]


def test_answers_and_streams_of_a_front(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    backend = Counting()
    front = ServingFront(
        backend, ServedModel("m", tokenizer, None, (1,), 40, 32), "key", is_loopback=True
    )  # type: ignore[arg-type]

    async def talk() -> None:
        async with TestClient(TestServer(front.make_application())) as client:

            async def post(key: str = "key", **body: Any) -> tuple[int, bytes]:
                answer = await client.post(
                    "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                )
                return answer.status, await answer.read()

            body = {"prompt": "12", "max_tokens": 5, "n": 2, "logprobs": 0}
            status, data = await post(**body)
            whole = json.loads(data)
            assert status == 200 and whole["policy_version"] == 4
            assert [c["text"] for c in whole["choices"]] == ["34567"] * 2
            assert whole["choices"][0]["version_spans"] == [[3, 0, 2], [4, 2, 5]]
            assert whole["usage"] == {
                "prompt_tokens": 2,
                "completion_tokens": 10,
                "total_tokens": 12,
            }
            assert json.loads((await post(**body, stop=["5"]))[1])["choices"][1]["text"] == "34"
            status, data = await post(**body, stream=True, stream_options={"include_usage": True})
            *events, done, rest = data.decode().split("\n\n")
            assert (status, done, rest) == (200, "data: [DONE]", "")
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 1]
            assert [c["text"] for c in own] == ["3", "45", "67"]
            assert [c["version_spans"] for c in own] == [
                [[3, 0, 1]],
                [[3, 1, 2], [4, 2, 3]],
                [[4, 3, 5]],
            ]
            assert chunks[-1]["usage"] == whole["usage"] and {
                c["policy_version"] for c in chunks[:-1]
            } == {3, 4}
            assert (await post("no", **body))[0] == 401 and (await post(**body, echo=True))[
                0
            ] == 400
            backend.fails = True
            assert (await post(**body))[0] == (await post(**body, stream=True))[0] == 503
            backend.fails = False
            headers = {"Authorization": "Bearer key"}
            metrics = await (await client.get("/metrics", headers=headers)).text()
            assert (
                'rlhf_megatron_requests_total{endpoint="/v1/completions",status="200"} 3' in metrics
            )
            assert (
                "rlhf_megatron_engine_restarts_total 5" in metrics
                and "rlhf_megatron_engines_serving 1" in metrics
            )
            assert (
                await client.get("/v1/models", headers={**headers, "Origin": "http://page"})
            ).status == 403
            assert (await client.get("/health")).status == 200
            front.is_stopping = True
            assert (await client.get("/health")).status == 503 and (await post(**body))[0] == 503

    asyncio.run(talk())


@pytest.mark.long
@needs_openai
def test_openai_s_own_client_reads_calls_of_tools(tmp_path: Path) -> None:
    """Of a model that calls a tool whatever it is asked, with the template and the
    tokens of a Qwen2.5.
    """
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))
    text = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = (*tokenizer.encode(text), tokenizer.eos_token_id)

    class Calling(Counting):
        async def generate_samples(self, request: GenerateRequest) -> list[GeneratedSample]:
            ids = said[request.num_given :][: request.params.max_new_tokens]
            reason: FinishReason = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
            return [GeneratedSample(ids, (-0.5,) * len(ids), reason, 4) for _ in request.seeds]

    chat = make_chat_format(tokenizer, None, {})
    of_model = ServedModel(
        "m", tokenizer, chat, (tokenizer.eos_token_id,), 4000, tokenizer.vocab_size
    )
    front = ServingFront(Calling(), of_model, KEY, is_loopback=True)  # type: ignore[arg-type]

    async def talk() -> None:
        async with TestServer(front.make_application()) as server:
            await asyncio.to_thread(ask_with_openai, str(server.make_url("")).rstrip("/"), "tools")

    asyncio.run(talk())
