"""`rollout.router: sglang`: a balancer that leaves the choice of the engine to sglang-router, and
the router's client.

The router's workers are at every moment of sending exactly the engines that serve. It does not say
which engine it gave a request to: what fails is asked for again, and the supervisor examines
all that serve.
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
from rlhf_megatron.data.expert_route_files import remove_route_files
from rlhf_megatron.rollout.engine_interface import (
    UNSYNCED,
    EngineAddress,
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    GeneratedSample,
    GenerateRequest,
    SampleGroups,
)
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog, list_sample_names
from rlhf_megatron.rollout.fleet.engine_supervisor import FleetMember
from rlhf_megatron.rollout.fleet.request_balancer import (
    ChunkAssignment,
    OutstandingLoad,
    RequestChunk,
    compute_session_sample_limit,
)
from rlhf_megatron.rollout.fleet.server_watch import RestartBudget, ServerWatch
from rlhf_megatron.rollout.generate_gate import GenerateGate
from rlhf_megatron.rollout.generation_queries import send_query
from rlhf_megatron.rollout.http_client import HttpClient, make_port_slots, run_in_event_loop
from rlhf_megatron.rollout.router.router_process import WORKER_STARTUP_S, RouterProcess
from rlhf_megatron.rollout.sglang.sglang_client import SGLangGenerationQuery
from rlhf_megatron.rollout.sglang.sglang_samples import (
    ServerLimits,
    fetch_limits_blocking,
    get_version_prefix,
    make_generate_body,
)

logger = logging.getLogger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"
SAMPLES_IN_FLIGHT = 512  # per engine, at most (a group is never cut)
_ADMIN_TIMEOUT_S = 10.0
_CHANGE_TIMEOUT_S = 30.0  # to have its workers changed
_MAX_FAILED_CHANGES = 3  # in a row
_POLL_S = 0.02
# a worker that it was told to take and then to drop can turn up for so long
_LATE_WORKER_S = WORKER_STARTUP_S + 5.0
_WORKER_CHECK_INTERVAL_S = 1.0


class RouterError(EngineError):
    """The router itself is not there: the engines behind it are not to blame."""


@codec.register("RouterQuestion", {"remaining_s": "left_s", "version_prefix": "prefix"})
@dataclass(frozen=True)
class RouterGenerationQuery(SGLangGenerationQuery):
    """The generate call of one sample, through the router."""

    routing_key: str

    refused_statuses = (400, 413, 422)  # other 4xx are between the router and its engines

    @property
    def bearer_key(self) -> str:
        """Return the router's API key."""
        return self.server.api_key

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the routing key as a header, by which the router picks the worker."""
        return {ROUTING_KEY: self.routing_key}

    def encode_body(self) -> bytes:
        """Return the JSON body for one sample, with the call's name as request id."""
        rid = {"rid": self.name} if self.name else {}
        return msgspec.json.encode(make_single_sample_body(self.requests[0], self.version) | rid)

    def decode_answer(self, data: bytes) -> SampleGroups:
        """Return the one sample of the answer, as a list of one group."""
        return super().decode_answer(b"[%b]" % data)


