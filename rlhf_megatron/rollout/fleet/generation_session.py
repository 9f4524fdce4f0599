"""Generation that goes on over weight syncs: what is submitted comes back once, whoever else
uses the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rlhf_megatron.rollout.engine_interface import EngineError, GenerateRequest, SampleGroups
from rlhf_megatron.rollout.fleet.chunk_generation import POLL_S, ChunkGeneration, FleetResources
from rlhf_megatron.rollout.fleet.request_balancer import (
    EnginePreference,
    OutstandingLoad,
    RequestChunk,
)

_WATCH_PURPOSE = "session"


@dataclass(frozen=True)
class FinishedCall:
    """Where a key was generated, and how long that took."""

    engine: EnginePreference | None  # None: a router chose it
    engine_seconds: float


class GenerationSession:
    """Generation that goes on over weight syncs. Made by `EngineFleet.open_session`; a context
    manager that closes it.

        session.submit_requests(7, requests)  # a key and its requests, which travel together
        for key, groups in session.poll_finished(): ...  # again and again; each key once

    One thread submits, polls and aborts. Another one may, meanwhile, sync weights (`with
    fleet.hold_exclusively():`), call `fleet.generate`, and must call `mend_engines` where engines
    may have died: nothing else gives them weights between syncs.
    """

    def __init__(
        self,
        resources: FleetResources,
        get_other_load: Callable[[], OutstandingLoad],
        on_close: Callable[[], None],
        keeps_failures: bool = False,
        keeps_finished_calls: bool = False,
    ) -> None:
        """Open the session. `get_other_load` returns the work of the fleet beside the session's.
        `keeps_failures`: `take_failures` returns the keys that no engine can do, and
        `poll_finished` does not raise for them. `keeps_finished_calls`: `take_finished_call` tells
        of each key that was returned.
        """
        self._lock = resources.lock
        self._supervisor = resources.supervisor
        self._served_versions = resources.served_versions
        self._get_other_load = get_other_load
        self._on_close = on_close
        self._chunk_by_key: dict[int, RequestChunk] = {}  # by key, of what runs
        self._aborted_chunks: list[RequestChunk] = []  # that engines are still to be told of
        self._is_closed = False
        self._keeps_finished_calls = keeps_finished_calls
        self._finished_chunks: dict[int, RequestChunk] = {}
        self._generation = ChunkGeneration(
            resources, (), has_named_calls=True, is_session=True, keeps_failures=keeps_failures
        )
        with self._lock.hold_lock():
            self._supervisor.start_watching(_WATCH_PURPOSE)

    @property
    def num_running(self) -> int:
        """Return the number of keys that were submitted and neither came back nor were aborted."""
        return len(self._chunk_by_key)

    @property
    def outstanding_load(self) -> OutstandingLoad:
        """Return the session's chunks and samples on their way to engines. Only the thread that
        holds the lock may read it.
        """
        return self._generation.outstanding_load

    def submit_requests(
        self,
        key: int,
        requests: Sequence[GenerateRequest],
        preference: EnginePreference | None = None,
    ) -> None:
        """Queue work under a key: all its requests go to one engine, as soon as one has room.
        Return at once. `preference`: the engine that has the beginning of the prompts in its cache.

        `key` must not be running; a key that came back or was aborted may be used again.
        """
        assert requests, f"key {key} has no request"
        assert key not in self._chunk_by_key, f"key {key} is running"
        assert not self._is_closed, "the session is closed"
        chunk = RequestChunk(key, tuple(requests), is_session=True, preference=preference)
        self._chunk_by_key[key] = chunk
        self._generation.add_chunk(chunk)

    def take_finished_call(self, key: int) -> FinishedCall:
        """Return where a key that `poll_finished` has returned was generated, and how long that
        took; once for each key, before it is submitted again.
        """
        chunk = self._finished_chunks.pop(key)
        return FinishedCall(chunk.preference, chunk.engine_seconds)

    def measure_engine_seconds(self, key: int) -> float:
        """Return the seconds that a running key has spent at engines; 0 while it waits for one, and
        for a key that does not run. The time in a queue of the engine itself counts.
        """
        chunk = self._chunk_by_key.get(key)
        if chunk is None:
            return 0.0
        with self._lock.hold_lock():
            return self._generation.measure_engine_seconds(chunk)

    def poll_finished(self) -> list[tuple[int, SampleGroups]]:
        """Return the keys that finished since the last call, each with one list of samples for each
        request. Return at once when there are any, else after at most about 0.1 s; so too while
        another thread syncs weights.

        Raise EngineError when retries or engines run out, EngineRequestError when a request itself
        is wrong: the session must be closed then. While all engines are STALE, work waits for a
        sync or for `mend_engines`.
        """
        found = self._advance_and_collect()
        if found == [] and self._generation.wait_for_answers():
            found = self._advance_and_collect()
        return found or []

    def take_failures(self) -> list[tuple[int, EngineError]]:
        """Return the keys that no engine could do since the last call, with the error of each; they
        do not run any more. Empty while another thread holds the lock. The thread that polls calls
        it.
        """
        with self._lock.try_hold_lock(0.0) as is_mine:
            if not is_mine:
                return []
            failed = self._generation.failed_chunks
            self._generation.failed_chunks = []
        found = [
            (chunk.start, error)
            for chunk, error in failed
            if self._chunk_by_key.get(chunk.start) is chunk
        ]
        for key, _ in found:
            del self._chunk_by_key[key]
        return found

    def wake_poll(self) -> None:
        """End a `poll_finished` that waits, for example to submit something. Any thread may call
        it.
        """
        self._generation.wake_waiter()

    def abort_keys(self, keys: Collection[int]) -> None:
        """Abort the work of these keys, which never come back. The engines are told at once, or at
        the next `poll_finished` where another thread syncs weights. Wait for at most about 0.1 s.
        Keys that do not run are ignored.
        """
        self._aborted_chunks += [
            self._chunk_by_key.pop(key) for key in keys if key in self._chunk_by_key
        ]
        with self._lock.try_hold_lock(POLL_S) as is_mine:
            if is_mine and not self._is_closed:
                self._drop_aborted_chunks()

    def mend_engines(self) -> None:
        """Bring engines that were started again, or are STALE, to the current weights. The thread
        that syncs calls it, while the hosts are free. Return at once where there are none, and
        after `close`: another thread may have closed the session because of an error, which it
        reports itself.
        """
        with self._lock.hold_lock():
            if self._is_closed:
                return
            self._supervisor.advance_states(self._served_versions.current_version)
            self._generation.take_back_chunks()
            self._supervisor.mend_stale_members(self._served_versions.current_version)

    def take_back_chunks(self) -> None:
        """Queue the chunks again that were sent to engines that no longer serve. Only the thread
        that holds the lock may call it.
        """
        self._generation.take_back_chunks()

    def close(self) -> None:
        """Abort the work that still runs; none of it comes back. Safe to call twice."""
        with self._lock.hold_lock():
            if self._is_closed:
                return
            self._is_closed = True
            self._supervisor.stop_watching(_WATCH_PURPOSE)
            self._chunk_by_key.clear()
            self._on_close()
        self._generation.abandon_calls()

    def __enter__(self) -> GenerationSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance_and_collect(self) -> list[tuple[int, SampleGroups]] | None:
        """Update the states of the engines, send waiting work, and return the keys that finished,
        with their samples. Return None where another thread holds the lock or the session is
        closed.
        """
        with self._lock.try_hold_lock(POLL_S) as is_mine:
            if not is_mine or self._is_closed:
                return None
            version = self._served_versions.current_version
            self._supervisor.advance_states(version)
            self._generation.take_back_chunks()
            self._drop_aborted_chunks()
            self._generation.expire_late_calls()
            finished = [
                (chunk.start, groups) for chunk, groups in self._generation.harvest_answers(version)
            ]
            for key, _ in finished:
                chunk = self._chunk_by_key.pop(key)
                if self._keeps_finished_calls:
                    self._finished_chunks[key] = chunk
            try:
                self._generation.dispatch_chunks(version, self._get_other_load())
            except EngineError:
                if not finished:  # else it is raised the next time
                    raise
            return finished

    def _drop_aborted_chunks(self) -> None:
        """Drop the chunks of aborted keys. Call it before harvesting, so that none of them comes
        back.
        """
        dropped = self._aborted_chunks
        self._aborted_chunks = []
        self._generation.drop_chunks(dropped)
