"""The guard in front of every HTTP server of this package: who may ask, how much, and how long.

A request passes when no web page sent it, when it has the server's key, when its body is small
enough, and when the body arrives in time. The bodies that a server holds are bounded over all
requests together, and connections that ask nothing are closed after a while. Everything else is
answered with a status and one line, and leaves no traceback and no key in a log.

This module is for servers only: aiohttp is imported with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")
MAX_ERROR_CHARACTERS = 2000
_LOG_INTERVAL_S = 60.0
_CONNECTION_LOOK_S = 2.0
_LINGER_S = 2.0  # in which a client whose body is refused may still read the answer
BACKLOG = 1024  # connections that wait to be accepted
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# (status, message, code of OpenAI's errors or None) -> the server's own form of an error
MakeErrorResponse = Callable[[int, str, str | None], web.Response]


@dataclass(frozen=True)
class GuardRules:
    """What a server demands of a request."""

    bearer_key: str | None  # None: no key is asked for
    is_loopback: bool  # the server listens on this machine only
    max_body_bytes: int
    max_held_bytes: int  # of the bodies that are held at once; others wait
    key_hint: str  # where a client finds the key, for the message
    open_paths: tuple[str, ...] = ("/health",)  # that need no key
    body_timeout_s: float = 60.0  # in which a body must have arrived
    # after which a connection is closed on which no request is being answered
    idle_timeout_s: float = 75.0


@dataclass(frozen=True)
class Refusal:
    """Why a request is not handled."""

    status: int
    message: str
    code: str | None = None


def make_plain_error_response(status: int, message: str, code: str | None = None) -> web.Response:
    """Return an error as JSON, {"error": message}: the form of servers that speak no dialect, which
    has no place for `code`.
    """
    return web.json_response({"error": message}, status=status)


def is_from_web_page(host_header: str, has_origin: bool, is_loopback: bool) -> bool:
    """Return whether a browser may have sent a request for a web page of another site: the request
    names an origin, or reaches a loopback server by another host name.
    """
    try:
        host = urlsplit(f"//{host_header}").hostname
    except ValueError:
        host = None
    return has_origin or (is_loopback and host not in LOOPBACK_NAMES)


def has_bearer_key(authorization: str, bearer_key: str) -> bool:
    """Return whether an Authorization header carries the key. The time that this takes tells
    nothing about the key.
    """
    return hmac.compare_digest(
        authorization.encode(errors="replace"), f"Bearer {bearer_key}".encode()
    )


def find_refusal(request: web.Request, rules: GuardRules) -> Refusal | None:
    """Return why a request is refused by its headers alone, or None."""
    headers = request.headers
    if is_from_web_page(headers.get("Host", ""), "Origin" in headers, rules.is_loopback):
        return Refusal(403, "web pages are not served; call this server by its own address.")
    needs_key = rules.bearer_key is not None and request.path not in rules.open_paths
    if needs_key:
        assert rules.bearer_key is not None, "a key is needed"
        if not has_bearer_key(headers.get("Authorization", ""), rules.bearer_key):
            return Refusal(
                401,
                f"the key is missing or wrong (Authorization: Bearer KEY); {rules.key_hint}.",
            )
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        # a packed body may be a thousand times larger when it is unpacked
        return Refusal(415, "a body is read as it comes; leave out Content-Encoding.")
    if (request.content_length or 0) > rules.max_body_bytes:
        return Refusal(
            413,
            f"the body has {request.content_length} bytes, and may have {rules.max_body_bytes};"
            " ask for less at once.",
        )
    return None


class SharedBudget:
    """An amount, such as bytes, that all requests of a server share. Requests that find too little
    left wait in the order in which they came. For one event loop.
    """

    def __init__(self, total: int) -> None:
        """Begin with everything free."""
        self.num_free = total
        self._total = total
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[None]:
        """Hold so much within the block, after waiting for it. More than the total is held as the
        total.
        """
        held_amount = min(amount, self._total)
        await self._take(held_amount)
        try:
            yield
        finally:
            self.num_free += held_amount
            self._wake_waiters()

    async def _take(self, amount: int) -> None:
        """Take an amount, or wait behind those who wait already."""
        if not self._waiters and amount <= self.num_free:
            self.num_free -= amount
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiters.append((amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.num_free += amount  # the turn came together with the cancellation
            self._waiters = deque(waiter for waiter in self._waiters if waiter[1] is not turn)
            self._wake_waiters()
            raise

    def _wake_waiters(self) -> None:
        """Give the first ones that wait what they wait for, as far as it lasts."""
        while self._waiters and (
            self._waiters[0][1].done() or self._waiters[0][0] <= self.num_free
        ):
            amount, turn = self._waiters.popleft()
            if not turn.done():
                self.num_free -= amount
                turn.set_result(None)


class RequestGuard:
    """Lets requests pass by the rules, and turns errors of the handlers into responses."""

    def __init__(
        self,
        rules: GuardRules,
        make_error_response: MakeErrorResponse,
        describe_error: Callable[[Exception], Refusal | None] = lambda error: None,
    ) -> None:
        """Begin without requests. `describe_error` returns the answer to an error that the server
        knows, or None; a ValueError is then a bad request, and anything else an error of the
        server.
        """
        self.rules = rules
        self.answering_connections: set[Any] = set()  # on which a request is being answered
        self._make_error_response = make_error_response
        self._describe_error = describe_error
        self._held_bodies = SharedBudget(rules.max_held_bytes)

    def make_application(
        self, outer_middlewares: Sequence[Any] = (), inner_middlewares: Sequence[Any] = ()
    ) -> web.Application:
        """Return an application behind the guard. Outer middlewares see refused requests, too;
        inner ones, and handlers, get the body from `request.read()` without waiting.
        """

        @web.middleware
        async def guard_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Answer a request through the guard."""
            return await self.answer_request(request, handler)

        return web.Application(
            middlewares=[*outer_middlewares, guard_request, *inner_middlewares],
            client_max_size=self.rules.max_body_bytes,
        )

    async def answer_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the request, await its body, call its handler, and answer errors."""
        self.answering_connections.add(request.protocol)
        try:
            refusal = find_refusal(request, self.rules)
            if refusal is None:
                return await self._call_handler(request, handler)
        except web.HTTPException as error:
            refusal = Refusal(error.status, error.reason)
        except ConnectionError:
            raise  # the client went away: there is nobody to answer
        except Exception as error:
            refusal = self._describe_error(error) or _describe_unknown_error(error, request)
        finally:
            self.answering_connections.discard(request.protocol)
        message = refusal.message[:MAX_ERROR_CHARACTERS]
        return self._make_error_response(refusal.status, message, refusal.code)

    async def _call_handler(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the handler when the body has arrived, within the bytes that bodies may take."""
        if not request.body_exists:
            return await handler(request)
        # a body of unknown length may become as long as the longest one
        length = request.content_length
        most_bytes = self.rules.max_body_bytes if length is None else length
        async with self._held_bodies.hold(most_bytes):
            await _read_body(request, self.rules.body_timeout_s)
            return await handler(request)