class RouterClient:
    """Generates through sglang-router, and changes its workers. Thread-safe.

    Each sample is an HTTP request of its own: the router reads one set of sampling parameters from
    a request, and each sample of a group needs its own seed. A routing key, the same for all
    samples of a group, keeps them on one worker.
    """

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self._admin_http = HttpClient(address)
        self._generate_gate = GenerateGate(make_port_slots())
        self._running_tasks: set[asyncio.Task[SampleGroups]] = set()  # of the loop
        self._is_closed = False

    async def generate_async(
        self,
        requests: Sequence[GenerateRequest],
        timeout_s: float,
        name: str = "",
        *,
        version: int | None,
    ) -> SampleGroups:
        """Generate as `InferenceEngine.generate_async` does: return all samples or raise
        EngineError. `version` is the version that the engines serve.
        """
        where = f"router ({self.address.url}/generate)"
        if self._is_closed:
            raise RouterError(f"{where}: the client is closed.")
        task = asyncio.ensure_future(self._generate_groups(requests, timeout_s, version, name))
        self._running_tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError as error:
            raise RouterError(f"{where}: given up.") from error
        finally:
            task.cancel()
            self._running_tasks.discard(task)

    def list_workers(self) -> dict[str, str]:
        """Return the router's id of each worker by the worker's URL. Raise EngineError."""
        return {
            worker["url"]: worker["id"]
            for worker in self._admin_http.get("/workers", _ADMIN_TIMEOUT_S)["workers"]
        }

    def add_worker(self, url: str, worker_key: str) -> None:
        """Tell the router to add the engine at `url` as a worker. Return before it has:
        `list_workers` shows the worker then.
        """
        self._change_workers(
            "POST",
            "/workers",
            json.dumps({"url": url, "api_key": worker_key, "disable_health_check": True}),
        )

    def remove_worker(self, worker_id: str) -> None:
        """Tell the router to remove the worker with this id. Return before it has."""
        self._change_workers("DELETE", f"/workers/{worker_id}", None)

    def abort_waiting_calls(self, call_names: Collection[str]) -> None:
        """Abort the samples of the calls with these names that wait for a connection, or all
        waiting ones where `call_names` is empty.
        """
        self._generate_gate.abort_waiting_calls(
            [sample for name in call_names for sample in list_sample_names(name)]
        )

    def check_health(self, timeout_s: float) -> None:
        """Raise EngineError unless the router answers within `timeout_s`."""
        self._admin_http.get("/liveness", timeout_s)

    def close(self) -> None:
        """Cancel all calls under way; later calls raise RouterError. Safe to call twice."""
        self._is_closed = True

        async def cancel_running_tasks() -> None:
            """Cancel the tasks, in their loop."""
            for task in self._running_tasks:
                task.cancel()

        run_in_event_loop(cancel_running_tasks(), _ADMIN_TIMEOUT_S)

    async def _generate_groups(
        self,
        requests: Sequence[GenerateRequest],
        timeout_s: float,
        version: int | None,
        call_name: str,
    ) -> SampleGroups:
        """Generate all samples at once, one request for each. When one fails, cancel the others,
        remove their route files and raise the error: the fleet generates the group again as a
        whole.
        """
        tasks = []
        names = iter(list_sample_names(call_name) if call_name else [])
        for request in requests:
            key = uuid.uuid4().hex  # a group that is asked for again may go elsewhere
            for seed in request.seeds:
                one = replace(request, seeds=(seed,))
                tasks.append(
                    asyncio.ensure_future(
                        self._generate_sample(one, key, timeout_s, version, next(names, ""))
                    )
                )
        try:
            samples = iter(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            remove_route_files(
                sample.routes for sample in found if isinstance(sample, GeneratedSample)
            )
            raise
        return [[next(samples) for _ in request.seeds] for request in requests]

    async def _generate_sample(
        self,
        request: GenerateRequest,
        routing_key: str,
        timeout_s: float,
        version: int | None,
        sample_name: str,
    ) -> GeneratedSample:
        """Generate one sample through the router; it is empty with reason "abort" where the call
        was aborted before it was sent. Raise RouterError where the router cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        try:
            async with self._generate_gate.admit_call(timeout_s, sample_name) as is_running:
                if not is_running:
                    return GeneratedSample(
                        (), (), "abort", UNSYNCED if version is None else version
                    )
                query = RouterGenerationQuery(
                    self.address,
                    (request,),
                    timeout_s,
                    remaining_s=max(0.0, deadline - time.monotonic()),
                    version=version,
                    name=sample_name,
                    version_prefix=get_version_prefix(),
                    routing_key=routing_key,
                )
                return (await send_query(query))[0][0]
        except TimeoutError as error:
            raise EngineTimeoutError(f"router: no connection within {timeout_s:g} s.") from error
        except EngineUnreachableError as error:
            raise RouterError(str(error)) from error

    def _change_workers(self, method: str, path: str, body: str | None) -> None:
        """Send a change of the workers to the router, which answers before it has made the
        change.
        """
        run_in_event_loop(
            self._admin_http.send(method, path, body, _ADMIN_TIMEOUT_S), _ADMIN_TIMEOUT_S
        ).parse_body(accepted_statuses=(200, 202), refused_statuses=())


def make_single_sample_body(request: GenerateRequest, version: int | None) -> dict[str, Any]:
    """Return the JSON body of a request for one sample: the router takes no lists of sampling
    parameters.
    """
    body = make_generate_body([request], version)
    lists = [name for name in ("input_ids", "sampling_params", "logprob_start_len") if name in body]
    return body | {name: body[name][0] for name in lists}


class SGLangRouterBalancer:
    """A `RequestBalancer` that leaves the choice of the engine to sglang-router. It owns the
    router's process, and starts it again when it ends or hangs.
    """

    def __init__(
        self,
        router_process: RouterProcess,
        max_restarts: int,
        health_interval_s: float = 10.0,
        health_timeout_s: float = 30.0,
    ) -> None:
        """Start the router. Raise EngineError."""
        self.router_process = router_process
        self.restart_budget = RestartBudget(max_restarts)
        self._max_restarts = max_restarts
        self._health_limits = (health_interval_s, health_timeout_s)
        self._call_log = EngineCallLog()
        self._router_client: RouterClient | None = None
        self._server_watch: ServerWatch | None = None
        # URL -> key, of what it has; empty while that is not sure
        self._confirmed_workers: dict[str, str] = {}
        self._worker_keys: dict[str, str] = {}  # that it was given
        self._target_workers: dict[str, str] = {}
        self._engine_limits: ServerLimits | None = None  # of the engines, which are all alike
        self._pending_change: Future[None] | None = None  # of its workers, or its restart
        self._num_failed_changes = 0
        self._workers_checked_at = 0.0  # at its workers
        self._late_until = 0.0
        self._illness = ""
        self._is_closed = False
        try:
            self._start_router()
        except BaseException:
            self.close()
            raise

    def cut_chunks(
        self, requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool
    ) -> list[RequestChunk]:
        """Make a chunk of each request: each group may go to another engine."""
        return [RequestChunk(index, requests[index : index + 1]) for index in range(len(requests))]

    def place_chunk(
        self,
        chunk: RequestChunk,
        serving_members: Sequence[FleetMember],
        load: OutstandingLoad,
        version: int | None,
    ) -> ChunkAssignment | None:
        """Assign the chunk to the router. Return None while the router's workers are being changed
        to the serving engines, while it restarts, and while as many samples as allowed are on their
        way. Raise EngineError where the router cannot be had, or the request is above the engines'
        limits.
        """
        if self._pending_change is not None:
            if not self._pending_change.done():
                self._target_workers = _collect_worker_keys(serving_members)
                return None
            self._finish_change(self._pending_change)
        if self.router_process.describe_exit() is not None:
            self._restart_router()
            return None
        self._target_workers = _collect_worker_keys(serving_members)
        now = time.monotonic()
        if self._target_workers != self._confirmed_workers or (
            now < self._late_until and now > self._workers_checked_at + _WORKER_CHECK_INTERVAL_S
        ):
            self._confirmed_workers = {}
            self._pending_change = self._call_log.start_in_thread(
                "router", "workers", partial(self._update_workers, self._target_workers)
            )
            return None
        assert self._router_client is not None and self._engine_limits is not None
        self._engine_limits.check_requests(chunk.requests, "router")
        num_running = load.count_samples(None, chunk.is_session)
        most = (
            sum(map(compute_session_sample_limit, serving_members))
            if chunk.is_session
            else SAMPLES_IN_FLIGHT * len(serving_members)
        )
        if num_running and num_running + chunk.num_samples > most:
            return None
        return ChunkAssignment(
            chunk,
            "router",
            partial(self._router_client.generate_async, version=version),
            None,
            None,
        )

    def abort_waiting_calls(self, call_names: Collection[str]) -> None:
        """Abort the calls with these names that wait for a connection to the router, or all waiting
        ones.
        """
        if self._router_client is not None:
            self._router_client.abort_waiting_calls(call_names)

    def is_balancer_failure(self, error: EngineError) -> bool:
        """Return whether the error is the router's own, so that no engine is to blame."""
        return isinstance(error, RouterError)

    def close(self) -> None:
        """Stop the watch, the calls under way and the router."""
        self._is_closed = True
        if self._server_watch is not None:
            self._server_watch.stop_watching()
        if self._router_client is not None:
            self._router_client.close()
        self.router_process.stop_router()

    def _start_router(self) -> None:
        """Start the router, and make a new client and watch for it. Raise EngineError where it does
        not start or the balancer is closed.
        """
        address = self.router_process.start_router()
        if self._is_closed:
            self.router_process.stop_router()
            raise EngineError("the router is not started again: the run ends.")
        if self._router_client is not None:
            self._router_client.close()
        self._router_client = client = RouterClient(address)
        self._confirmed_workers = {}
        self._worker_keys = {}
        self._illness = ""
        self._server_watch = ServerWatch(
            "router",
            client.check_health,
            self.router_process.describe_exit,
            self._kill_ill_router,
            *self._health_limits,
        )

    def _kill_ill_router(self, watch: ServerWatch, reason: str) -> None:
        """Kill the router at once, in the watch's thread, so that no request waits for it."""
        if watch is self._server_watch:
            self._illness = reason
            self.router_process.kill_router()

    def _restart_router(self) -> None:
        """Begin to restart the router in a thread. Raise EngineError where
        rollout.max_engine_restarts is used up.
        """
        words = self._illness or self.router_process.describe_exit() or ""
        if not self.restart_budget.take_restart():
            raise EngineError(
                f"sglang-router ended again, rollout.max_engine_restarts ({self._max_restarts}) is"
                f" used up: {words}; see its log, or remove rollout.router: the run spreads"
                " requests itself."
            )
        logger.warning(
            "the router is started again (%d of %d): %s",
            self.restart_budget.num_restarts,
            self._max_restarts,
            words,
        )
        if self._server_watch is not None:
            self._server_watch.stop_watching()
        self._pending_change = self._call_log.start_in_thread(
            "router", "restart", self._start_router
        )

    def _finish_change(self, change: Future[None]) -> None:
        """Take the result of a change of workers or a restart that ended. Raise its EngineError
        after too many failures in a row of a router that runs; else log it.
        """
        self._pending_change = None
        try:
            change.result(timeout=0)
            self._num_failed_changes = 0
        except EngineError as error:
            self._num_failed_changes += 1
            logger.warning("the router's workers could not be changed: %s", error)
            if (
                self._num_failed_changes >= _MAX_FAILED_CHANGES
                and self.router_process.describe_exit() is None
            ):
                raise

    def _update_workers(self, target_workers: Mapping[str, str]) -> None:
        """Remove and add workers until the router has exactly `target_workers` (key by URL), and
        note them as confirmed; stop early where the target changes meanwhile. Read the engines'
        limits the first time. Raise EngineError where it takes too long.
        """
        client = self._router_client
        assert client is not None
        deadline = time.monotonic() + _CHANGE_TIMEOUT_S
        found = client.list_workers()
        dropped = {
            url
            for url in found
            if url not in target_workers or self._worker_keys.get(url) != target_workers[url]
        }
        for url in dropped:
            client.remove_worker(found[url])
        while dropped & client.list_workers().keys():
            self._sleep_until_deadline(deadline, f"has not dropped {', '.join(sorted(dropped))}")
        for url in target_workers.keys() - (found.keys() - dropped):
            self._worker_keys[url] = target_workers[url]
            client.add_worker(url, target_workers[url])
            self._late_until = time.monotonic() + _LATE_WORKER_S
        while (
            missing := target_workers.keys() - client.list_workers().keys()
        ) and self._target_workers == target_workers:
            self._sleep_until_deadline(deadline, f"has not taken {', '.join(sorted(missing))}")
        if not missing:
            if self._engine_limits is None:  # one of them is asked itself
                url, key = next(iter(target_workers.items()))
                http = HttpClient(EngineAddress("a worker of the router", "sglang", url, key))
                self._engine_limits = fetch_limits_blocking(http, _CHANGE_TIMEOUT_S)
            self._workers_checked_at = time.monotonic()
            self._confirmed_workers = dict(target_workers)

    def _sleep_until_deadline(self, deadline: float, problem: str) -> None:
        """Sleep for a moment. Raise EngineError with the problem after the deadline."""
        if time.monotonic() > deadline:
            raise EngineError(f"the router {problem} within {_CHANGE_TIMEOUT_S:g} s.")
        time.sleep(_POLL_S)


def _collect_worker_keys(serving_members: Sequence[FleetMember]) -> dict[str, str]:
    """Return the key of each serving engine by its URL."""
    addresses = [member.engine.address for member in serving_members]
    return {address.url: address.api_key or address.token for address in addresses}
