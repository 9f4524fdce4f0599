"""Rewards behind HTTP, for runs on other machines: POST /score takes one sample, and answers
with its result.

Requests that come while samples are scored are scored together, next: the worker processes
serve all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rlhf_megatron.http_guard import (
    LOOPBACK_NAMES,
    GuardedServer,
    GuardRules,
    Refusal,
    RequestGuard,
    make_plain_error_response,
)
from rlhf_megatron.rewards.scorers.reward_types import RewardResult, RewardSample
from rlhf_megatron.rewards.service.response_reading import ReadingReporter
from rlhf_megatron.rewards.service.reward_scorer import RewardScorer

MAX_BODY_BYTES = 64 << 20  # tests of a program are labels, too
MAX_HELD_BYTES = 2 * MAX_BODY_BYTES
LOOK_S = 0.5  # for a request to end
START_S = 30.0  # in which the server must listen
PATH = "/score"
T = TypeVar("T")


class ScoringEndedError(RuntimeError):
    """The server scores no more samples."""


class RewardHttpServer:
    """An HTTP server that answers from a thread of its own; `score_until_over` scores the samples,
    on the thread that has entered the scorer.
    """

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        """Listen at the address; requests wait until `score_until_over` scores them. Raise
        ValueError for an address that other machines reach without a key, and for one that is in
        use.
        """
        is_loopback = host in LOOPBACK_NAMES
        if api_key is None and not is_loopback:
            raise ValueError(
                f"--host {host} is reached by others: give the key that clients must"
                " send (--api-key-file)."
            )
        self._waiting_samples: list[tuple[RewardSample, Future[RewardResult]]] = []
        self._state_changed = threading.Condition()
        self._has_ended = False
        rules = GuardRules(
            bearer_key=api_key,
            is_loopback=is_loopback,
            max_body_bytes=MAX_BODY_BYTES,
            max_held_bytes=MAX_HELD_BYTES,
            key_hint="key_file of the server in the run's configuration holds it",
            open_paths=(),
        )
        guard = RequestGuard(rules, _make_error_response, _describe_error)
        application = guard.make_application()
        application.add_routes([web.post(PATH, self._handle_score)])
        self._server = GuardedServer(application, guard)
        self._event_loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._event_loop.run_forever, name="reward-http", daemon=True
        ).start()
        try:
            self.server_address = self._run_in_event_loop(self._server.listen(host, port))
        except ValueError:
            self._event_loop.call_soon_threadsafe(self._event_loop.stop)
            raise

    @property
    def url(self) -> str:
        """Return the URL to which clients post samples."""
        host, port = self.server_address
        shown_host = f"[{host}]" if ":" in host else host
        return f"http://{shown_host}:{port}{PATH}"

    def score_until_over(
        self,
        scorer: RewardScorer,
        is_over: Callable[[], bool],
        report_line: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Score the queued samples, in batches on this thread, until `is_over` returns True; then
        fail the samples that wait, and close the server. `report_line` is called with what is to be
        said of the responses that the rewards read, when they first come.
        """
        reporter = ReadingReporter(scorer.components, report_line)
        try:
            while not is_over():
                with self._state_changed:
                    self._state_changed.wait_for(lambda: self._waiting_samples, LOOK_S)
                    batch = self._waiting_samples
                    self._waiting_samples = []
                # a client that went away has cancelled its sample
                wanted = [pair for pair in batch if pair[1].set_running_or_notify_cancel()]
                if wanted:
                    reporter.report_samples([sample for sample, _ in wanted])
                    _score_waiting_batch(scorer, wanted)
        finally:
            with self._state_changed:
                self._has_ended = True
                for _, answer in self._waiting_samples:
                    if answer.set_running_or_notify_cancel():
                        answer.set_exception(ScoringEndedError("the server ends"))
            self._run_in_event_loop(self._server.close())
            self._event_loop.call_soon_threadsafe(self._event_loop.stop)

    def queue_sample(self, sample: RewardSample) -> Future[RewardResult]:
        """Queue a sample and return the future of its result. Raise ScoringEndedError where the
        server ends.
        """
        result: Future[RewardResult] = Future()
        with self._state_changed:
            if self._has_ended:
                raise ScoringEndedError("the server ends")
            self._waiting_samples.append((sample, result))
            self._state_changed.notify()
        return result

    async def _handle_score(self, request: web.Request) -> web.Response:
        """Score the sample in the body and answer with its result."""
        body = await request.read()
        try:
            sample = msgspec.json.decode(body, type=RewardSample)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the body is no sample: {error}") from None
        try:
            result = await asyncio.wrap_future(self.queue_sample(sample))
        except ValueError as error:  # the processes of the rewards are gone for good
            raise ScoringEndedError(str(error)) from error
        return web.json_response(asdict(result))

    def _run_in_event_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._event_loop).result(START_S)


def _describe_error(error: Exception) -> Refusal | None:
    """Return the answer to an error of the scorer; None for others."""
    return Refusal(503, str(error)) if isinstance(error, ScoringEndedError) else None


def _make_error_response(status: int, message: str, code: str | None) -> web.Response:
    """Return a JSON error response, with the right path for a wrong one."""
    return make_plain_error_response(status, f"the path is {PATH}" if status == 404 else message)


def _score_waiting_batch(
    scorer: RewardScorer, batch: list[tuple[RewardSample, Future[RewardResult]]]
) -> None:
    """Score the samples together and set their futures. Set and raise the ValueError of a scorer
    whose processes are gone.
    """
    try:
        results = scorer.score_without_limit([sample for sample, _ in batch])
    except ValueError as error:  # the processes of the rewards are gone for good
        for _, answer in batch:
            answer.set_exception(error)
        raise
    for (_, answer), result in zip(batch, results, strict=True):
        answer.set_result(result)
