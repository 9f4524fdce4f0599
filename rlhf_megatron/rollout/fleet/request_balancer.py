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


@dataclass(eq=False, slots=True)
class RequestChunk:
    """Neighbouring groups that travel together."""

    start: int  # index of the first request
    requests: Sequence[GenerateRequest]
    failure_by_engine: dict[str, str] = field(
        default_factory=dict
    )  # engine name -> what it said last
    num_failures: int = 0
    num_driver_losses: int = 0  # with drivers that ended
    is_session: bool = False  # of a session

    @property
    def num_samples(self) -> int:
        return sum(len(request.seeds) for request in self.requests)


def cut_chunks(
    requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool = False
) -> list[RequestChunk]:
    """See `sizes.cut_sizes`."""
    sizes = [len(request.seeds) for request in requests]
    return [
        RequestChunk(run.start, requests[run.start : run.stop])
        for run in divide_groups_into_chunks(sizes, num_engines, is_isolated)
    ]


def select_unknown_chunks(
    chunks: Sequence[RequestChunk], known_indexes: Container[int], is_isolated: bool
) -> list[RequestChunk]:
    """Returns the pieces still to ask for. `is_isolated`: a piece that lacks something is asked for
    whole, since what an engine answers depends on what it decodes together.
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
    """The stretches of start .. start + count - 1 without a known index."""
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
    generate: Callable[
        ..., Coroutine[Any, Any, SampleGroups]
    ]  # as `InferenceEngine.generate_async`
    member: FleetMember | None  # None: any of those that serve, as a router picks
    engine: InferenceEngine | None  # of `member` then: a restart changes it

    @property
    def has_current_engine(self) -> bool:
        """The engine that it was sent to is still the one of its name, or is not known."""
        return self.member is None or self.member.engine is self.engine


class OutstandingLoad:
    """Counts pieces and samples on their way to each engine. Open pieces, a session's, are counted
    apart: they fill the engines whatever a `generate` asks for, so neither is held up by the
    limits of the other.
    """

    def __init__(self) -> None:
        self._chunk_counts: Counter[tuple[FleetMember | None, bool]] = Counter()
        self._sample_counts: Counter[tuple[FleetMember | None, bool]] = Counter()

    def add_chunk(self, assignment: ChunkAssignment, sign: int = 1) -> None:
        """`sign`: -1 where it is on its way no more."""
        key = (assignment.member, assignment.chunk.is_session)
        self._chunk_counts[key] += sign
        self._sample_counts[key] += sign * assignment.chunk.num_samples

    def __add__(self, other: OutstandingLoad) -> OutstandingLoad:
        both = OutstandingLoad()
        both._chunk_counts = self._chunk_counts + other._chunk_counts
        both._sample_counts = self._sample_counts + other._sample_counts
        return both

    def count_chunks(self, member: FleetMember | None, is_session: bool) -> int:
        return self._chunk_counts[member, is_session]

    def count_samples(self, member: FleetMember | None, is_session: bool) -> int:
        return self._sample_counts[member, is_session]

    def count_all_samples(self, member: FleetMember | None) -> int:
        return self.count_samples(member, True) + self.count_samples(member, False)


class RequestBalancer(Protocol):
    """One thread at a time calls it, the one that has the fleet's lock."""

    def cut_chunks(
        self, requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool
    ) -> list[RequestChunk]:
        """Cuts requests into the pieces that travel, by the configuration alone. `is_isolated`:
        see `cut_chunks`.
        """

    def place_chunk(
        self,
        chunk: RequestChunk,
        serving_members: Sequence[FleetMember],
        load: OutstandingLoad,
        version: int | None,
    ) -> ChunkAssignment | None:
        """Chooses where that piece goes; None: nowhere yet, it is asked again in a moment.
        Returns at once.

        `serving_members`: at least one. `version`: of the weights that they serve. Raises
        EngineError where it will never go.
        """

    def abort_waiting_calls(self, call_names: Collection[str]) -> None:
        """End the calls of these names that have reached no engine yet;
        without names all of them.
        """

    def is_balancer_failure(self, error: EngineError) -> bool:
        """Whether a failed piece says nothing about the engines."""

    def close(self) -> None:
        """Stop what was started for it. Safe to call twice."""


class LeastOutstandingBalancer:
    """Send each piece to the engine with the fewest outstanding samples, and a failed piece to
    another engine where there is one. An engine has two pieces of a `generate` at once; of a
    session as many as keep it full.
    """

    def cut_chunks(
        self, requests: Sequence[GenerateRequest], num_engines: int, is_isolated: bool
    ) -> list[RequestChunk]:
        return cut_chunks(requests, num_engines, is_isolated)

    def place_chunk(
        self,
        chunk: RequestChunk,
        serving_members: Sequence[FleetMember],
        load: OutstandingLoad,
        version: int | None,
    ) -> ChunkAssignment | None:
        fresh = [
            member for member in serving_members if member.name not in chunk.failure_by_engine
        ] or serving_members
        member = min(fresh, key=load.count_all_samples)
        if chunk.is_session:
            is_full = load.count_samples(member, True) >= compute_session_sample_limit(member)
        else:
            is_full = load.count_chunks(member, False) >= CHUNKS_IN_FLIGHT
        return (
            None
            if is_full
            else ChunkAssignment(
                chunk, member.name, member.engine.generate_async, member, member.engine
            )
        )

    def abort_waiting_calls(self, call_names: Collection[str]) -> None:
        pass

    def is_balancer_failure(self, error: EngineError) -> bool:
        return False

    def close(self) -> None:
        pass


def compute_session_sample_limit(member: FleetMember) -> int:
    """Samples of a session that keep the engine's batch full while others of unfinished
    groups have ended.
    """
    return OVERFILL_FACTOR * (member.max_running_samples or _DEFAULT_MAX_RUNNING)