async def _read_body(request: web.Request, timeout_s: float) -> None:
    """Read the body into the request. Raise HTTPRequestTimeout where it does not arrive in time,
    HTTPBadRequest where it is malformed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await request.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(reason="the body is malformed") from error
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            reason=f"the body did not arrive within {timeout_s:g} s"
        ) from None


def _describe_unknown_error(error: Exception, request: web.Request) -> Refusal:
    """Return the answer to an error of a handler, and log an error that is the server's own."""
    if isinstance(error, ValueError):
        return Refusal(400, str(error))
    logger.error("%s failed", request.path, exc_info=error)
    return Refusal(500, f"{type(error).__name__}: {error}")


class MalformedRequestFilter(logging.Filter):
    """Replaces aiohttp's traceback of a request that is no HTTP by one log line, at most once a
    minute: anybody who can connect can send such requests, and their content may hold a key.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_dropped = 0
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record: drop malformed requests within the minute, and shorten
        the others to one line.
        """
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        if time.monotonic() < self._next_s:
            self._num_dropped += 1
            return False
        record.msg = "refused a request that is no HTTP; %d more before it"
        record.args = (self._num_dropped,)
        record.exc_info = record.exc_text = None
        self._num_dropped = 0
        self._next_s = time.monotonic() + _LOG_INTERVAL_S
        return True


class GuardedServer:
    """An application behind a guard, listening at an address. For one event loop."""

    def __init__(
        self, application: web.Application, guard: RequestGuard, shutdown_timeout_s: float = 1.0
    ) -> None:
        """Take an application that `guard` made. `shutdown_timeout_s`: how long open requests may
        go on when the server is closed.
        """
        self._guard = guard
        self._idle_timeout_s = guard.rules.idle_timeout_s
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_timeout_s,
            keepalive_timeout=self._idle_timeout_s,
            lingering_time=_LINGER_S,
        )
        self._reaper: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen at the address, and return it with the port that was taken for port 0. Raise
        ValueError where the port cannot be had.
        """
        server_log = logging.getLogger("aiohttp.server")
        if not any(isinstance(one, MalformedRequestFilter) for one in server_log.filters):
            server_log.addFilter(MalformedRequestFilter())
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}); --port 0 takes a free one."
            ) from error
        self._reaper = asyncio.create_task(self._close_idle_connections())
        bound_host, bound_port = self._runner.addresses[0][:2]
        return str(bound_host), int(bound_port)

    async def close(self) -> None:
        """Stop to listen, and close all connections."""
        if self._reaper is not None:
            self._reaper.cancel()
        await self._runner.cleanup()

    async def _close_idle_connections(self) -> None:
        """Close connections on which nothing was asked for the idle time, without end. aiohttp
        closes those that have asked something before; these never sent a whole request.
        """
        server = self._runner.server
        assert server is not None, "the server listens"
        last_busy_s: dict[Any, float] = {}
        while True:
            await asyncio.sleep(min(_CONNECTION_LOOK_S, self._idle_timeout_s / 2))
            now = time.monotonic()
            answering = self._guard.answering_connections
            last_busy_s = {
                connection: now if connection in answering else last_busy_s.get(connection, now)
                for connection in server.connections
            }
            for connection, busy_s in last_busy_s.items():
                if now - busy_s > self._idle_timeout_s:
                    connection.force_close()
