"""JSON over HTTP with a deadline on every call; what goes wrong becomes an `EngineError` that names the engine.

All clients of a process share one event loop, in a thread of its own, and its connections: calls may come from any
thread, and thousands may be under way (a router is sent one a sample) without a thread each.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import logging
import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import aiohttp
from aiohttp import hdrs

from rlhf_megatron.rollout.engine import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from rlhf_megatron.rollout.sockets import allow_open_files, local_ports, notice_vanished

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

_CONNECT_TIMEOUT_S = 10.0
_OPENING = 32  # connections to one server at a time
_IDLE_S = 4.0  # SGLang's server drops connections that were idle for 5 s; one that is about to go must not be used
_GRACE_S = 10.0  # for the loop's thread to say that a deadline has passed
_LARGE_BYTES = 1 << 20  # aiohttp sends such a body in pieces where it comes as a file
_OTHER_FILES = 1024  # of a process: ranks, logs, the verbs of engines; a quarter where it has few
_SMALL_BYTES = 1 << 16  # an answer that is parsed in a millisecond


class HttpClient:
    """Thread-safe."""

    def __init__(self, address: EngineAddress, key: str | None = None) -> None:
        """`key`: sent as bearer token; None: that of the admin verbs. Without one no header is sent."""
        self.address = address
        key = address.token if key is None else key
        self._headers: dict[str, str] = {hdrs.CONTENT_TYPE: "application/json", hdrs.ACCEPT_ENCODING: "identity"}
        self._headers |= {hdrs.AUTHORIZATION: f"Bearer {key}"} if key else {}

    def get(self, path: str, timeout_s: float) -> Any:
        return self._parsed("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """`body`: what json.dumps takes, or a string of JSON. Returns the parsed answer.

        Raises EngineTimeoutError after `timeout_s`, EngineRequestError on 4xx, EngineError otherwise.
        """
        return self._parsed("POST", path, body if isinstance(body, str) else json.dumps(body), timeout_s)

    async def send(
        self,
        method: str,
        path: str,
        body: str | bytes | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        left_s: float | None = None,
    ) -> Answer:
        """One request, in the loop of `run`. Raises EngineError where no answer comes, whatever its status.

        `left_s`: of `timeout_s`, where the call has waited before.
        """
        url = sys.intern(self.address.url + path)  # of thousands of calls that wait
        who = sys.intern(f"{self.address.name} ({url})")
        left_s = max(timeout_s if left_s is None else left_s, 1e-3)  # 0 would be no limit
        limits = aiohttp.ClientTimeout(
            left_s, sock_connect=min(_CONNECT_TIMEOUT_S, left_s), ceil_threshold=float("inf")
        )
        data = body.encode() if isinstance(body, str) else body
        try:
            async with _session().request(
                method,
                url,
                data=io.BytesIO(data) if data is not None and len(data) > _LARGE_BYTES else data,
                headers=self._headers | dict(headers) if headers else self._headers,
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
            raise EngineUnreachableError(f"{who}: no connection ({reason}).") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(f"{who}: {error or type(error).__name__}.") from error

    def _parsed(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        try:
            return run(self.send(method, path, body, timeout_s), timeout_s).parsed()
        except TimeoutError as error:  # the loop did not say so itself: this process stood still
            words = f"{self.address.name} ({self.address.url}{path}): no answer within {timeout_s:g} s."
            raise EngineTimeoutError(words) from error


@dataclass(frozen=True)
class Answer:
    """A server's answer, which came in time."""

    who: str  # engine and address, for messages
    status: int
    content_type: str
    data: bytes

    def good_data(self, good: tuple[int, ...] = (200,), refused: Collection[int] = range(400, 500)) -> bytes:
        """Raises EngineRequestError where the status is in `refused`, EngineError where it is not in `good` either."""
        if self.status not in good:
            kind = EngineRequestError if self.status in refused else EngineError
            raise kind(f"{self.who} answered {self.status}: {_words(self.data)}")
        return self.data

    def parsed(self, good: tuple[int, ...] = (200,), refused: Collection[int] = range(400, 500)) -> Any:
        """Return the answer's JSON, or text. Raises as `good_data` does, and EngineError where it is neither."""
        self.good_data(good, refused)
        if "json" not in self.content_type:
            return self.data.decode(errors="replace")  # some of SGLang's verbs answer with a line of text
        try:
            return json.loads(self.data) if self.data else None
        except ValueError as error:
            raise EngineError(f"{self.who}: the answer is not JSON: {self.data[:200]!r}") from error


