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

from rlhf_megatron.jobs.serving.growing_choices import (
    ChoicePart,
    generate_choice_parts,
    generate_whole_choices,
    join_choice_parts,
    split_tool_calls,
)
from rlhf_megatron.jobs.serving.openai_requests import CheckedRequest, ServedModel
from rlhf_megatron.jobs.serving.server_metrics import ServerMetrics
from rlhf_megatron.jobs.serving.serving_backend import ServingBackend
from rlhf_megatron.rollout.engine_interface import EngineError


def make_error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form; the message is cut at 2000 characters."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message[:2000], "type": kind, "param": None, "code": code}}


class OpenAIReply:
    """The answer to one request in OpenAI's form, whole or as a stream of server-sent events."""

    def __init__(
        self,
        backend: ServingBackend,
        served_model: ServedModel,
        metrics: ServerMetrics,
        request: CheckedRequest,
        is_chat: bool,
    ) -> None:
        """Begin the reply to a checked request under a new id; nothing is generated yet."""
        self._backend = backend
        self._served_model = served_model
        self._metrics = metrics
        self._request = request
        self._is_chat = is_chat
        self._tokenizer = served_model.tokenizer
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_generated = 0

    async def generate_body(self) -> dict[str, Any]:
        """Generate all choices, and return the whole body of the answer. Where a stop text may end
        a choice, choices are generated in parts.
        """
        ask = self._request
        if ask.stop_texts:
            places = [(p, c) for p in range(len(ask.prompts)) for c in range(ask.num_choices)]
            choices = await gather_or_cancel(
                [self._generate_choice(prompt, choice) for prompt, choice in places]
            )
        else:
            of_prompts = [
                generate_whole_choices(self._backend, self._tokenizer, ask, p)
                for p in range(len(ask.prompts))
            ]
            choices = [part for parts in await gather_or_cancel(of_prompts) for part in parts]
        self._count_generated(sum(len(part.token_ids) for part in choices))
        body = self._make_head("chat.completion" if self._is_chat else "text_completion", choices)
        body["choices"] = [self._format_choice(index, part) for index, part in enumerate(choices)]
        return body | {"usage": self._format_usage()}

    async def _generate_choice(self, prompt_index: int, choice_index: int) -> ChoicePart:
        """Generate a choice in parts, and return the parts as one."""
        parts = generate_choice_parts(
            self._backend, self._tokenizer, self._request, prompt_index, choice_index
        )
        return join_choice_parts([part async for part in parts])

    def _format_choice(self, choice_index: int, part: ChoicePart) -> dict[str, Any]:
        """Return the entry of a whole choice in the answer, with tool calls if the request has
        tools.
        """
        entry: dict[str, Any] = {
            "index": choice_index,
            "finish_reason": part.finish_reason,
            "version_spans": part.version_spans,
        }
        entry["logprobs"] = (
            self._format_log_probs(part) if self._request.includes_log_probs else None
        )
        if not self._is_chat:
            return entry | {"text": part.text}
        text, calls = split_tool_calls(part.text) if self._request.has_tools else (part.text, [])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
        }
        if calls:
            entry["finish_reason"] = "tool_calls"
            message["tool_calls"] = calls
        return entry | {"message": message}

    async def stream_response(self, http_request: web.Request) -> web.StreamResponse:
        """Stream the answer, and return the finished response. Nothing is sent before the first
        part has come, so that a request that fails gets an error status; a later failure becomes an
        event with the error.
        """
        start = time.monotonic()
        async with aclosing(self._generate_parts()) as pieces:
            first_index, first_part = await anext(pieces)
            response = await self._begin_stream(http_request, time.monotonic() - start)
            try:
                await self._send_part(response, first_index, first_part)
                async for index, part in pieces:
                    await self._send_part(response, index, part)
                if self._request.includes_usage:
                    body = self._make_head(self._chunk_name, []) | {
                        "choices": [],
                        "usage": self._format_usage(),
                    }
                    await response.write(_encode_event(body))
            except EngineError as error:  # the answer has begun: it can only say so
                await response.write(_encode_event(make_error_body(503, str(error))))
            else:
                await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _begin_stream(self, http_request: web.Request, seconds: float) -> web.StreamResponse:
        """Send the headers of a stream, and for a chat the role of each choice. Count `seconds` as
        the time to the first text.
        """
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(http_request)
        self._metrics.first_text_seconds[
            "/v1/chat/completions" if self._is_chat else "/v1/completions"
        ].add_duration(seconds)
        if self._is_chat:
            for index in range(len(self._request.prompts) * self._request.num_choices):
                await self._send_chunk(
                    response,
                    index,
                    ChoicePart("", (), (), ()),
                    {"role": "assistant", "content": ""},
                )
        return response

    async def _generate_parts(self) -> AsyncGenerator[tuple[int, ChoicePart], None]:
        """Yield (index of the choice, part) for all choices as their parts come. Raise the first
        error of a choice; cancel all others at the end.
        """
        ask = self._request
        queue = asyncio.Queue[tuple[int, ChoicePart | Exception | None]]()

        async def queue_choice_parts(choice_index: int) -> None:
            """Put the parts of a choice into the queue as they come, and then None, or the
            exception that ended the choice.
            """
            prompt, choice = divmod(choice_index, ask.num_choices)
            try:
                async for part in generate_choice_parts(
                    self._backend, self._tokenizer, ask, prompt, choice
                ):
                    queue.put_nowait((choice_index, part))
                queue.put_nowait((choice_index, None))
            except Exception as error:
                queue.put_nowait((choice_index, error))

        tasks = [
            asyncio.create_task(queue_choice_parts(index))
            for index in range(len(ask.prompts) * ask.num_choices)
        ]
        try:
            left = len(tasks)
            while left:
                index, part = await queue.get()
                if isinstance(part, Exception):
                    raise part
                if part is None:
                    left -= 1
                else:
                    self._count_generated(len(part.token_ids))
                    yield index, part
        finally:
            for task in tasks:
                task.cancel()

    async def _send_part(
        self, response: web.StreamResponse, choice_index: int, part: ChoicePart
    ) -> None:
        """Send a part of a choice as a chunk; tool calls, which come in the last part, are sent
        whole.
        """
        if not self._is_chat:
            await self._send_chunk(response, choice_index, part, {})
            return
        text = part.text
        calls = list[dict[str, Any]]()
        # what may be a call comes last, as a whole
        if part.finish_reason and self._request.has_tools:
            text, calls = split_tool_calls(part.text)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        await self._send_chunk(
            response, choice_index, part, delta, "tool_calls" if calls else part.finish_reason
        )

    async def _send_chunk(
        self,
        response: web.StreamResponse,
        choice_index: int,
        part: ChoicePart,
        delta: dict[str, Any],
        finish_reason: str | None = None,
    ) -> None:
        """Write one event with a part of a choice. `delta` and `finish_reason` are for a chat; a
        completion takes both from the part.
        """
        entry: dict[str, Any] = {"index": choice_index, "version_spans": part.version_spans}
        entry["logprobs"] = (
            self._format_log_probs(part)
            if self._request.includes_log_probs and part.token_ids
            else None
        )
        if self._is_chat:
            entry |= {"delta": delta, "finish_reason": finish_reason}
        else:
            entry |= {"text": part.text, "finish_reason": part.finish_reason}
        await response.write(
            _encode_event(self._make_head(self._chunk_name, [part]) | {"choices": [entry]})
        )

    @property
    def _chunk_name(self) -> str:
        """Return OpenAI's name for the object of a stream's chunk."""
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _make_head(self, object_name: str, parts: list[ChoicePart]) -> dict[str, Any]:
        """Return the fields that every body begins with: id, object, time, model, and the newest
        version of the parts' weights.
        """
        versions = [part.version_spans[-1][0] for part in parts if part.version_spans]
        version = max(versions, default=self._backend.policy_version)
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._served_model.name,
            "system_fingerprint": f"version-{version}",
            "policy_version": version,
        }

    def _format_log_probs(self, part: ChoicePart) -> dict[str, Any]:
        """Return the tokens of a part with their log-probs, in the form for chats or for
        completions.
        """
        tokens = [self._tokenizer.decode_with_special_tokens([token]) for token in part.token_ids]
        if self._is_chat:
            entries = [
                {
                    "token": token,
                    "logprob": value,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
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

    def _count_generated(self, num_tokens: int) -> None:
        """Count generated tokens for this answer's usage and for the server's metrics."""
        self._num_generated += num_tokens
        self._metrics.token_counts["generated"] += num_tokens

    def _format_usage(self) -> dict[str, int]:
        """Return the numbers of prompt tokens, generated tokens and their sum."""
        num_prompt = sum(map(len, self._request.prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
        }


async def gather_or_cancel(awaitables: list[Any]) -> list[Any]:
    """Await all, and return their results in order; where one fails, cancel the others and raise
    its error.
    """
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _encode_event(body: dict[str, Any]) -> bytes:
    """Return a body as a server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"
