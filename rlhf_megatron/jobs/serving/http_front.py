"""The HTTP front of a server: OpenAI's chat and completions, a native endpoint, health and metrics.

Every answer, and every chunk of a stream, names the version of its weights: `policy_version` is
that of the last token, `version_spans` of a choice tell those of all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rlhf_megatron.http_guard import GuardRules, Handler, Refusal, RequestGuard
from rlhf_megatron.jobs.serving.openai_replies import OpenAIReply, gather_or_cancel, make_error_body
from rlhf_megatron.jobs.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    ServedModel,
    parse_request,
)
from rlhf_megatron.jobs.serving.prompt_encoding import DEFAULT_MOST_CHARACTERS, PromptEncoder
from rlhf_megatron.jobs.serving.server_metrics import CONTENT_TYPE, ServerMetrics
from rlhf_megatron.jobs.serving.serving_backend import ServingBackend
from rlhf_megatron.rollout.engine_interface import EngineError, EngineRequestError
from rlhf_megatron.rollout.local import local_bodies

MOST_RUNNING = 4096  # pieces of answers; more requests are told to come back


@dataclass(frozen=True)
class ServingLimits:
    """What one request, or all requests together, may take of a server."""

    # of a body; a character takes up to 6 bytes of JSON
    max_body_bytes: int = 16 << 20
    most_characters: int = DEFAULT_MOST_CHARACTERS  # that are tokenized at once
    # of the prompts that are being answered; 8 bytes each
    most_prompt_tokens: int = 32 << 20

    def __post_init__(self) -> None:
        """Raise ValueError for a limit below 1."""
        for name in ("max_body_bytes", "most_characters", "most_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")


def make_error_response(status: int, message: str, code: str | None = None) -> web.Response:
    """Return a response with an error in OpenAI's form."""
    return web.json_response(make_error_body(status, message, code), status=status)


def _describe_serving_error(error: Exception) -> Refusal | None:
    """Return the answer to an error of a request or of the engines; None for others."""
    if isinstance(error, RequestError):
        return Refusal(error.status, str(error), error.code)
    if isinstance(error, EngineRequestError):
        return Refusal(400, str(error))
    if isinstance(error, EngineError):
        return Refusal(503, str(error))
    return None


