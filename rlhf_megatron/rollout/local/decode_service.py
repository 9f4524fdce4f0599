"""The decode loop in its own thread. HTTP handlers hand it requests and calls and get futures back.

Closed: the requests of one generate call are decoded together and with nothing else, in a cache
that holds no trace of earlier ones. What a call returns then depends on its requests, the weights
and the settings alone, to the bit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
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


class _DecodeJob:
    def __init__(self, requests: Sequence[GenerateRequest], call_name: str) -> None:
        self.requests = requests
        self.call_name = call_name
        self.sample_groups: list[list[PendingSample]] = []
        self.num_unfinished = sum(len(request.seeds) for request in requests)
        self.future: Future[list[list[GeneratedSample]]] = Future()


class DecodeService:
    """All methods but `submit_generate`, `run_in_decode_loop` and `close` run in the loop's thread:
    reach them through `run_in_decode_loop`.
    """

    def __init__(
        self, generator: BatchGenerator, weights: WeightReceiver, is_isolated: bool = False
    ) -> None:
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
        self._thread = threading.Thread(target=self._run_decode_loop, name="decode", daemon=True)
        self._thread.start()

    def run_in_decode_loop(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` in the loop's thread between two decoding steps."""
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
        """Returns the job, whose `future` has the samples, and the future of its admission
        (ValueError, StaleError). `call_name`: for `abort_calls`.
        """
        job = _DecodeJob(requests, call_name)
        return job, self.run_in_decode_loop(lambda: self._accept_job(job))

    def close(self) -> None:
        """End the loop; what is unfinished fails."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(timeout=10.0)

    # In the loop's thread

    def _accept_job(self, job: _DecodeJob) -> None:
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
        if self.is_isolated:
            self._queued_jobs.append(job)
        else:
            self._admit_job(job)

    def _admit_job(self, job: _DecodeJob) -> None:
        job.sample_groups = [self.generator.add_request(request) for request in job.requests]
        for member in (member for group in job.sample_groups for member in group):
            self._job_by_sample[id(member)] = job

    def _admit_next_job(self) -> None:
        """Closed: the next call's turn, once the one before has ended."""
        if self._queued_jobs and not self.generator.has_work:
            self.generator.reset_cache_size()
            self._admit_job(self._queued_jobs.popleft())

    def drop_job(self, job: _DecodeJob) -> None:
        """The client is gone: take the rest of its samples out."""
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
        """End all samples, also of requests that came during a pause; with `call_names` those
        of these calls.
        """
        if call_names:
            self._abort_named_calls(set(call_names))
            return
        self._queued_jobs += self._jobs_held_by_pause
        self._jobs_held_by_pause.clear()
        self._abort_all_jobs()

    def _abort_named_calls(self, call_names: set[str]) -> None:
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
        while self._queued_jobs:
            self._admit_job(self._queued_jobs.popleft())
        self._deliver_samples(self.generator.abort_samples())

    def pause_decoding(self, mode: PauseMode = "retract") -> None:
        """Pauses as `Engine.pause` says. A second pause treats what waits since the first one began
        as its mode says; requests that came during the pause go on waiting in any mode.
        """
        self.pause_mode = mode
        if mode == "abort":
            self._abort_all_jobs()
        else:
            self._retract_unless_in_place()

    def resume_decoding(self) -> None:
        self.pause_mode = None
        while self._jobs_held_by_pause:
            self._enqueue_job(self._jobs_held_by_pause.popleft())

    def _retract_unless_in_place(self) -> None:
        """Takes the cache from what runs, unless it was paused to keep it."""
        if self.pause_mode != "in_place":
            self.generator.retract_samples()

    def begin_weight_update(self, version: int, is_full_resync: bool) -> None:
        """Opens a sync. What was paused in place goes on with a cache of the old weights, as that
        mode asks for.
        """
        self.weights.begin_sync(version, is_full_resync)
        self._retract_unless_in_place()

    def update_weights(
        self,
        manifest: BucketManifest,
        segments: Sequence[LentSegment] | None = None,
        exchange: BucketExchange | None = None,
    ) -> None:
        """`segments`: where the bucket lies; `exchange`: how it is sent; without either it
        is in its file.
        """
        with self._fail_jobs_if_sync_fails():
            self.weights.load_bucket(manifest, segments, exchange)

    def commit_weight_update(self, version: int) -> None:
        is_first = self.weights.is_sync_open  # not one whose answer was lost
        with self._fail_jobs_if_sync_fails():
            self.weights.commit_sync(version)
        if is_first:
            self.generator.set_policy_version(version)

    @contextmanager
    def _fail_jobs_if_sync_fails(self) -> Iterator[None]:
        """When the open sync fails in the block, requests that wait for its end fail with the
        reason. An error of a bucket or commit that belongs to no open sync is its caller's alone.
        """
        was_open = self.weights.is_sync_open
        try:
            yield
        except BaseException as error:
            if was_open and not self.weights.is_sync_open:
                self._fail_all_jobs(StaleWeightsError(self.weights.stale_reason or str(error)))
            raise

    def release_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Frees memory; what runs waits until the cache is back and a full sync has
        brought weights.
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
        """Closed: what runs goes back to its prompts. If it went on, its last bits would tell of
        the interruption.
        """
        jobs = list({id(job): job for job in self._job_by_sample.values()}.values())
        self._job_by_sample.clear()
        self.generator.abort_samples()
        for job in jobs:
            job.sample_groups = []
            job.num_unfinished = sum(len(request.seeds) for request in job.requests)
        self._queued_jobs.extendleft(reversed(jobs))

    def resume_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        if "weights" in memory_parts:
            self.weights.restore_memory()
        if "kv_cache" in memory_parts:
            self.generator.resume_cache()

    def _fail_all_jobs(self, error: Exception) -> None:
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
        while True:
            with self._condition:
                while not self._pending_calls and not self._is_closing and not self._can_decode():
                    self._condition.wait()
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
        self._fail_all_jobs(StaleWeightsError("the engine is shutting down"))
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(StaleWeightsError("the engine is shutting down"))

    def _can_decode(self) -> bool:
        is_fit = self.weights.stale_reason is None and not self.generator.is_cache_released
        return (
            is_fit
            and self.pause_mode is None
            and (self.generator.has_work or bool(self._queued_jobs))
        )
