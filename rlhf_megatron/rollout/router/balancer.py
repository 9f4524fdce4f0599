"""`rollout.router: sglang`: a balancer that leaves the choice of the engine to sglang-router.

Its workers are at every moment of sending exactly the engines that serve. It does not say which engine it gave a
request to: what fails is asked for again, and the supervisor examines all that serve.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from rlhf_megatron.rollout.engine import EngineAddress, EngineError, GenerateRequest
from rlhf_megatron.rollout.fleet.balancer import Chunk, Load, Sent, samples_in_flight
from rlhf_megatron.rollout.fleet.calls import EngineCalls
from rlhf_megatron.rollout.fleet.supervisor import HealthWatch, Member
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.router.client import RouterClient, RouterError
from rlhf_megatron.rollout.router.process import WORKER_STARTUP_S, RouterProcess
from rlhf_megatron.rollout.sglang.samples import Limits, limits_of

logger = logging.getLogger(__name__)

SAMPLES_IN_FLIGHT = 512  # per engine, at most (a group is never cut)
_CHANGE_S = 30.0  # to have its workers changed
_MAX_FAILED_CHANGES = 3  # in a row
_POLL_S = 0.02
_LATE_S = WORKER_STARTUP_S + 5.0  # a worker that it was told to take and then to drop can turn up for so long
_LOOK_AGAIN_S = 1.0


class SGLangRouter:
    """See `balancer.Balancer`. Owns the router's process, which is started again when it ends or hangs."""

    def __init__(
        self,
        process: RouterProcess,
        max_restarts: int,
        health_interval_s: float = 10.0,
        health_timeout_s: float = 30.0,
    ) -> None:
        """Starts it. Raises EngineError."""
        self.process = process
        self.num_restarts = 0
        self._max_restarts = max_restarts
        self._health = (health_interval_s, health_timeout_s)
        self._calls = EngineCalls()
        self._client: RouterClient | None = None
        self._watch: HealthWatch | None = None
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
        most = min(most, self._client.max_connections // 2)  # half of them for each kind of work
        if num_running and num_running + chunk.num_samples > most:
            return None
        return Sent(chunk, "router", partial(self._client.generate, version=version), None, None)

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
        self._watch = HealthWatch("router", client.health, self.process.ending, self._found_ill, *self._health)

    def _found_ill(self, watch: HealthWatch, words: str) -> None:
        """In the watch's thread. It is killed at once, so that no request waits for it."""
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
        """Its workers are these then. Given up where others are wanted meanwhile."""
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
            self._limits = self._limits or _limits_of(*next(iter(wanted.items())))
            self._looked = time.monotonic()
            self._workers = dict(wanted)

    def _check(self, deadline: float, problem: str) -> None:
        if time.monotonic() > deadline:
            raise EngineError(f"the router {problem} within {_CHANGE_S:g} s.")
        time.sleep(_POLL_S)


def _limits_of(url: str, key: str) -> Limits:
    """The engine is asked itself. Raises EngineError."""
    client = HttpClient(EngineAddress("a worker of the router", "sglang", url, key))
    try:
        return limits_of(client, _CHANGE_S)
    finally:
        client.close()


def _wanted(serving: Sequence[Member]) -> dict[str, str]:
    addresses = [member.engine.address for member in serving]
    return {address.url: address.api_key or address.token for address in addresses}
