"""One answer in OpenAI's form, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from aiohttp import web

from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.serving.answers import Part, growing_choice, joined, tool_calls, whole_choices
from rlhf_megatron.serving.backend import Backend
from rlhf_megatron.serving.bodies import Ask, Served
from rlhf_megatron.serving.metrics import ServerMetrics


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message[:2000], "type": kind, "param": None, "code": code}}


class Reply:
    """One answer of OpenAI's form, whole or as a stream of server-sent events."""

    def __init__(self, backend: Backend, served: Served, metrics: ServerMetrics, ask: Ask, is_chat: bool) -> None:
        self._backend, self._served, self._metrics, self._ask, self._is_chat = backend, served, metrics, ask, is_chat
        self._tokenizer = served.tokenizer
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_generated = 0

    async def whole(self) -> dict[str, Any]:
        ask = self._ask
        if ask.stops:
            places = [(p, c) for p in range(len(ask.prompts)) for c in range(ask.n)]
            choices = await all_of([self._joined(prompt, choice) for prompt, choice in places])
        else:
            of_prompts = [whole_choices(self._backend, self._tokenizer, ask, p) for p in range(len(ask.prompts))]
            choices = [part for parts in await all_of(of_prompts) for part in parts]
        self._count(sum(len(part.token_ids) for part in choices))
        body = self._head("chat.completion" if self._is_chat else "text_completion", choices)
        body["choices"] = [self._choice(index, part) for index, part in enumerate(choices)]
        return body | {"usage": self._usage()}

    async def _joined(self, prompt: int, choice: int) -> Part:
        parts = growing_choice(self._backend, self._tokenizer, self._ask, prompt, choice)
        return joined([part async for part in parts])

    def _choice(self, index: int, part: Part) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": index, "finish_reason": part.finish_reason, "version_spans": part.spans}
        entry["logprobs"] = self._log_probs(part) if self._ask.has_log_probs else None
        if not self._is_chat:
            return entry | {"text": part.text}
        text, calls = tool_calls(part.text) if self._ask.has_tools else (part.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            entry["finish_reason"], message["tool_calls"] = "tool_calls", calls
        return entry | {"message": message}

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream the answer. Nothing is sent before the first part has come, so that a request that fails gets an error
        status.
        """
        start = time.monotonic()
        async with aclosing(self._pieces()) as pieces:
            first = await anext(pieces)
            response = await self._begin(request, time.monotonic() - start)
            try:
                await self._send_part(response, *first)
                async for index, part in pieces:
                    await self._send_part(response, index, part)
                if self._ask.has_usage:
                    body = self._head(self._chunk_name, []) | {"choices": [], "usage": self._usage()}
                    await response.write(_event(body))
            except EngineError as error:  # the answer has begun: it can only say so
                await response.write(_event(error_body(503, str(error))))
            else:
                await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _begin(self, request: web.Request, seconds: float) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        self._metrics.first_seconds["/v1/chat/completions" if self._is_chat else "/v1/completions"].add(seconds)
        if self._is_chat:
            for index in range(len(self._ask.prompts) * self._ask.n):
                await self._send(response, index, Part("", (), (), ()), {"role": "assistant", "content": ""})
        return response

    async def _pieces(self) -> AsyncGenerator[tuple[int, Part], None]:
        """Parts of all choices as they come, with the choice's index."""
        ask, queue = self._ask, asyncio.Queue[tuple[int, Part | Exception | None]]()

        async def fill(index: int) -> None:
            prompt, choice = divmod(index, ask.n)
            try:
                async for part in growing_choice(self._backend, self._tokenizer, ask, prompt, choice):
                    queue.put_nowait((index, part))
                queue.put_nowait((index, None))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(fill(index)) for index in range(len(ask.prompts) * ask.n)]
        try:
            left = len(tasks)
            while left:
                index, part = await queue.get()
                if isinstance(part, Exception):
                    raise part
                if part is None:
                    left -= 1
                else:
                    self._count(len(part.token_ids))
                    yield index, part
        finally:
            for task in tasks:
                task.cancel()

    async def _send_part(self, response: web.StreamResponse, index: int, part: Part) -> None:
        if not self._is_chat:
            await self._send(response, index, part, {})
            return
        text, calls = part.text, list[dict[str, Any]]()
        if part.finish_reason and self._ask.has_tools:  # what may be a call comes last, as a whole
            text, calls = tool_calls(part.text)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        await self._send(response, index, part, delta, "tool_calls" if calls else part.finish_reason)

    async def _send(
        self, response: web.StreamResponse, index: int, part: Part, delta: dict[str, Any], reason: str | None = None
    ) -> None:
        entry: dict[str, Any] = {"index": index, "version_spans": part.spans}
        entry["logprobs"] = self._log_probs(part) if self._ask.has_log_probs and part.token_ids else None
        if self._is_chat:
            entry |= {"delta": delta, "finish_reason": reason}
        else:
            entry |= {"text": part.text, "finish_reason": part.finish_reason}
        await response.write(_event(self._head(self._chunk_name, [part]) | {"choices": [entry]}))

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _head(self, kind: str, parts: list[Part]) -> dict[str, Any]:
        versions = [part.spans[-1][0] for part in parts if part.spans]
        version = max(versions, default=self._backend.version)
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "system_fingerprint": f"version-{version}",
            "policy_version": version,
        }

    def _log_probs(self, part: Part) -> dict[str, Any]:
        tokens = [self._tokenizer.spell([token]) for token in part.token_ids]
        if self._is_chat:
            entries = [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(tokens, part.log_probs, strict=True)
            ]
            return {"content": entries, "refusal": None}
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": list(part.log_probs),
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _count(self, num_tokens: int) -> None:
        self._num_generated += num_tokens
        self._metrics.tokens["generated"] += num_tokens

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(map(len, self._ask.prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
        }


async def all_of(waiting: list[Any]) -> list[Any]:
    """Their results, in order; where one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waiting]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