class Places(asyncio.Semaphore):
    """Lets so many generate calls be under way. One that finds no place waits, in order, which is told once.

    `why`: what binds, and what to do."""

    def __init__(self, count: int, why: str) -> None:
        self.count, self.why = count, why
        self._has_told = False
        super().__init__(count)

    async def acquire(self) -> Any:
        if self.locked() and not self._has_told:
            self._has_told = True
            logger.warning("generate calls wait for a connection: %s", self.why)
        return await super().acquire()


def ports() -> Places:
    """Return places for connections to one server of this machine, each of which has a port of its own."""
    count = local_ports() - min(_OTHER_FILES, local_ports() // 4)
    why = f"sglang-router is asked sample by sample, for which this machine has {count} ports; widen"
    why += " net.ipv4.ip_local_port_range, or remove rollout.router: the run spreads requests itself, group by group."
    return Places(count, why)


class Connections(Places):
    """The connections that generate calls may have at once, in this process or in each of its drivers; the rest of a
    process's files is for everything else."""

    def __init__(self, num_processes: int = 1) -> None:
        self._files = allow_open_files()
        self._num_processes = 0
        super().__init__(0, "")
        self.grow(num_processes)

    def grow(self, num_processes: int) -> None:
        """Let so many more processes take part."""
        self._num_processes += num_processes
        more = num_processes * (self._files - min(_OTHER_FILES, self._files // 4))
        self.count += more
        for _ in range(more):
            self.release()
        self.why = "this process" if self._num_processes == 1 else "each driver"
        self.why += f" may not open more than {self._files} files; raise the hard limit (ulimit -Hn) to {_OTHER_FILES}"
        self.why += " more than the groups wanted in flight there, or rollout.num_drivers."


async def aside(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, which works on an answer of `size` bytes: in one of a few threads where that takes long, so that
    the loop goes on."""
    return await asyncio.to_thread(function, *args, **kwargs) if size > _SMALL_BYTES else function(*args, **kwargs)


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


class Spawned:
    """A coroutine that runs in the loop. Lighter than a `Future`."""

    __slots__ = ("_loop", "_task")

    def __init__(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> None:
        """Start `work`; the loop calls `ended` when it is done."""
        self._loop = _loop(os.getpid())
        self._task: asyncio.Task[Any] | None = None
        self._loop.call_soon_threadsafe(self._begin, work, ended)

    def give_up(self, after_s: float) -> None:
        """Nobody waits for it any more: it is cancelled where it runs after that time, and gives its connection back.
        Any thread may call it."""
        self._loop.call_soon_threadsafe(self._loop.call_later, after_s, self._cancel)

    def _begin(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> None:
        self._task = task = self._loop.create_task(work)
        _tasks.add(task)
        task.add_done_callback(_forget)
        task.add_done_callback(ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


_tasks: set[asyncio.Task[Any]] = set()  # the loop itself would forget them


def _forget(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled():
        task.exception()  # where nobody reads the result, an error is no news either


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of this process, one for all threads; a forked one needs its own."""
    found = _loops.get(process)
    if found is None:
        with _loops_lock:
            if process not in _loops:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
                _loops[process] = loop
            found = _loops[process]
    return found


_connections: dict[asyncio.AbstractEventLoop, Connections] = {}


def connections() -> Connections:
    """Return those of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _connections:
        limit_connections(1)
    return _connections[loop]


def limit_connections(num_processes: int) -> None:
    """So many processes make the calls of the running loop, while none is under way."""
    _connections[asyncio.get_running_loop()] = Connections(num_processes)


class _Connector(aiohttp.TCPConnector):
    """Opens a few connections to a server at a time: of thousands at once none would be open before its deadline."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_IDLE_S, socket_factory=_socket)
        self._opening: defaultdict[Any, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_OPENING))

    async def connect(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        async with self._opening[req.connection_key]:
            return await super().connect(req, traces, timeout)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol = address[:3]
    sock = socket.socket(family, kind, protocol)
    notice_vanished(sock)  # an engine says nothing for minutes as it decodes
    return sock


_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = aiohttp.ClientSession(connector=_Connector(), cookie_jar=aiohttp.DummyCookieJar())
        atexit.register(lambda: asyncio.run_coroutine_threadsafe(_sessions[loop].close(), loop).result(_GRACE_S))
    return _sessions[loop]


def _words(data: bytes) -> str:
    text = data.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:500]