class ServingFront:
    """The HTTP application of a server. While `is_stopping` is set, new requests are refused and
    open ones may end.
    """

    def __init__(
        self,
        backend: ServingBackend,
        served_model: ServedModel,
        api_key: str | None,
        is_loopback: bool,
        limits: ServingLimits = ServingLimits(),
    ) -> None:
        """Begin without requests. Without an `api_key`, no key is asked for; `is_loopback` says
        whether the server listens only on this machine.
        """
        self._limits = limits
        self._num_prompt_tokens = 0  # of the prompts that are being answered
        self.backend = backend
        self.served_model = served_model
        self.metrics = ServerMetrics(backend)
        self.is_stopping = False
        self.num_open_requests = 0  # requests under way
        self._started_at = int(time.time())
        rules = GuardRules(
            bearer_key=api_key,
            is_loopback=is_loopback,
            max_body_bytes=limits.max_body_bytes,
            max_held_bytes=2 * limits.max_body_bytes,
            key_hint="whoever started the server has it",
        )
        self.prompt_encoder = PromptEncoder(served_model, limits.most_characters)
        self.guard = RequestGuard(rules, make_error_response, _describe_serving_error)

    def make_application(self) -> web.Application:
        """Return the aiohttp application with all routes, behind the guard."""

        @web.middleware
        async def count_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Handle a request, and count it in the metrics."""
            return await self._count_and_handle(request, handler)

        @web.middleware
        async def refuse_when_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Handle a request if the server takes new ones."""
            self._require_room(request)
            return await handler(request)

        app = self.guard.make_application([count_request], [refuse_when_busy])
        app.add_routes(
            [
                web.get("/health", self.handle_health),
                web.get("/metrics", self.handle_metrics),
                web.get("/v1/models", self.handle_models),
                web.get("/v1/models/{name:.+}", self.handle_model),
                web.post("/v1/completions", self.handle_completions),
                web.post("/v1/chat/completions", self.handle_completions),
                web.post("/generate", self.handle_generate),
            ]
        )
        return app

    async def _count_and_handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request, and count its status and, for an answer, its duration in
        the metrics.
        """
        start = time.monotonic()
        self.num_open_requests += 1
        try:
            response = await handler(request)
        finally:
            self.num_open_requests -= 1
        route = request.match_info.route.resource
        endpoint = route.canonical if route is not None else "unknown"
        self.metrics.request_counts[endpoint, response.status] += 1
        if request.method == "POST" and response.status == 200:
            self.metrics.answer_seconds[endpoint].add_duration(time.monotonic() - start)
        return response

    def _require_room(self, request: web.Request) -> None:
        """Raise RequestError for a question while the server stops (503) or has too many answers
        under way (429).
        """
        if request.method != "POST":
            return
        if self.is_stopping:
            raise RequestError("the server is being stopped; ask another one.", 503)
        if self.backend.num_running >= MOST_RUNNING:
            raise RequestError(
                f"{MOST_RUNNING} answers are under way already; ask again later.", 429
            )

    async def handle_health(self, request: web.Request) -> web.Response:
        """Answer with the status, the version and the number of engines: status 200 if an engine
        serves and the server is neither stopping nor ended, else 503.
        """
        live, count = self.backend.engine_counts
        is_well = live > 0 and not self.is_stopping and not self.backend.end_future.done()
        if is_well:
            status = "ok"
        else:
            status = "stopping" if self.is_stopping else "no engine serves"
        body = {
            "status": status,
            "policy_version": self.backend.policy_version,
            "engines": count,
            "engines_serving": live,
        }
        return web.json_response(body, status=200 if is_well else 503)

    async def handle_metrics(self, request: web.Request) -> web.Response:
        """Answer with the metrics in Prometheus' text format."""
        return web.Response(
            body=self.metrics.format_metrics().encode(), headers={"Content-Type": CONTENT_TYPE}
        )

    async def handle_models(self, request: web.Request) -> web.Response:
        """Answer with the list of the only model."""
        return web.json_response({"object": "list", "data": [self._describe_model()]})

    async def handle_model(self, request: web.Request) -> web.Response:
        """Answer with the model of this name. Raise RequestError (404) for another name."""
        if request.match_info["name"] != self.served_model.name:
            raise RequestError(
                f"there is no model {request.match_info['name']!r} here.", 404, "model_not_found"
            )
        return web.json_response(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        """Return the model in OpenAI's form, with its longest text and version."""
        return {
            "id": self.served_model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "rlhf-megatron",
            "max_model_len": self.served_model.max_tokens,
            "policy_version": self.backend.policy_version,
        }

    async def handle_generate(self, request: web.Request) -> web.Response:
        """Answer a request of token ids with token ids, log-probs and versions, in the wire format
        of the bundled engine.
        """
        body = local_bodies.parse_verb_body(await request.read(), local_bodies.GenerateBody)
        if body.name:
            raise RequestError("name is for engines; leave it out.")
        answers = await gather_or_cancel(
            [self.backend.generate_samples(asked) for asked in body.to_requests()]
        )
        self.metrics.token_counts["generated"] += sum(
            len(s.token_ids) for group in answers for s in group
        )
        return web.Response(
            body=local_bodies.encode_samples(answers), content_type="application/json"
        )

    async def handle_completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat or completion request in OpenAI's form, as a stream if it asks for one.
        Raise RequestError for a request that is wrong.
        """
        is_chat = request.path.endswith("/chat/completions")
        data = await request.read()
        body: ChatRequest | CompletionRequest = (
            parse_request(data, ChatRequest, self.served_model)
            if is_chat
            else parse_request(data, CompletionRequest, self.served_model)
        )
        ask = await self.prompt_encoder.encode_request(body)
        answer = OpenAIReply(self.backend, self.served_model, self.metrics, ask, is_chat)
        num_tokens = sum(map(len, ask.prompts))
        with self._hold_prompt_tokens(num_tokens):
            self.metrics.token_counts["prompt"] += num_tokens
            if ask.is_stream:
                return await answer.stream_response(request)
            return web.json_response(await answer.generate_body())

    @contextmanager
    def _hold_prompt_tokens(self, num_tokens: int) -> Iterator[None]:
        """Count so many tokens as being answered within the block. Raise RequestError (429) where
        the server holds too many already.
        """
        if self._num_prompt_tokens + num_tokens > self._limits.most_prompt_tokens:
            raise RequestError(
                f"prompts of {self._num_prompt_tokens} tokens are being answered already; ask"
                " again later.",
                429,
            )
        self._num_prompt_tokens += num_tokens
        try:
            yield
        finally:
            self._num_prompt_tokens -= num_tokens
