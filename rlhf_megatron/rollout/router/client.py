"""`generate` through sglang-router, and who its workers are.

A sample is a request of its own: the router reads one set of sampling parameters a request, and a group's samples need
a seed each. What keeps them on one worker is a routing key, the same for all of a group.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

import aiohttp

from rlhf_megatron.rollout.engine import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
    GeneratedSample,
    GenerateRequest,
)
from rlhf_megatron.rollout.fleet.calls import sample_names
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.samples import generate_body, groups_of

ROUTING_KEY = "X-SMG-Routing-Key"
_REFUSED = (400, 413, 422)  # the request itself; other 4xx are between the router and its engines
_ADMIN_S = 10.0
_GRACE_S = 5.0
_WORDS_SHOWN = 500


class RouterError(EngineError):
    """The router itself is not there: the engines behind it are not to blame."""


class RouterClient:
    """Thread-safe. Connections live in a thread of their own."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._http = HttpClient(address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router-client", daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(_GRACE_S)

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = "", *, version: int | None
    ) -> list[list[GeneratedSample]]:
        """As `Engine.generate`: all samples or an EngineError. `version`: of the weights that the engines serve."""
        where = f"router ({self.address.url}/generate)"
        try:
            future = asyncio.run_coroutine_threadsafe(self._groups(requests, timeout_s, version, name), self._loop)
        except RuntimeError as error:
            raise RouterError(f"{where}: the client is closed.") from error
        try:
            return future.result(timeout_s + _GRACE_S)
        except FutureTimeoutError:
            future.cancel()
            raise EngineTimeoutError(f"{where}: no answer within {timeout_s:g} s.") from None
        except CancelledError as error:
            raise RouterError(f"{where}: given up.") from error

    def workers(self) -> dict[str, str]:
        """URL -> the name that the router has given it. Raises EngineError."""
        return {worker["url"]: worker["id"] for worker in self._http.get("/workers", _ADMIN_S)["workers"]}

    def add_worker(self, url: str, key: str) -> None:
        """Returns before the router has looked at it: `workers` has it then."""
        self._post("POST", "/workers", {"url": url, "api_key": key, "disable_health_check": True})

    def remove_worker(self, worker_id: str) -> None:
        """Returns before it is gone."""
        self._post("DELETE", f"/workers/{worker_id}", None)

    def health(self, timeout_s: float) -> None:
        self._http.get("/liveness", timeout_s)

    def close(self) -> None:
        """Ends what is under way. Safe to call twice."""
        self._http.close()
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_GRACE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GRACE_S)
            self._loop.close()

    async def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)  # `max_connections` is kept by who sends
        return aiohttp.ClientSession(connector=connector)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _groups(
        self, requests: Sequence[GenerateRequest], timeout_s: float, version: int | None, name: str
    ) -> list[list[GeneratedSample]]:
        """All samples at once. When one fails the others are given up: the group is asked for again as a whole."""
        tasks = []
        names = iter(sample_names(name) if name else [])
        for request in requests:
            key = uuid.uuid4().hex  # a group that is asked for again may go elsewhere
            for seed in request.seeds:
                one = replace(request, seeds=(seed,))
                tasks.append(asyncio.ensure_future(self._sample(one, key, timeout_s, version, next(names, ""))))
        try:
            samples = iter(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [[next(samples) for _ in request.seeds] for request in requests]

    async def _sample(
        self, request: GenerateRequest, key: str, timeout_s: float, version: int | None, name: str
    ) -> GeneratedSample:
        body = single_body(request, version) | ({"rid": name} if name else {})
        headers = {ROUTING_KEY: key, **_bearer(self.address.api_key)}
        status, data = await self._send("POST", "/generate", body, headers, timeout_s)
        where = f"router ({self.address.url}/generate)"
        if status != 200:
            kind = EngineRequestError if status in _REFUSED else EngineError
            raise kind(f"{where} answered {status}: {data[:_WORDS_SHOWN]}")
        try:
            return groups_of([json.loads(data)], [request])[0][0]
        except ValueError as error:
            raise EngineError(f"{where}: {error}") from error

    def _post(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        """A verb that the router answers with 202."""
        send = self._send(method, path, body, _bearer(self.address.token), _ADMIN_S)
        status, data = asyncio.run_coroutine_threadsafe(send, self._loop).result(_ADMIN_S + _GRACE_S)
        if status not in (200, 202):
            raise EngineError(f"router ({self.address.url}{path}) answered {status}: {data[:_WORDS_SHOWN]}")

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str]:
        """Status and text. Raises RouterError where the router is not there, EngineTimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        where = f"router ({self.address.url}{path})"
        try:
            async with self._session.request(
                method, self.address.url + path, json=body, headers=headers, timeout=timeout
            ) as response:
                return response.status, (await response.read()).decode(errors="replace")
        except TimeoutError as error:
            raise EngineTimeoutError(f"{where}: no answer within {timeout_s:g} s.") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session was closed
            raise RouterError(f"{where}: {error or type(error).__name__}.") from error


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def single_body(request: GenerateRequest, version: int | None) -> dict[str, Any]:
    """Of a request for one sample: the router takes no lists of sampling parameters."""
    body = generate_body([request], version)
    (prompt,), (sampling,) = body["input_ids"], body["sampling_params"]
    return {**body, "input_ids": prompt, "sampling_params": sampling}
