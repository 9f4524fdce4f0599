"""Who spreads requests over the engines that serve: one interface, and the run's own way to do it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_megatron.rollout.chunks import Chunk, cut
from rlhf_megatron.rollout.engine import Engine, EngineError, GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.sizes import CHUNKS_IN_FLIGHT, OVERFILL
from rlhf_megatron.rollout.supervisor import Member

Groups = list[list[GeneratedSample]]
_MAX_RUNNING = 256  # samples, of an engine that does not say what it decodes at once


@dataclass(frozen=True, eq=False)
class Sent:
    """A piece of work on its way, and to whom."""

    chunk: Chunk
    name: str  # of the engine or router, in messages
    generate: Callable[..., Groups]  # as `Engine.generate`
    member: Member | None  # None: any of those that serve, as a router picks
    engine: Engine | None  # of `member` then: a restart changes it

    @property
    def is_current(self) -> bool:
        """The engine that it was sent to is still the one of its name, or is not known."""
        return self.member is None or self.member.engine is self.engine


class Load:
    """What is on its way: pieces and samples of each engine. Open pieces, a session's, are counted apart: they fill the
    engines whatever a `generate` asks for, so neither is held up by the limits of the other."""

    def __init__(self, running: Iterable[Sent] = ()) -> None:
        self._pieces: dict[tuple[Member | None, bool], int] = {}
        self._samples: dict[tuple[Member | None, bool], int] = {}
        for sent in running:
            self.add(sent)

    def add(self, sent: Sent) -> None:
        key = (sent.member, sent.chunk.is_open)
        self._pieces[key] = self._pieces.get(key, 0) + 1
        self._samples[key] = self._samples.get(key, 0) + sent.chunk.num_samples

    def pieces(self, member: Member | None, is_open: bool) -> int:
        return self._pieces.get((member, is_open), 0)

    def samples(self, member: Member | None, is_open: bool) -> int:
        return self._samples.get((member, is_open), 0)

    def all_pieces(self, is_open: bool) -> int:
        return sum(count for (_, of_open), count in self._pieces.items() if of_open == is_open)

    def all_samples(self, member: Member | None) -> int:
        return self.samples(member, True) + self.samples(member, False)


class Balancer(Protocol):
    """One thread at a time calls it, the one whose turn it is."""

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        """The pieces that travel, by the configuration alone. `is_closed`: see `chunks.cut`."""

    def place(self, chunk: Chunk, serving: Sequence[Member], load: Load, version: int | None) -> Sent | None:
        """Where that piece goes. None: nowhere yet; it is asked again in a moment. Returns at once.

        `serving`: at least one. `version`: of the weights that they serve. Raises EngineError where it will never go.
        """

    def blames_itself(self, error: EngineError) -> bool:
        """That a piece failed says nothing about the engines."""

    def close(self) -> None:
        """Stop what was started for it. Safe to call twice."""


class LeastOutstanding:
    """Each piece to the engine with the fewest outstanding samples, and a piece that failed to another engine where
    there is one. An engine has two pieces of a `generate` at once; of a session as many as keep it full."""

    def __init__(self) -> None:
        self.max_calls = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # of a session: each has a connection

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        return cut(requests, num_engines, is_closed)

    def place(self, chunk: Chunk, serving: Sequence[Member], load: Load, version: int | None) -> Sent | None:
        fresh = [member for member in serving if member.name not in chunk.failures] or serving
        member = min(fresh, key=load.all_samples)
        if chunk.is_open:
            is_full = load.samples(member, True) >= samples_in_flight(member)
            is_full = is_full or load.all_pieces(True) >= self.max_calls
        else:
            is_full = load.pieces(member, False) >= CHUNKS_IN_FLIGHT
        return None if is_full else Sent(chunk, member.name, member.engine.generate, member, member.engine)

    def blames_itself(self, error: EngineError) -> bool:
        return False

    def close(self) -> None:
        pass


def samples_in_flight(member: Member) -> int:
    """Of a session, so that the engine's batch stays full while samples of unfinished groups have ended."""
    return OVERFILL * (member.max_running or _MAX_RUNNING)
