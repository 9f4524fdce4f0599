"""The interface of what spreads requests over the engines that serve, and the run's own balancer.

The requests of a generate call are cut into pieces by the configuration alone, whatever fails or is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_megatron.rollout.engine import Engine, EngineError, GenerateRequest, Groups
from rlhf_megatron.rollout.fleet.supervisor import Member
from rlhf_megatron.rollout.sizes import CHUNKS_IN_FLIGHT, OVERFILL, cut_sizes


@dataclass(eq=False, slots=True)
class Chunk:
    """Neighbouring groups that travel together."""

    start: int  # index of the first request
    requests: Sequence[GenerateRequest]
    failures: dict[str, str] = field(default_factory=dict)  # engine name -> what it said last
    num_failures: int = 0
    num_losses: int = 0  # with drivers that ended
    is_open: bool = False  # of a session

    @property
    def num_samples(self) -> int:
        return sum(len(request.seeds) for request in self.requests)


def cut(requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool = False) -> list[Chunk]:
    """See `sizes.cut_sizes`."""
    sizes = [len(request.seeds) for request in requests]
    return [Chunk(run.start, requests[run.start : run.stop]) for run in cut_sizes(sizes, num_engines, is_closed)]


def without_known(chunks: Sequence[Chunk], known: Container[int], is_closed: bool) -> list[Chunk]:
    """Returns the pieces still to ask for. `is_closed`: a piece that lacks something is asked for whole, since what an
    engine answers depends on what it decodes together."""
    left: list[Chunk] = []
    for chunk in chunks:
        runs = list(unknown_runs(chunk.start, len(chunk.requests), known))
        if is_closed and runs:
            left.append(chunk)
        elif not is_closed:
            left += [Chunk(run.start, chunk.requests[run.start - chunk.start :][: len(run)]) for run in runs]
    return left


def unknown_runs(start: int, count: int, known: Container[int]) -> Iterator[range]:
    """The stretches of start .. start + count - 1 without a known index."""
    first = start
    for index in range(start, start + count + 1):
        if index == start + count or index in known:
            if index > first:
                yield range(first, index)
            first = index + 1


_MAX_RUNNING = 256  # samples, of an engine that does not say what it decodes at once


@dataclass(frozen=True, eq=False, slots=True)
class Sent:
    """A piece of work on its way, and to whom."""

    chunk: Chunk
    name: str  # of the engine or router, in messages
    generate: Callable[..., Coroutine[Any, Any, Groups]]  # as `Engine.generate_async`
    member: Member | None  # None: any of those that serve, as a router picks
    engine: Engine | None  # of `member` then: a restart changes it

    @property
    def is_current(self) -> bool:
        """The engine that it was sent to is still the one of its name, or is not known."""
        return self.member is None or self.member.engine is self.engine


class Load:
    """Counts pieces and samples on their way to each engine. Open pieces, a session's, are counted apart: they fill the
    engines whatever a `generate` asks for, so neither is held up by the limits of the other."""

    def __init__(self) -> None:
        self._pieces: Counter[tuple[Member | None, bool]] = Counter()
        self._samples: Counter[tuple[Member | None, bool]] = Counter()

    def add(self, sent: Sent, times: int = 1) -> None:
        """`times`: -1 where it is on its way no more."""
        key = (sent.member, sent.chunk.is_open)
        self._pieces[key] += times
        self._samples[key] += times * sent.chunk.num_samples

    def __add__(self, other: Load) -> Load:
        both = Load()
        both._pieces, both._samples = self._pieces + other._pieces, self._samples + other._samples
        return both

    def pieces(self, member: Member | None, is_open: bool) -> int:
        return self._pieces[member, is_open]

    def samples(self, member: Member | None, is_open: bool) -> int:
        return self._samples[member, is_open]

    def all_samples(self, member: Member | None) -> int:
        return self.samples(member, True) + self.samples(member, False)


class Balancer(Protocol):
    """One thread at a time calls it, the one that has the fleet's lock."""

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        """Cuts requests into the pieces that travel, by the configuration alone. `is_closed`: see `cut`."""

    def place(self, chunk: Chunk, serving: Sequence[Member], load: Load, version: int | None) -> Sent | None:
        """Chooses where that piece goes; None: nowhere yet, it is asked again in a moment. Returns at once.

        `serving`: at least one. `version`: of the weights that they serve. Raises EngineError where it will never go.
        """

    def abort(self, names: Collection[str]) -> None:
        """End the calls of these names that have reached no engine yet; without names all of them."""

    def blames_itself(self, error: EngineError) -> bool:
        """Whether a failed piece says nothing about the engines."""

    def close(self) -> None:
        """Stop what was started for it. Safe to call twice."""


class LeastOutstanding:
    """Send each piece to the engine with the fewest outstanding samples, and a failed piece to another engine where
    there is one. An engine has two pieces of a `generate` at once; of a session as many as keep it full.
    """

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        return cut(requests, num_engines, is_closed)

    def place(self, chunk: Chunk, serving: Sequence[Member], load: Load, version: int | None) -> Sent | None:
        fresh = [member for member in serving if member.name not in chunk.failures] or serving
        member = min(fresh, key=load.all_samples)
        if chunk.is_open:
            is_full = load.samples(member, True) >= samples_in_flight(member)
        else:
            is_full = load.pieces(member, False) >= CHUNKS_IN_FLIGHT
        return None if is_full else Sent(chunk, member.name, member.engine.generate_async, member, member.engine)

    def abort(self, names: Collection[str]) -> None:
        pass

    def blames_itself(self, error: EngineError) -> bool:
        return False

    def close(self) -> None:
        pass


def samples_in_flight(member: Member) -> int:
    """Samples of a session that keep the engine's batch full while others of unfinished groups have ended."""
    return OVERFILL * (member.max_running or _MAX_RUNNING)
