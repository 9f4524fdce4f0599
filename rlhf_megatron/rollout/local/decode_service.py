"""The decode loop in its own thread. HTTP handlers hand it requests and calls and get futures back.

Closed: the requests of one generate call are decoded together and with nothing else, in a cache
that holds no trace of earlier ones. What a call returns then depends on its requests, the weights
and the settings alone, to the bit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rollout.engine_interface import (
    MEMORY_PARTS,
    GeneratedSample,
    GenerateRequest,
    MemoryPart,
    PauseMode,
)
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.cache_slots import PendingSample
from rlhf_megatron.rollout.local.local_model import release_unused_memory
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver
from rlhf_megatron.weights.bucket_buffers import LentSegment
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import BucketExchange

logger = logging.getLogger(__name__)


class StaleWeightsError(RuntimeError):
    """The weights are not fit to serve. The message says why."""


class ReleasedCacheError(RuntimeError):
    """There is no memory for a key-value cache. The weights are fit."""


@dataclass(frozen=True)
class DecodeProgress:
    """How the decoding loop gets on. A step is what the loop does between two looks at what waits:
    calls of other threads, and one token of each running sample.
    """

    is_running: bool  # the loop's thread lives
    seconds_without_step: float  # while something waits; 0 while nothing does
    longest_step_s: float  # so far


class _DecodeJob:
    """One generate call: its requests, its unfinished samples, and the future of its result."""

    def __init__(self, requests: Sequence[GenerateRequest], call_name: str) -> None:
        self.requests = requests
        self.call_name = call_name
        self.sample_groups: list[list[PendingSample]] = []
        self.num_unfinished = sum(len(request.seeds) for request in requests)
        self.future: Future[list[list[GeneratedSample]]] = Future()


class DecodeService:
    """Runs the decoding loop in a thread of its own. All methods but `submit_generate`,
    `run_in_decode_loop` and `close` run in that thread: call them through `run_in_decode_loop`.
    """

    def __init__(
        self, generator: BatchGenerator, weights: WeightReceiver, is_isolated: bool = False
    ) -> None:
        """Start the loop's thread. `is_isolated`: decode the requests of each generate call by
        themselves, with nothing else ("closed").
        """
        self.generator = generator
        self.weights = weights
        self.is_isolated = is_isolated
        self.pause_mode: PauseMode | None = None  # None: not paused
        self._queued_jobs: deque[_DecodeJob] = deque()  # closed: those that wait for their turn
        self._jobs_held_by_pause: deque[_DecodeJob] = deque()  # came during the pause
        self._pending_calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._condition = threading.Condition()
        self._is_closing = False
        self._job_by_sample: dict[int, _DecodeJob] = {}  # id of an unfinished member -> its job
        # since when a step is under way or due; None: there is nothing to do
        self._busy_since: float | None = None
        self._longest_step_s = 0.0
        self._thread = threading.Thread(target=self._run_decode_loop, name="decode", daemon=True)
        self._thread.start()

    def run_in_decode_loop(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue `function` for the loop's thread, between two decoding steps, and return the future
        of its result. Raise StaleWeightsError after `close`. Any thread may call it.
        """
        future: Future[Any] = Future()
        with self._condition:
            if self._is_closing:
                raise StaleWeightsError("the engine is shutting down")
            self._pending_calls.append((function, future))
            self._condition.notify()
        return future

    def submit_generate(
        self, requests: Sequence[GenerateRequest], call_name: str = ""
    ) -> tuple[_DecodeJob, Future[None]]:
        """Queue a generate call. Return the job, whose `future` gets the samples, and the future of
        its admission, which gets ValueError, StaleWeightsError or ReleasedCacheError for a refused
        call. `call_name` is the name for `abort_calls`. Any thread may call it.
        """
        job = _DecodeJob(requests, call_name)
        return job, self.run_in_decode_loop(lambda: self._accept_job(job))

    def measure_progress(self) -> DecodeProgress:
        """Return how the loop gets on. Any thread may call it: the answer does not wait for the
        step that is under way.
        """
        busy_since = self._busy_since
        return DecodeProgress(
            is_running=self._thread.is_alive(),
            seconds_without_step=0.0 if busy_since is None else time.monotonic() - busy_since,
            longest_step_s=self._longest_step_s,
        )

    def close(self) -> None:
        """End the loop, and fail all unfinished calls with StaleWeightsError."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(timeout=10.0)

    # In the loop's thread

    def _accept_job(self, job: _DecodeJob) -> None:
        """Check a new call and start it, or queue it during a pause. Raise StaleWeightsError,
        ReleasedCacheError or ValueError where it cannot be served.
        """
        if self.weights.stale_reason is not None:
            raise StaleWeightsError(self.weights.stale_reason)
        if self.generator.is_cache_released:
            raise ReleasedCacheError(
                "its memory is released (kv_cache); resume_memory must come before it serves"
            )
        for request in job.requests:
            self.generator.check_request(request)
        if not job.num_unfinished:
            job.future.set_result([])
        elif self.pause_mode is not None:
            self._jobs_held_by_pause.append(job)
        else:
            self._enqueue_job(job)

    def _enqueue_job(self, job: _DecodeJob) -> None:
        """Start the call, or queue it for its turn where calls are decoded by themselves."""
        if self.is_isolated:
            self._queued_jobs.append(job)
        else:
            self._admit_job(job)

    def _admit_job(self, job: _DecodeJob) -> None:
        """Hand the requests of the call to the generator."""
        job.sample_groups = [self.generator.add_request(request) for request in job.requests]
        for member in (member for group in job.sample_groups for member in group):
            self._job_by_sample[id(member)] = job

    def _admit_next_job(self) -> None:
        """Start the next queued call once the one before has ended, with a new cache (only where
        calls are decoded by themselves).
        """
        if self._queued_jobs and not self.generator.has_work:
            self.generator.reset_cache_size()
            self._admit_job(self._queued_jobs.popleft())

    def drop_job(self, job: _DecodeJob) -> None:
        """Remove a call whose client is gone, and abort the rest of its samples."""
        for queue in (self._queued_jobs, self._jobs_held_by_pause):
            if job in queue:
                queue.remove(job)
        members = [
            member
            for group in job.sample_groups
            for member in group
            if id(member) in self._job_by_sample
        ]
        self._deliver_samples(self.generator.abort_samples(members))

    def abort_calls(self, call_names: Collection[str] = ()) -> None:
        """End the calls with these names, or all calls where `call_names` is empty, also calls that
        came during a pause: they are answered at once with reason "abort" and the tokens that they
        have.
        """
        if call_names:
            self._finish_named_calls_as_aborted(set(call_names))
            return
        self._queued_jobs += self._jobs_held_by_pause
        self._jobs_held_by_pause.clear()
        self._abort_all_jobs()

    def _finish_named_calls_as_aborted(self, call_names: set[str]) -> None:
        """Answer the calls with these names at once with their samples as aborted, queued and
        paused calls too.
        """
        for queue in (self._queued_jobs, self._jobs_held_by_pause):
            for job in [job for job in queue if job.call_name in call_names]:
                queue.remove(job)
                self._admit_job(job)
        chosen = {
            id(job): job for job in self._job_by_sample.values() if job.call_name in call_names
        }.values()
        members = [
            member
            for job in chosen
            for group in job.sample_groups
            for member in group
            if id(member) in self._job_by_sample
        ]
        self._deliver_samples(self.generator.abort_samples(members))

    def _abort_all_jobs(self) -> None:
        """Answer all running and queued calls at once with their samples as aborted; not those that
        a pause holds back.
        """
        while self._queued_jobs:
            self._admit_job(self._queued_jobs.popleft())
        self._deliver_samples(self.generator.abort_samples())

    def pause_decoding(self, mode: PauseMode = "retract") -> None:
        """Pause as `InferenceEngine.pause_decoding` says. A second pause applies its mode to the
        calls that were running when the first one began; requests that came during the pause go on
        waiting in any mode.
        """
        self.pause_mode = mode
        if mode == "abort":
            self._abort_all_jobs()
        else:
            self._retract_unless_in_place()

    def resume_decoding(self) -> None:
        """End the pause, and start or queue the calls that came meanwhile."""
        self.pause_mode = None
        while self._jobs_held_by_pause:
            self._enqueue_job(self._jobs_held_by_pause.popleft())

    def _retract_unless_in_place(self) -> None:
        """Retract the running samples, which frees their cache rows, unless they were paused
        "in_place".
        """
        if self.pause_mode != "in_place":
            self.generator.retract_samples()

    def begin_weight_update(self, version: int, is_full_resync: bool) -> None:
        """Open a weight sync. Running samples are retracted; samples paused "in_place" keep the
        cache of the old weights. Raise ValueError as `WeightReceiver.begin_sync` does.
        """
        self.weights.begin_sync(version, is_full_resync)
        self._retract_unless_in_place()

    def update_weights(
        self,
        manifest: BucketManifest,
        segments: Sequence[LentSegment] | None = None,
        exchange: BucketExchange | None = None,
    ) -> None:
        """Load a bucket. It is read from `segments` of lent device memory, from the messages of
        `exchange`, or, without either, from its file. Raise ValueError as
        `WeightReceiver.load_bucket` does; the waiting calls fail where the sync fails by it.
        """
        with self._fail_jobs_if_sync_fails():
            self.weights.load_bucket(manifest, segments, exchange)

    def commit_weight_update(self, version: int) -> None:
        """Commit the sync to `version` and note the new version for samples. A repeated commit does
        nothing. The waiting calls fail where the sync fails by it. Raise ValueError as
        `WeightReceiver.commit_sync` does.
        """
        is_first = self.weights.is_sync_open  # not one whose answer was lost
        with self._fail_jobs_if_sync_fails():
            self.weights.commit_sync(version)
        if is_first:
            self.generator.set_policy_version(version)

    @contextmanager
    def _fail_jobs_if_sync_fails(self) -> Iterator[None]:
        """When the open sync fails in the block, fail all calls that wait for its end with the
        reason. An error of a bucket or commit that belongs to no open sync fails only its own
        caller.
        """
        was_open = self.weights.is_sync_open
        try:
            yield
        except BaseException as error:
            if was_open and not self.weights.is_sync_open:
                self._fail_all_jobs(StaleWeightsError(self.weights.stale_reason or str(error)))
            raise

    def release_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Free these parts. Unfinished calls wait until the cache is back and a full sync has
        brought weights; where calls are decoded by themselves they start again from their prompts.
        """
        if "weights" in memory_parts:
            self._retract_unless_in_place()
            self.weights.release_memory()
        if "kv_cache" in memory_parts:
            if self.is_isolated:
                self._restart_jobs()
            self.generator.release_cache()
        release_unused_memory(self.generator.model.device)

    def _restart_jobs(self) -> None:
        """Put the running calls back to their prompts, at the front of the queue, for isolated
        calls: if they went on, their last bits would depend on the interruption.
        """
        jobs = list({id(job): job for job in self._job_by_sample.values()}.values())
        self._job_by_sample.clear()
        self.generator.abort_samples()
        for job in jobs:
            job.sample_groups = []
            job.num_unfinished = sum(len(request.seeds) for request in job.requests)
        self._queued_jobs.extendleft(reversed(jobs))

    def resume_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Allocate the weights (zeros until the next sync) and allow the key-value cache again."""
        if "weights" in memory_parts:
            self.weights.restore_memory()
        if "kv_cache" in memory_parts:
            self.generator.resume_cache()

    def _fail_all_jobs(self, error: Exception) -> None:
        """Drop all unfinished calls, queued, paused or running, and fail them with this error."""
        jobs = {
            id(job): job
            for job in (
                *self._job_by_sample.values(),
                *self._queued_jobs,
                *self._jobs_held_by_pause,
            )
        }
        self._job_by_sample.clear()
        self._queued_jobs.clear()
        self._jobs_held_by_pause.clear()
        self.generator.abort_samples()
        for job in jobs.values():
            job.future.set_exception(error)

    def _deliver_samples(self, finished: Sequence[PendingSample]) -> None:
        """Count finished samples to their calls, and answer the calls that are complete; a call
        fails where a log-prob is not finite or a route file has no room.
        """
        for member in finished:
            job = self._job_by_sample.pop(id(member), None)
            if job is None:
                continue
            job.num_unfinished -= 1
            if job.num_unfinished == 0:
                try:
                    job.future.set_result(
                        [[m.make_generated_sample() for m in group] for group in job.sample_groups]
                    )
                except (
                    FloatingPointError,
                    OSError,
                ) as error:  # the second: no room for files of routes
                    job.future.set_exception(error)

    def _run_decode_loop(self) -> None:
        """Run queued functions and decoding steps in turns until `close`. An error of a decoding
        step fails all calls, and the loop goes on.
        """
        while True:
            with self._condition:
                while not self._pending_calls and not self._is_closing and not self._can_decode():
                    self._busy_since = None
                    self._condition.wait()
                step_began_at = time.monotonic()
                self._busy_since = step_began_at
                calls = list(self._pending_calls)
                self._pending_calls.clear()
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
                    self._admit_next_job()
                    self._deliver_samples(self.generator.decode_step())
                except (
                    Exception
                ) as error:  # e.g. out of memory: the requests fail, the engine lives
                    logger.exception("decoding failed")
                    self._fail_all_jobs(error)
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - step_began_at)
        self._fail_all_jobs(StaleWeightsError("the engine is shutting down"))
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(StaleWeightsError("the engine is shutting down"))

    def _can_decode(self) -> bool:
        """Return whether there is work and the weights, the cache and the pause allow a decoding
        step.
        """
        is_fit = self.weights.stale_reason is None and not self.generator.is_cache_released
        return (
            is_fit
            and self.pause_mode is None
            and (self.generator.has_work or bool(self._queued_jobs))
        )
