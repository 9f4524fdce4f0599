"""JSON over HTTP with a deadline on every call; what goes wrong becomes an `EngineError` that
names the engine.

All clients of a process share one event loop, in a thread of its own, and its connections: calls
may come from any thread, and thousands may be under way (a router is sent one a sample) without
a thread each.
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

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from rlhf_megatron.rollout.socket_limits import (
    count_local_ports,
    enable_dead_peer_detection,
    raise_open_file_limit,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

_CONNECT_TIMEOUT_S = 10.0
_MAX_OPENING_CONNECTIONS = 32  # connections to one server at a time
# SGLang's server drops connections that were idle for 5 s; one that is about to go must not be used
_IDLE_S = 4.0
_GRACE_S = 10.0  # for the loop's thread to say that a deadline has passed
_LARGE_BYTES = 1 << 20  # aiohttp sends such a body in pieces where it comes as a file
# of a process: ranks, logs, the verbs of engines; a quarter where it has few
_RESERVED_FILES = 1024
_INLINE_PARSE_BYTES = 1 << 16  # an answer that is parsed in a millisecond


class HttpClient:
    """Thread-safe."""

    def __init__(self, address: EngineAddress, bearer_key: str | None = None) -> None:
        """Make a client of the server at `address`. `bearer_key` is sent as the bearer token; None
        sends the token of the admin verbs, and "" sends no authorization header.
        """
        self.address = address
        bearer_key = address.token if bearer_key is None else bearer_key
        self._headers: dict[str, str] = {
            hdrs.CONTENT_TYPE: "application/json",
            hdrs.ACCEPT_ENCODING: "identity",
        }
        self._headers |= {hdrs.AUTHORIZATION: f"Bearer {bearer_key}"} if bearer_key else {}

    def get(self, path: str, timeout_s: float) -> Any:
        """Send a GET request from any thread outside the loop and return the parsed answer. Raise
        as `post` does.
        """
        return self._send_and_parse("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send a POST request from any thread outside the loop and return the parsed answer. `body`
        is a string of JSON, or an object for json.dumps.

        Raise EngineTimeoutError after `timeout_s`, EngineRequestError on 4xx, EngineError
        otherwise.
        """
        return self._send_and_parse(
            "POST", path, body if isinstance(body, str) else json.dumps(body), timeout_s
        )

    async def send(
        self,
        method: str,
        path: str,
        body: str | bytes | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        remaining_s: float | None = None,
    ) -> HttpAnswer:
        """Send one request and return the answer, whatever its status. Await it in the loop of
        `run_in_event_loop`. Raise EngineTimeoutError or EngineUnreachableError where no answer
        comes.

        `remaining_s` is the part of `timeout_s` that is left where the call has waited before;
        `timeout_s` is then only named in messages.
        """
        url = sys.intern(self.address.url + path)  # of thousands of calls that wait
        who = sys.intern(f"{self.address.name} ({url})")
        # 0 would be no limit
        remaining_s = max(timeout_s if remaining_s is None else remaining_s, 1e-3)
        limits = aiohttp.ClientTimeout(
            remaining_s,
            sock_connect=min(_CONNECT_TIMEOUT_S, remaining_s),
            ceil_threshold=float("inf"),
        )
        data = body.encode() if isinstance(body, str) else body
        try:
            async with _get_client_session().request(
                method,
                url,
                data=io.BytesIO(data) if data is not None and len(data) > _LARGE_BYTES else data,
                headers=self._headers | dict(headers) if headers else self._headers,
                timeout=limits,
                allow_redirects=False,
            ) as response:
                content_type = response.headers.get("Content-Type", "")
                return HttpAnswer(who, response.status, content_type, await response.read())
        except TimeoutError as error:
            raise EngineTimeoutError(f"{who}: no answer within {timeout_s:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            reason = os.strerror(number) if number and number > 0 else str(error.os_error)
            raise EngineUnreachableError(f"{who}: no connection ({reason}).") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(f"{who}: {error or type(error).__name__}.") from error

    def _send_and_parse(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        """Send a request in the event loop, wait for the answer, and return it parsed. Raise
        EngineTimeoutError also where the loop itself stood still.
        """
        try:
            return run_in_event_loop(
                self.send(method, path, body, timeout_s), timeout_s
            ).parse_body()
        except TimeoutError as error:  # the loop did not say so itself: this process stood still
            words = (
                f"{self.address.name} ({self.address.url}{path}): no answer within {timeout_s:g} s."
            )
            raise EngineTimeoutError(words) from error


@dataclass(frozen=True)
class HttpAnswer:
    """A server's answer, which came in time."""

    server_label: str  # engine and address, for messages
    status: int
    content_type: str
    data: bytes

    def require_data(
        self,
        accepted_statuses: tuple[int, ...] = (200,),
        refused_statuses: Collection[int] = range(400, 500),
    ) -> bytes:
        """Return the bytes of the answer. Raise EngineRequestError where the status is in
        `refused_statuses`, and EngineError for any other status outside `accepted_statuses`.
        """
        if self.status not in accepted_statuses:
            kind = EngineRequestError if self.status in refused_statuses else EngineError
            raise kind(
                f"{self.server_label} answered {self.status}: {_extract_error_message(self.data)}"
            )
        return self.data

    def parse_body(
        self,
        accepted_statuses: tuple[int, ...] = (200,),
        refused_statuses: Collection[int] = range(400, 500),
    ) -> Any:
        """Return the answer's JSON parsed (None where it is empty), or its text where the content
        type is not JSON. Raise as `require_data` does, and EngineError for broken JSON.
        """
        self.require_data(accepted_statuses, refused_statuses)
        if "json" not in self.content_type:
            # some of SGLang's verbs answer with a line of text
            return self.data.decode(errors="replace")
        try:
            return json.loads(self.data) if self.data else None
        except ValueError as error:
            raise EngineError(
                f"{self.server_label}: the answer is not JSON: {self.data[:200]!r}"
            ) from error


class ConnectionSlots(asyncio.Semaphore):
    """A semaphore that limits how many generate calls are under way. A call without a free slot
    waits its turn, and the first wait is logged as a warning.

    `limit_reason` says what the limit comes from and how to raise it.
    """

    def __init__(self, num_slots: int, limit_reason: str) -> None:
        self.num_slots = num_slots
        self.limit_reason = limit_reason
        self._has_logged_wait = False
        super().__init__(num_slots)

    async def acquire(self) -> Any:
        """Take a slot, waiting for a free one; log a warning the first time that there is none."""
        if self.locked() and not self._has_logged_wait:
            self._has_logged_wait = True
            logger.warning("generate calls wait for a connection: %s", self.limit_reason)
        return await super().acquire()


def make_port_slots() -> ConnectionSlots:
    """Return slots for the connections to one server of this machine, as many as there are local
    ports for them.
    """
    count = count_local_ports() - min(_RESERVED_FILES, count_local_ports() // 4)
    why = (
        f"sglang-router is asked sample by sample, for which this machine has {count} ports; widen"
    )
    why += (
        " net.ipv4.ip_local_port_range, or remove rollout.router: the run spreads requests itself,"
        " group by group."
    )
    return ConnectionSlots(count, why)


class ProcessConnectionSlots(ConnectionSlots):
    """The connections that generate calls may have at once, in this process or in each of its
    drivers; the rest of a process's files is for everything else.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self._max_open_files = raise_open_file_limit()
        self._num_processes = 0
        super().__init__(0, "")
        self.add_processes(num_processes)

    def add_processes(self, num_processes: int) -> None:
        """Add the connections of this many more processes to the slots."""
        self._num_processes += num_processes
        more = num_processes * (
            self._max_open_files - min(_RESERVED_FILES, self._max_open_files // 4)
        )
        self.num_slots += more
        for _ in range(more):
            self.release()
        self.limit_reason = "this process" if self._num_processes == 1 else "each driver"
        self.limit_reason += (
            f" may not open more than {self._max_open_files} files; raise the hard limit (ulimit"
            f" -Hn) to {_RESERVED_FILES}"
        )
        self.limit_reason += " more than the groups wanted in flight there, or rollout.num_drivers."


async def run_in_thread_if_large(
    num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `function`, which works on an answer of `num_bytes` bytes, and return its result: in a
    thread of the loop's pool where the answer is large, so that the loop goes on, else directly.
    """
    return (
        await asyncio.to_thread(function, *args, **kwargs)
        if num_bytes > _INLINE_PARSE_BYTES
        else function(*args, **kwargs)
    )


def run_in_event_loop(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run `coroutine` in the clients' event loop, wait for it, and return its result. The coroutine
    must keep the deadline `timeout_s` by itself; TimeoutError is raised some seconds later where it
    does not. An error or an interrupt of this thread cancels the coroutine.
    """
    future = start_in_event_loop(coroutine)
    try:
        return future.result(timeout_s + _GRACE_S)
    except BaseException:
        future.cancel()
        raise


def start_in_event_loop(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start `coroutine` in the clients' event loop and return its future without waiting."""
    return asyncio.run_coroutine_threadsafe(coroutine, _get_event_loop(os.getpid()))


class EventLoopTask:
    """A coroutine that runs in the clients' event loop. It is lighter than a `Future`."""

    __slots__ = ("_event_loop", "_task")

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], on_done: Callable[[asyncio.Task[T]], None]
    ) -> None:
        """Start `coroutine` from any thread; the loop calls `on_done` with the task when it
        ends.
        """
        self._event_loop = _get_event_loop(os.getpid())
        self._task: asyncio.Task[Any] | None = None
        self._event_loop.call_soon_threadsafe(self._create_task, coroutine, on_done)

    def cancel_after(self, delay_s: float) -> None:
        """Cancel the coroutine after `delay_s` where it still runs, so that it gives its connection
        back: for a call whose result nobody awaits. Any thread may call it.
        """
        self._event_loop.call_soon_threadsafe(
            self._event_loop.call_later, delay_s, self._cancel_task
        )

    def _create_task(
        self, coroutine: Coroutine[Any, Any, T], on_done: Callable[[asyncio.Task[T]], None]
    ) -> None:
        """Create the task in the loop, keep a reference to it, and register its callbacks."""
        self._task = task = self._event_loop.create_task(coroutine)
        _running_tasks.add(task)
        task.add_done_callback(_discard_finished_task)
        task.add_done_callback(on_done)

    def _cancel_task(self) -> None:
        """Cancel the task, in the loop; do nothing before it was created."""
        if self._task is not None:
            self._task.cancel()


_running_tasks: set[asyncio.Task[Any]] = set()  # the loop itself would forget them


def _discard_finished_task(task: asyncio.Task[Any]) -> None:
    """Drop the reference to a task that ended, and mark its error as read, so that asyncio does not
    log it.
    """
    _running_tasks.discard(task)
    if not task.cancelled():
        task.exception()  # where nobody reads the result, an error is no news either


_event_loop_by_pid: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def _get_event_loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the clients' event loop of this process, one for all threads; start it, in a daemon
    thread, at the first call. `pid` is this process's id: a forked process needs a loop of its own.
    """
    found = _event_loop_by_pid.get(pid)
    if found is None:
        with _loops_lock:
            if pid not in _event_loop_by_pid:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
                _event_loop_by_pid[pid] = loop
            found = _event_loop_by_pid[pid]
    return found


_slots_by_loop: dict[asyncio.AbstractEventLoop, ProcessConnectionSlots] = {}


def get_connection_slots() -> ProcessConnectionSlots:
    """Return the connection slots of the running loop; make those of one process at the first
    call.
    """
    loop = asyncio.get_running_loop()
    if loop not in _slots_by_loop:
        set_connection_limit(1)
    return _slots_by_loop[loop]


def set_connection_limit(num_processes: int) -> None:
    """Replace the running loop's connection slots by those of this many processes. Call it while no
    generate call is under way.
    """
    _slots_by_loop[asyncio.get_running_loop()] = ProcessConnectionSlots(num_processes)


class _ThrottledConnector(aiohttp.TCPConnector):
    """Opens a few connections to a server at a time: of thousands at once none would be open
    before its deadline.
    """

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_IDLE_S, socket_factory=_create_socket)
        self._opening_semaphores: defaultdict[Any, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_MAX_OPENING_CONNECTIONS)
        )

    async def connect(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        """Open or reuse a connection, with at most a few in the making to one server at a time."""
        async with self._opening_semaphores[req.connection_key]:
            return await super().connect(req, traces, timeout)


def _create_socket(address_info: tuple[Any, ...]) -> socket.socket:
    """Create a socket that notices when the peer's machine vanishes."""
    family, kind, protocol = address_info[:3]
    sock = socket.socket(family, kind, protocol)
    enable_dead_peer_detection(sock)  # an engine says nothing for minutes as it decodes
    return sock


_session_by_loop: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


def _get_client_session() -> aiohttp.ClientSession:
    """Return the HTTP session of the running loop; make it, and close it at the exit of the
    process, at the first call.
    """
    loop = asyncio.get_running_loop()
    if loop not in _session_by_loop:
        _session_by_loop[loop] = aiohttp.ClientSession(
            connector=_ThrottledConnector(), cookie_jar=aiohttp.DummyCookieJar()
        )
        atexit.register(
            lambda: asyncio.run_coroutine_threadsafe(_session_by_loop[loop].close(), loop).result(
                _GRACE_S
            )
        )
    return _session_by_loop[loop]


def _extract_error_message(data: bytes) -> str:
    """Return the message of a JSON error body, or the first 500 characters of any other body."""
    text = data.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:500]
