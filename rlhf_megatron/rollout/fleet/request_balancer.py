"""The interface of what spreads requests over the engines that serve, and the run's own balancer.

The requests of a generate call are cut into pieces by the configuration alone, whatever
fails or is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_megatron.rollout.chunk_sizes import (
    CHUNKS_IN_FLIGHT,
    OVERFILL_FACTOR,
    divide_groups_into_chunks,
)
from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    GenerateRequest,
    InferenceEngine,
    SampleGroups,
)
from rlhf_megatron.rollout.fleet.engine_supervisor import FleetMember

_DEFAULT_MAX_RUNNING = 256  # samples, of an engine that does not say what it decodes at once


@dataclass(frozen=True)
class EnginePreference:
    """The engine that a chunk should go to, because its prefix cache holds the beginning of the
    prompts, and the version of weights with which the cache was filled.
    """

    member_name: str
    version: int | None


@dataclass(eq=False, slots=True)
class RequestChunk:
    """Neighbouring groups that travel together."""

    start: int  # index of the first request
    requests: Sequence[GenerateRequest]
    # engine name -> what it said last
    failure_by_engine: dict[str, str] = field(default_factory=dict)
    num_failures: int = 0
    num_driver_losses: int = 0  # with drivers that ended
    is_session: bool = False  # of a session
    preference: EnginePreference | None = None
    engine_seconds: float = 0.0  # that its ended calls have spent at engines

    @property
    def num_samples(self) -> int:
        """Return the number of samples of all requests."""
        return sum(len(request.seeds) for request in self.requests)


def cut_chunks(
    requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool = False
) -> list[RequestChunk]:
    """Cut the requests into chunks of neighbouring requests; see
    `chunk_sizes.divide_groups_into_chunks`.
    """
    sizes = [len(request.seeds) for request in requests]
    return [
        RequestChunk(run.start, requests[run.start : run.stop])
        for run in divide_groups_into_chunks(sizes, num_engines, is_isolated)
    ]


def select_unknown_chunks(
    chunks: Sequence[RequestChunk], known_indexes: Container[int], is_isolated: bool
) -> list[RequestChunk]:
    """Return chunks with the requests whose indexes are not in `known_indexes`. `is_isolated`: a
    chunk that lacks a group is returned whole, since an engine's answer depends on all requests
    that it decodes together.
    """
    left: list[RequestChunk] = []
    for chunk in chunks:
        runs = list(find_unknown_runs(chunk.start, len(chunk.requests), known_indexes))
        if is_isolated and runs:
            left.append(chunk)
        elif not is_isolated:
            left += [
                RequestChunk(run.start, chunk.requests[run.start - chunk.start :][: len(run)])
                for run in runs
            ]
    return left


def find_unknown_runs(
    start: int, num_groups: int, known_indexes: Container[int]
) -> Iterator[range]:
    """Yield the ranges of consecutive indexes from `start` to `start + num_groups - 1` that are not
    in `known_indexes`.
    """
    first = start
    for index in range(start, start + num_groups + 1):
        if index == start + num_groups or index in known_indexes:
            if index > first:
                yield range(first, index)
            first = index + 1


@dataclass(frozen=True, eq=False, slots=True)
class ChunkAssignment:
    """A piece of work on its way, and to whom."""

    chunk: RequestChunk
    target_name: str  # of the engine or router, in messages
    # as `InferenceEngine.generate_async`
    generate: Callable[..., Coroutine[Any, Any, SampleGroups]]
    member: FleetMember | None  # None: any of those that serve, as a router picks
    engine: InferenceEngine | None  # of `member` then: a restart changes it

    @property
    def has_current_engine(self) -> bool:
        """Return whether the member still has the engine that the chunk was sent to (a restart
        replaces it); True where a router chose the engine.
        """
        return self.member is None or self.member.engine is self.engine


class OutstandingLoad:
    """Counts chunks and samples on their way to each engine. Chunks of a session are counted apart:
    they fill the engines whatever a `generate` sends, so neither is held up by the limits of the
    other.
    """

    def __init__(self) -> None:
        self._chunk_counts: Counter[tuple[FleetMember | None, bool]] = Counter()
        self._sample_counts: Counter[tuple[FleetMember | None, bool]] = Counter()

    def add_chunk(self, assignment: ChunkAssignment, sign: int = 1) -> None:
        """Count the chunk and its samples for its engine; `sign` -1 takes them off again."""
        key = (assignment.member, assignment.chunk.is_session)
        self._chunk_counts[key] += sign
        self._sample_counts[key] += sign * assignment.chunk.num_samples

    def __add__(self, other: OutstandingLoad) -> OutstandingLoad:
        """Return the sum of both loads."""
        both = OutstandingLoad()
        both._chunk_counts = self._chunk_counts + other._chunk_counts
        both._sample_counts = self._sample_counts + other._sample_counts
        return both

    def count_chunks(self, member: FleetMember | None, is_session: bool) -> int:
        """Return the chunks on their way to this engine (None: the router), either a session's or
        others.
        """
        return self._chunk_counts[member, is_session]

    def count_samples(self, member: FleetMember | None, is_session: bool) -> int:
        """Return the samples on their way to this engine (None: the router), either a session's or
        others.
        """
        return self._sample_counts[member, is_session]

    def count_all_samples(self, member: FleetMember | None) -> int:
        """Return all samples on their way to this engine (None: the router)."""
        return self.count_samples(member, True) + self.count_samples(member, False)


class RequestBalancer(Protocol):
    """Cuts requests into chunks and places them on engines. One thread at a time calls it, the
    thread that holds the fleet's lock.
    """

    def cut_chunks(
        self, requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool
    ) -> list[RequestChunk]:
        """Cut requests into the chunks that travel, by the configuration alone. `is_isolated`: see
        `chunk_sizes.divide_groups_into_chunks`.
        """

    def place_chunk(
        self,
        chunk: RequestChunk,
        serving_members: Sequence[FleetMember],
        load: OutstandingLoad,
        version: int | None,
    ) -> ChunkAssignment | None:
        """Choose where the chunk goes; None where nothing has room now, and the fleet asks again in
        a moment. Return at once.

        `serving_members`: at least one. `version`: of the weights that they serve. Raise
        EngineError where the chunk can never be sent.
        """

    def abort_waiting_calls(self, call_names: Collection[str]) -> None:
        """Abort the calls with these names that wait in the balancer's client and have reached no
        engine yet, or all such calls where `call_names` is empty.
        """

    def is_balancer_failure(self, error: EngineError) -> bool:
        """Return whether this error of a call is the balancer's own, so that no engine is to
        blame.
        """

    def close(self) -> None:
        """Stop the processes and clients of the balancer. Safe to call twice."""


class LeastOutstandingBalancer:
    """Sends each chunk to the engine that it prefers, else to the engine with the fewest
    outstanding samples, and a failed chunk to another engine where there is one. An engine has at
    most two chunks of a `generate` at once, and as many of a session as keep it full.
    """

    def cut_chunks(
        self, requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool
    ) -> list[RequestChunk]:
        """Cut the requests as the function `cut_chunks` does."""
        return cut_chunks(requests, num_engines, is_isolated)

    def place_chunk(
        self,
        chunk: RequestChunk,
        serving_members: Sequence[FleetMember],
        load: OutstandingLoad,
        version: int | None,
    ) -> ChunkAssignment | None:
        """Assign the chunk to the engine that it prefers, where that one serves the version of the
        preference and has room, else to the engine with the fewest outstanding samples. An engine
        that has failed with the chunk comes last. Return None where the engine is full.
        """
        fresh = [
            member for member in serving_members if member.name not in chunk.failure_by_engine
        ] or serving_members
        member = _find_preferred_member(chunk, fresh, version)
        if member is None or _is_full(member, chunk, load):
            member = min(fresh, key=load.count_all_samples)
        if _is_full(member, chunk, load):
            return None
        return ChunkAssignment(
            chunk, member.name, member.engine.generate_async, member, member.engine
        )

    def abort_waiting_calls(self, call_names: Collection[str]) -> None:
        """Do nothing: no call waits in the balancer."""

    def is_balancer_failure(self, error: EngineError) -> bool:
        """Return False: every failure is an engine's."""
        return False

    def close(self) -> None:
        """Do nothing: the balancer has started nothing."""


def _find_preferred_member(
    chunk: RequestChunk, members: Sequence[FleetMember], version: int | None
) -> FleetMember | None:
    """Return the member that the chunk prefers; None where there is no such member, or its cache is
    of other weights.
    """
    preference = chunk.preference
    if preference is None or preference.version != version:
        return None
    return next((member for member in members if member.name == preference.member_name), None)


def _is_full(member: FleetMember, chunk: RequestChunk, load: OutstandingLoad) -> bool:
    """Return whether an engine has as much work of the chunk's kind as it should have at once."""
    if chunk.is_session:
        return load.count_samples(member, True) >= compute_session_sample_limit(member)
    return load.count_chunks(member, False) >= CHUNKS_IN_FLIGHT


def compute_session_sample_limit(member: FleetMember) -> int:
    """Return how many samples of a session to send to this engine at once, so that its batch stays
    full while other samples of unfinished groups have ended.
    """
    return OVERFILL_FACTOR * (member.max_running_samples or _DEFAULT_MAX_RUNNING)
