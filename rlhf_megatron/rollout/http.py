"""JSON over HTTP with a deadline on every call; what goes wrong becomes an `EngineError` that names the engine.

All clients of a process share one event loop, in a thread of its own, and its connections: calls may come from any
thread, and thousands may be under way (a router is sent one a sample).
"""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import os
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import aiohttp

from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineRequestError, EngineTimeoutError

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 10.0
_IDLE_S = 4.0  # SGLang's server drops connections that were idle for 5 s; one that is about to go must not be used
_GRACE_S = 10.0  # for the loop's thread to say that a deadline has passed
_LARGE_BYTES = 1 << 20  # aiohttp sends such a body in pieces where it comes as a file


class HttpClient:
    """Thread-safe."""

    def __init__(self, address: EngineAddress, key: str | None = None) -> None:
        """`key`: sent as bearer token; None: that of the admin verbs. Without one no header is sent."""
        self.address = address
        key = address.token if key is None else key
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, timeout_s: float) -> Any:
        return self._parsed("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """`body`: what json.dumps takes, or a string of JSON. Returns the parsed answer.

        Raises EngineTimeoutError after `timeout_s`, EngineRequestError on 4xx, EngineError otherwise.
        """
        return self._parsed("POST", path, body if isinstance(body, str) else json.dumps(body), timeout_s)

    async def send(
        self, method: str, path: str, body: str | None, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request, in the loop of `run`. Raises EngineError where no answer comes, whatever its status."""
        who = f"{self.address.name} ({self.address.url}{path})"
        timeout_s = max(timeout_s, 1e-3)  # 0 would be no limit
        limits = aiohttp.ClientTimeout(
            timeout_s, sock_connect=min(_CONNECT_TIMEOUT_S, timeout_s), ceil_threshold=float("inf")
        )
        data = None if body is None else body.encode()
        try:
            async with _session().request(
                method,
                self.address.url + path,
                data=io.BytesIO(data) if data is not None and len(data) > _LARGE_BYTES else data,
                headers=self._headers | (headers or {}),
                timeout=limits,
                allow_redirects=False,
            ) as response:
                content_type = response.headers.get("Content-Type", "")
                return Answer(who, response.status, content_type, await response.read())
        except TimeoutError as error:
            raise EngineTimeoutError(f"{who}: no answer within {timeout_s:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            reason = os.strerror(number) if number and number > 0 else str(error.os_error)
            raise EngineError(f"{who}: no connection ({reason}).") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{who}: {error or type(error).__name__}.") from error

    def _parsed(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        return run(self.send(method, path, body, timeout_s), timeout_s).parsed()


@dataclass(frozen=True)
class Answer:
    """A server's answer, which came in time."""

    who: str  # engine and address, for messages
    status: int
    content_type: str
    data: bytes

    def parsed(self, good: tuple[int, ...] = (200,), refused: Collection[int] = range(400, 500)) -> Any:
        """Its JSON, or text. Raises EngineRequestError where the status is in `refused`, EngineError where it is not in
        `good` either."""
        if self.status not in good:
            kind = EngineRequestError if self.status in refused else EngineError
            raise kind(f"{self.who} answered {self.status}: {_words(self.data)}")
        if "json" not in self.content_type:
            return self.data.decode(errors="replace")  # some of SGLang's verbs answer with a line of text
        try:
            return json.loads(self.data) if self.data else None
        except ValueError as error:
            raise EngineError(f"{self.who}: the answer is not JSON: {self.data[:200]!r}") from error


def run(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run `work`, which keeps the deadline `timeout_s` by itself, in the clients' loop. It is cancelled where this
    thread is interrupted."""
    future = start(work)
    try:
        return future.result(timeout_s + _GRACE_S)
    except BaseException:
        future.cancel()
        raise


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start `work` without waiting for it."""
    return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))


@lru_cache(1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked one needs its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
        _sessions[loop] = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        atexit.register(lambda: asyncio.run_coroutine_threadsafe(_sessions[loop].close(), loop).result(_GRACE_S))
    return _sessions[loop]


def _words(data: bytes) -> str:
    text = data.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:500]
