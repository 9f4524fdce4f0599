"""The decode loop in its own thread. HTTP handlers hand it requests and calls and get futures back.

Closed: the requests of one generate call are decoded together and with nothing else, in a cache that holds no trace of
earlier ones. What a call returns then depends on its requests, the weights and the settings alone, to the bit."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rlhf_megatron.resharding.buffers import Segment
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import Exchange
from rlhf_megatron.rollout.engine import MEMORY_PARTS, GeneratedSample, GenerateRequest, MemoryPart, PauseMode
from rlhf_megatron.rollout.local.generator import Generator
from rlhf_megatron.rollout.local.model import give_back
from rlhf_megatron.rollout.local.slots import Member
from rlhf_megatron.rollout.local.weights import WeightReceiver

logger = logging.getLogger(__name__)


class StaleError(RuntimeError):
    """The weights are not fit to serve. The message says why."""


class ReleasedError(RuntimeError):
    """There is no memory for a key-value cache. The weights are fit."""


class _Job:
    def __init__(self, requests: Sequence[GenerateRequest], name: str) -> None:
        self.requests = requests
        self.name = name
        self.groups: list[list[Member]] = []
        self.unfinished = sum(len(request.seeds) for request in requests)
        self.future: Future[list[list[GeneratedSample]]] = Future()


class DecodeService:
    """All methods but `generate`, `call` and `close` run in the loop's thread: reach them through `call`."""

    def __init__(self, generator: Generator, weights: WeightReceiver, is_closed: bool = False) -> None:
        self.generator = generator
        self.weights = weights
        self.is_closed = is_closed
        self.pause_mode: PauseMode | None = None  # None: not paused
        self._queue: deque[_Job] = deque()  # closed: those that wait for their turn
        self._held: deque[_Job] = deque()  # came during the pause
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._condition = threading.Condition()
        self._is_closing = False
        self._jobs: dict[int, _Job] = {}  # id of an unfinished member -> its job
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` in the loop's thread between two decoding steps."""
        future: Future[Any] = Future()
        with self._condition:
            if self._is_closing:
                raise StaleError("the engine is shutting down")
            self._inbox.append((function, future))
            self._condition.notify()
        return future

    def generate(self, requests: Sequence[GenerateRequest], name: str = "") -> tuple[_Job, Future[None]]:
        """Returns the job, whose `future` has the samples, and the future of its admission (ValueError, StaleError).
        `name`: for `abort`."""
        job = _Job(requests, name)
        return job, self.call(lambda: self._submit(job))

    def close(self) -> None:
        """End the loop; what is unfinished fails."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(timeout=10.0)

    # In the loop's thread

    def _submit(self, job: _Job) -> None:
        if self.weights.stale_reason is not None:
            raise StaleError(self.weights.stale_reason)
        if self.generator.is_released:
            raise ReleasedError("its memory is released (kv_cache); resume_memory must come before it serves")
        for request in job.requests:
            self.generator.check(request)
        if not job.unfinished:
            job.future.set_result([])
        elif self.pause_mode is not None:
            self._held.append(job)
        else:
            self._enqueue(job)

    def _enqueue(self, job: _Job) -> None:
        if self.is_closed:
            self._queue.append(job)
        else:
            self._admit(job)

    def _admit(self, job: _Job) -> None:
        job.groups = [self.generator.add(request) for request in job.requests]
        for member in (member for group in job.groups for member in group):
            self._jobs[id(member)] = job

    def _admit_next(self) -> None:
        """Closed: the next call's turn, once the one before has ended."""
        if self._queue and not self.generator.has_work:
            self.generator.reset()
            self._admit(self._queue.popleft())

    def drop(self, job: _Job) -> None:
        """The client is gone: take the rest of its samples out."""
        for queue in (self._queue, self._held):
            if job in queue:
                queue.remove(job)
        members = [member for group in job.groups for member in group if id(member) in self._jobs]
        self._deliver(self.generator.abort(members))

    def abort(self, names: Collection[str] = ()) -> None:
        """End all samples, also of requests that came during a pause; with `names` those of these calls."""
        if names:
            self._abort_named(set(names))
            return
        self._queue += self._held
        self._held.clear()
        self._abort_admitted()

    def _abort_named(self, names: set[str]) -> None:
        for queue in (self._queue, self._held):
            for job in [job for job in queue if job.name in names]:
                queue.remove(job)
                self._admit(job)
        chosen = {id(job): job for job in self._jobs.values() if job.name in names}.values()
        members = [member for job in chosen for group in job.groups for member in group if id(member) in self._jobs]
        self._deliver(self.generator.abort(members))

    def _abort_admitted(self) -> None:
        while self._queue:
            self._admit(self._queue.popleft())
        self._deliver(self.generator.abort())

    def pause(self, mode: PauseMode = "retract") -> None:
        """Pauses as `Engine.pause` says. A second pause treats what waits since the first one began as its mode says;
        requests that came during the pause go on waiting in any mode."""
        self.pause_mode = mode
        if mode == "abort":
            self._abort_admitted()
        else:
            self._leave_cache()

    def resume(self) -> None:
        self.pause_mode = None
        while self._held:
            self._enqueue(self._held.popleft())

    def _leave_cache(self) -> None:
        """Takes the cache from what runs, unless it was paused to keep it."""
        if self.pause_mode != "in_place":
            self.generator.retract()

    def begin_update(self, version: int, full_resync: bool) -> None:
        """Opens a sync. What was paused in place goes on with a cache of the old weights, as that mode asks for."""
        self.weights.begin(version, full_resync)
        self._leave_cache()

    def update_weights(
        self, manifest: BucketManifest, memory: Sequence[Segment] | None = None, exchange: Exchange | None = None
    ) -> None:
        """`memory`: where the bucket lies; `exchange`: how it is sent; without either it is in its file."""
        with self._fails_waiting():
            self.weights.load(manifest, memory, exchange)

    def commit_update(self, version: int) -> None:
        is_first = self.weights.is_open  # not one whose answer was lost
        with self._fails_waiting():
            self.weights.commit(version)
        if is_first:
            self.generator.set_version(version)

    @contextmanager
    def _fails_waiting(self) -> Iterator[None]:
        """When the open sync fails in the block, requests that wait for its end fail with the reason. An error of a
        bucket or commit that belongs to no open sync is its caller's alone."""
        was_open = self.weights.is_open
        try:
            yield
        except BaseException as error:
            if was_open and not self.weights.is_open:
                self._fail_all(StaleError(self.weights.stale_reason or str(error)))
            raise

    def release_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Frees memory; what runs waits until the cache is back and a full sync has brought weights."""
        if "weights" in parts:
            self._leave_cache()
            self.weights.release()
        if "kv_cache" in parts:
            if self.is_closed:
                self._begin_again()
            self.generator.release_cache()
        give_back(self.generator.model.device)

    def _begin_again(self) -> None:
        """Closed: what runs goes back to its prompts. If it went on, its last bits would tell of the interruption."""
        jobs = list({id(job): job for job in self._jobs.values()}.values())
        self._jobs.clear()
        self.generator.abort()
        for job in jobs:
            job.groups, job.unfinished = [], sum(len(request.seeds) for request in job.requests)
        self._queue.extendleft(reversed(jobs))

    def resume_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        if "weights" in parts:
            self.weights.resume()
        if "kv_cache" in parts:
            self.generator.resume_cache()

    def _fail_all(self, error: Exception) -> None:
        jobs = {id(job): job for job in (*self._jobs.values(), *self._queue, *self._held)}
        self._jobs.clear()
        self._queue.clear()
        self._held.clear()
        self.generator.abort()
        for job in jobs.values():
            job.future.set_exception(error)

    def _deliver(self, finished: Sequence[Member]) -> None:
        for member in finished:
            job = self._jobs.pop(id(member), None)
            if job is None:
                continue
            job.unfinished -= 1
            if job.unfinished == 0:
                try:
                    job.future.set_result([[m.result() for m in group] for group in job.groups])
                except (FloatingPointError, OSError) as error:  # the second: no room for files of routes
                    job.future.set_exception(error)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._inbox and not self._is_closing and not self._can_decode():
                    self._condition.wait()
                calls = list(self._inbox)
                self._inbox.clear()
                if self._is_closing:
                    break
            for function, future in calls:
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(function())
                except Exception as error:  # goes to the caller, as its answer
                    future.set_exception(error)
            if self._can_decode():
                try:
                    self._admit_next()
                    self._deliver(self.generator.step())
                except Exception as error:  # e.g. out of memory: the requests fail, the engine lives
                    logger.exception("decoding failed")
                    self._fail_all(error)
        self._fail_all(StaleError("the engine is shutting down"))
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(StaleError("the engine is shutting down"))

    def _can_decode(self) -> bool:
        is_fit = self.weights.stale_reason is None and not self.generator.is_released
        return is_fit and self.pause_mode is None and (self.generator.has_work or bool(self._queue))
