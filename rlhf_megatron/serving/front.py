"""The HTTP front of a server: OpenAI's chat and completions, a native endpoint, health and metrics.

Every answer, and every chunk of a stream, names the version of its weights: `policy_version` is that of the last token,
`version_spans` of a choice tell those of all.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rlhf_megatron.rollout.engine import EngineError, EngineRequestError
from rlhf_megatron.rollout.local import wire
from rlhf_megatron.rollout.local.server import is_from_page
from rlhf_megatron.serving.backend import Backend
from rlhf_megatron.serving.bodies import Chat, Completion, RequestError, Served, ask_of, read
from rlhf_megatron.serving.metrics import CONTENT_TYPE, ServerMetrics
from rlhf_megatron.serving.reply import Reply, all_of, error_body

logger = logging.getLogger(__name__)
MOST_RUNNING = 4096  # pieces of answers; more requests are told to come back
_MAX_BODY_BYTES = 64 << 20
_OPEN_PATHS = ("/health",)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(status: int, message: str, code: str | None = None) -> web.Response:
    """Answer with an error in OpenAI's form."""
    return web.json_response(error_body(status, message, code), status=status)


class Front:
    """The application of a server. `is_stopping`: set, new requests are refused, those under way end."""

    def __init__(self, backend: Backend, served: Served, key: str | None, is_loopback: bool) -> None:
        self.backend, self.served = backend, served
        self.metrics = ServerMetrics(backend)
        self.is_stopping = False
        self.num_open = 0  # requests under way
        self._key = key
        self._is_loopback = is_loopback
        self._since = int(time.time())

    def application(self) -> web.Application:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.tell_metrics),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.completions),
                web.post("/generate", self.generate),
            ]
        )
        return app

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        start = time.monotonic()
        self.num_open += 1
        try:
            response = await self._answered(request, handler)
        finally:
            self.num_open -= 1
        route = request.match_info.route.resource
        endpoint = route.canonical if route is not None else "unknown"
        self.metrics.requests[endpoint, response.status] += 1
        if request.method == "POST" and response.status == 200:
            self.metrics.seconds[endpoint].add(time.monotonic() - start)
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_from_page(request, self._is_loopback):
            return error_response(403, "web pages are not served; call this server by its own address.")
        given = request.headers.get("Authorization", "").encode(errors="replace")
        needs_key = self._key is not None and request.path not in _OPEN_PATHS
        if needs_key and not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            return error_response(401, "the API key is missing or wrong (Authorization: Bearer KEY).")
        if request.method == "POST":
            if self.is_stopping:
                return error_response(503, "the server is being stopped; ask another one.")
            if self.backend.num_running >= MOST_RUNNING:
                return error_response(429, f"{MOST_RUNNING} answers are under way already; ask again later.")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return error_response(error.status, error.reason)
        except RequestError as error:
            return error_response(error.status, str(error), error.code)
        except EngineRequestError as error:
            return error_response(400, str(error))
        except EngineError as error:
            return error_response(503, str(error))
        except ValueError as error:
            return error_response(400, str(error))
        except Exception as error:
            logger.exception("%s failed", request.path)
            return error_response(500, f"{type(error).__name__}: {error}")

    async def health(self, request: web.Request) -> web.Response:
        live, count = self.backend.num_engines
        is_well = live > 0 and not self.is_stopping and not self.backend.ended.done()
        body = {
            "status": "ok" if is_well else "stopping" if self.is_stopping else "no engine serves",
            "policy_version": self.backend.version,
            "engines": count,
            "engines_serving": live,
        }
        return web.json_response(body, status=200 if is_well else 503)

    async def tell_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != self.served.name:
            raise RequestError(f"there is no model {request.match_info['name']!r} here.", 404, "model_not_found")
        return web.json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._since,
            "owned_by": "rlhf-megatron",
            "max_model_len": self.served.max_tokens,
            "policy_version": self.backend.version,
        }

    async def generate(self, request: web.Request) -> web.Response:
        """Token ids in, token ids, log-probs and versions out: the wire format of the bundled engine."""
        body = wire.read(await request.read(), wire.Generate)
        if body.name:
            raise RequestError("name is for engines; leave it out.")
        answers = await all_of([self.backend.ask(asked) for asked in body.read()])
        self.metrics.tokens["generated"] += sum(len(s.token_ids) for group in answers for s in group)
        return web.Response(body=wire.samples_to_json(answers), content_type="application/json")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        is_chat, data = request.path.endswith("/chat/completions"), await request.read()
        body: Chat | Completion = read(data, Chat, self.served) if is_chat else read(data, Completion, self.served)
        ask = ask_of(body, self.served)
        answer = Reply(self.backend, self.served, self.metrics, ask, is_chat)
        self.metrics.tokens["prompt"] += sum(map(len, ask.prompts))
        if ask.is_stream:
            return await answer.stream(request)
        return web.json_response(await answer.whole())
