"""`rollout.router: sglang`: a balancer that leaves the choice of the engine to sglang-router, and the router's client.

The router's workers are at every moment of sending exactly the engines that serve. It does not say which engine it
gave a request to: what fails is asked for again, and the supervisor examines all that serve.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from rlhf_megatron.data import codec
from rlhf_megatron.data.routes import remove_routes
from rlhf_megatron.rollout.engine import (
    UNSYNCED,
    EngineAddress,
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    GeneratedSample,
    GenerateRequest,
    Groups,
)
from rlhf_megatron.rollout.fleet.balancer import Chunk, Load, Sent, samples_in_flight
from rlhf_megatron.rollout.fleet.calls import EngineCalls, sample_names
from rlhf_megatron.rollout.fleet.supervisor import Member
from rlhf_megatron.rollout.fleet.watch import ServerWatch
from rlhf_megatron.rollout.gate import Gate
from rlhf_megatron.rollout.http import HttpClient, ports, run
from rlhf_megatron.rollout.questions import ask
from rlhf_megatron.rollout.router.process import WORKER_STARTUP_S, RouterProcess
from rlhf_megatron.rollout.sglang.client import SGLangQuestion
from rlhf_megatron.rollout.sglang.samples import Limits, generate_body, limits_of, own_prefix

logger = logging.getLogger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"
SAMPLES_IN_FLIGHT = 512  # per engine, at most (a group is never cut)
_ADMIN_S = 10.0
_CHANGE_S = 30.0  # to have its workers changed
_MAX_FAILED_CHANGES = 3  # in a row
_POLL_S = 0.02
_LATE_S = WORKER_STARTUP_S + 5.0  # a worker that it was told to take and then to drop can turn up for so long
_LOOK_AGAIN_S = 1.0


class RouterError(EngineError):
    """The router itself is not there: the engines behind it are not to blame."""


@codec.register
@dataclass(frozen=True)
class RouterQuestion(SGLangQuestion):
    """A question for one sample, through the router."""

    routing_key: str

    refused = (400, 413, 422)  # other 4xx are between the router and its engines

    @property
    def key(self) -> str:
        return self.server.api_key

    @property
    def headers(self) -> Mapping[str, str]:
        return {ROUTING_KEY: self.routing_key}

    def body(self) -> bytes:
        rid = {"rid": self.name} if self.name else {}
        return msgspec.json.encode(single_body(self.requests[0], self.version) | rid)

    def read(self, data: bytes) -> Groups:
        return super().read(b"[%b]" % data)


class RouterClient:
    """`generate_async` through sglang-router, and who its workers are. Thread-safe.

    A sample is a request of its own: the router reads one set of sampling parameters a request, and a group's samples
    need a seed each. A routing key, the same for all of a group, keeps them on one worker.
    """

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self._admin = HttpClient(address)
        self._gate = Gate(ports())
        self._running: set[asyncio.Task[Groups]] = set()  # of the loop
        self._is_closed = False

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = "", *, version: int | None
    ) -> Groups:
        """Generates as `Engine.generate_async` does: all samples or an EngineError. `version`: that the engines
        serve."""
        where = f"router ({self.address.url}/generate)"
        if self._is_closed:
            raise RouterError(f"{where}: the client is closed.")
        task = asyncio.ensure_future(self._groups(requests, timeout_s, version, name))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError as error:
            raise RouterError(f"{where}: given up.") from error
        finally:
            task.cancel()
            self._running.discard(task)

    def workers(self) -> dict[str, str]:
        """URL -> the name that the router has given it. Raises EngineError."""
        return {worker["url"]: worker["id"] for worker in self._admin.get("/workers", _ADMIN_S)["workers"]}

    def add_worker(self, url: str, key: str) -> None:
        """Returns before the router has looked at it: `workers` has it then."""
        self._change("POST", "/workers", json.dumps({"url": url, "api_key": key, "disable_health_check": True}))

    def remove_worker(self, worker_id: str) -> None:
        """Returns before it is gone."""
        self._change("DELETE", f"/workers/{worker_id}", None)

    def abort(self, names: Collection[str]) -> None:
        """End the calls of these names that wait for a connection; without names all of them."""
        self._gate.abort([sample for name in names for sample in sample_names(name)])

    def health(self, timeout_s: float) -> None:
        self._admin.get("/liveness", timeout_s)

    def close(self) -> None:
        """End what is under way. Safe to call twice."""
        self._is_closed = True

        async def end() -> None:
            for task in self._running:
                task.cancel()

        run(end(), _ADMIN_S)

    async def _groups(
        self, requests: Sequence[GenerateRequest], timeout_s: float, version: int | None, name: str
    ) -> Groups:
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
            found = await asyncio.gather(*tasks, return_exceptions=True)
            remove_routes(sample.routes for sample in found if isinstance(sample, GeneratedSample))
            raise
        return [[next(samples) for _ in request.seeds] for request in requests]

    async def _sample(
        self, request: GenerateRequest, key: str, timeout_s: float, version: int | None, name: str
    ) -> GeneratedSample:
        deadline = time.monotonic() + timeout_s
        try:
            async with self._gate.passing(timeout_s, name) as is_running:
                if not is_running:
                    return GeneratedSample((), (), "abort", UNSYNCED if version is None else version)
                left = max(0.0, deadline - time.monotonic())
                how = (version, name, own_prefix(), key)
                return (await ask(RouterQuestion(self.address, (request,), timeout_s, left, *how)))[0][0]
        except TimeoutError as error:
            raise EngineTimeoutError(f"router: no connection within {timeout_s:g} s.") from error
        except EngineUnreachableError as error:
            raise RouterError(str(error)) from error

    def _change(self, method: str, path: str, body: str | None) -> None:
        """Changes the router's workers; it answers before it has done so."""
        run(self._admin.send(method, path, body, _ADMIN_S), _ADMIN_S).parsed(good=(200, 202), refused=())


