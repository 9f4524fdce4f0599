"""The HTTP front of a server: OpenAI's chat and completions, a native endpoint, health and metrics.

Every answer, and every chunk of a stream, names the version of its weights: `policy_version` is
that of the last token, `version_spans` of a choice tell those of all.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rlhf_megatron.jobs.serving.openai_replies import OpenAIReply, gather_or_cancel, make_error_body
from rlhf_megatron.jobs.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    ServedModel,
    check_request,
    parse_request,
)
from rlhf_megatron.jobs.serving.server_metrics import CONTENT_TYPE, ServerMetrics
from rlhf_megatron.jobs.serving.serving_backend import ServingBackend
from rlhf_megatron.rollout.engine_interface import EngineError, EngineRequestError
from rlhf_megatron.rollout.local import local_bodies
from rlhf_megatron.rollout.local.local_server import is_from_web_page

logger = logging.getLogger(__name__)
MOST_RUNNING = 4096  # pieces of answers; more requests are told to come back
_MAX_BODY_BYTES = 64 << 20
_OPEN_PATHS = ("/health",)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_error_response(status: int, message: str, code: str | None = None) -> web.Response:
    """Return a response with an error in OpenAI's form."""
    return web.json_response(make_error_body(status, message, code), status=status)


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
    ) -> None:
        """Begin without requests. Without an `api_key`, no key is asked for; `is_loopback` says
        whether the server listens only on this machine.
        """
        self.backend = backend
        self.served_model = served_model
        self.metrics = ServerMetrics(backend)
        self.is_stopping = False
        self.num_open_requests = 0  # requests under way
        self._api_key = api_key
        self._is_loopback = is_loopback
        self._started_at = int(time.time())

    def make_application(self) -> web.Application:
        """Return the aiohttp application with all routes."""

        @web.middleware
        async def guard_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Handle a request through the checks and counts of the server."""
            return await self._count_and_handle(request, handler)

        app = web.Application(middlewares=[guard_request], client_max_size=_MAX_BODY_BYTES)
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
            response = await self._check_and_handle(request, handler)
        finally:
            self.num_open_requests -= 1
        route = request.match_info.route.resource
        endpoint = route.canonical if route is not None else "unknown"
        self.metrics.request_counts[endpoint, response.status] += 1
        if request.method == "POST" and response.status == 200:
            self.metrics.answer_seconds[endpoint].add_duration(time.monotonic() - start)
        return response

    async def _check_and_handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request from a permitted client, and return errors as responses: 403 to web
        pages, 401 without the key, 503 while stopping, 429 with too many answers under way, and
        errors of the handler with a status that fits.
        """
        if is_from_web_page(request, self._is_loopback):
            return make_error_response(
                403, "web pages are not served; call this server by its own address."
            )
        given = request.headers.get("Authorization", "").encode(errors="replace")
        needs_key = self._api_key is not None and request.path not in _OPEN_PATHS
        if needs_key and not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            return make_error_response(
                401, "the API key is missing or wrong (Authorization: Bearer KEY)."
            )
        if request.method == "POST":
            if self.is_stopping:
                return make_error_response(503, "the server is being stopped; ask another one.")
            if self.backend.num_running >= MOST_RUNNING:
                return make_error_response(
                    429, f"{MOST_RUNNING} answers are under way already; ask again later."
                )
        try:
            return await handler(request)
        except web.HTTPException as error:
            return make_error_response(error.status, error.reason)
        except RequestError as error:
            return make_error_response(error.status, str(error), error.code)
        except EngineRequestError as error:
            return make_error_response(400, str(error))
        except EngineError as error:
            return make_error_response(503, str(error))
        except ValueError as error:
            return make_error_response(400, str(error))
        except Exception as error:
            logger.exception("%s failed", request.path)
            return make_error_response(500, f"{type(error).__name__}: {error}")

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
        ask = check_request(body, self.served_model)
        answer = OpenAIReply(self.backend, self.served_model, self.metrics, ask, is_chat)
        self.metrics.token_counts["prompt"] += sum(map(len, ask.prompts))
        if ask.is_stream:
            return await answer.stream_response(request)
        return web.json_response(await answer.generate_body())