def single_body(request: GenerateRequest, version: int | None) -> dict[str, Any]:
    """Returns the body of a request for one sample: the router takes no lists of sampling parameters."""
    body = generate_body([request], version)
    lists = [name for name in ("input_ids", "sampling_params", "logprob_start_len") if name in body]
    return body | {name: body[name][0] for name in lists}


class SGLangRouter:
    """A `Balancer` that owns the router's process, and starts it again when it ends or hangs."""

    def __init__(
        self, process: RouterProcess, max_restarts: int, health_interval_s: float = 10.0, health_timeout_s: float = 30.0
    ) -> None:
        """Starts it. Raises EngineError."""
        self.process = process
        self.num_restarts = 0
        self._max_restarts = max_restarts
        self._health = (health_interval_s, health_timeout_s)
        self._calls = EngineCalls()
        self._client: RouterClient | None = None
        self._watch: ServerWatch | None = None
        self._workers: dict[str, str] = {}  # URL -> key, of what it has; empty while that is not sure
        self._keys: dict[str, str] = {}  # that it was given
        self._wanted: dict[str, str] = {}
        self._limits: Limits | None = None  # of the engines, which are all alike
        self._change: Future[None] | None = None  # of its workers, or its restart
        self._num_failed_changes = 0
        self._looked = 0.0  # at its workers
        self._late_until = 0.0
        self._ill = ""
        self._is_closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        """A piece a group: each may go to another engine."""
        return [Chunk(index, requests[index : index + 1]) for index in range(len(requests))]

    def place(self, chunk: Chunk, serving: Sequence[Member], load: Load, version: int | None) -> Sent | None:
        if self._change is not None:
            if not self._change.done():
                self._wanted = _wanted(serving)
                return None
            self._conclude(self._change)
        if self.process.ending() is not None:
            self._restart()
            return None
        self._wanted = _wanted(serving)
        now = time.monotonic()
        if self._wanted != self._workers or (now < self._late_until and now > self._looked + _LOOK_AGAIN_S):
            self._workers = {}
            self._change = self._calls.start("router", "workers", partial(self._bring, self._wanted))
            return None
        assert self._client is not None and self._limits is not None
        self._limits.check(chunk.requests, "router")
        num_running = load.samples(None, chunk.is_open)
        most = sum(map(samples_in_flight, serving)) if chunk.is_open else SAMPLES_IN_FLIGHT * len(serving)
        if num_running and num_running + chunk.num_samples > most:
            return None
        return Sent(chunk, "router", partial(self._client.generate_async, version=version), None, None)

    def abort(self, names: Collection[str]) -> None:
        if self._client is not None:
            self._client.abort(names)

    def blames_itself(self, error: EngineError) -> bool:
        return isinstance(error, RouterError)

    def close(self) -> None:
        self._is_closed = True
        if self._watch is not None:
            self._watch.stop()
        if self._client is not None:
            self._client.close()
        self.process.stop()

    def _start(self) -> None:
        address = self.process.start()
        if self._is_closed:
            self.process.stop()
            raise EngineError("the router is not started again: the run ends.")
        if self._client is not None:
            self._client.close()
        self._client = client = RouterClient(address)
        self._workers, self._keys = {}, {}
        self._ill = ""
        self._watch = ServerWatch("router", client.health, self.process.ending, self._found_ill, *self._health)

    def _found_ill(self, watch: ServerWatch, words: str) -> None:
        """Kills the router at once, in the watch's thread, so that no request waits for it."""
        if watch is self._watch:
            self._ill = words
            self.process.kill()

    def _restart(self) -> None:
        words = self._ill or self.process.ending() or ""
        if self.num_restarts >= self._max_restarts:
            raise EngineError(
                f"sglang-router ended again, rollout.max_engine_restarts ({self._max_restarts}) is used up: {words};"
                " see its log, or remove rollout.router: the run spreads requests itself."
            )
        self.num_restarts += 1
        logger.warning("the router is started again (%d of %d): %s", self.num_restarts, self._max_restarts, words)
        if self._watch is not None:
            self._watch.stop()
        self._change = self._calls.start("router", "restart", self._start)

    def _conclude(self, change: Future[None]) -> None:
        self._change = None
        try:
            change.result(timeout=0)
            self._num_failed_changes = 0
        except EngineError as error:
            self._num_failed_changes += 1
            logger.warning("the router's workers could not be changed: %s", error)
            if self._num_failed_changes >= _MAX_FAILED_CHANGES and self.process.ending() is None:
                raise

    def _bring(self, wanted: Mapping[str, str]) -> None:
        """Give the router these workers. It stops where others are wanted meanwhile."""
        client = self._client
        assert client is not None
        deadline = time.monotonic() + _CHANGE_S
        found = client.workers()
        dropped = {url for url in found if url not in wanted or self._keys.get(url) != wanted[url]}
        for url in dropped:
            client.remove_worker(found[url])
        while dropped & client.workers().keys():
            self._check(deadline, f"has not dropped {', '.join(sorted(dropped))}")
        for url in wanted.keys() - (found.keys() - dropped):
            self._keys[url] = wanted[url]
            client.add_worker(url, wanted[url])
            self._late_until = time.monotonic() + _LATE_S
        while (missing := wanted.keys() - client.workers().keys()) and self._wanted == wanted:
            self._check(deadline, f"has not taken {', '.join(sorted(missing))}")
        if not missing:
            if self._limits is None:  # one of them is asked itself
                url, key = next(iter(wanted.items()))
                http = HttpClient(EngineAddress("a worker of the router", "sglang", url, key))
                self._limits = limits_of(http, _CHANGE_S)
            self._looked = time.monotonic()
            self._workers = dict(wanted)

    def _check(self, deadline: float, problem: str) -> None:
        if time.monotonic() > deadline:
            raise EngineError(f"the router {problem} within {_CHANGE_S:g} s.")
        time.sleep(_POLL_S)


def _wanted(serving: Sequence[Member]) -> dict[str, str]:
    addresses = [member.engine.address for member in serving]
    return {address.url: address.api_key or address.token for address in addresses}
