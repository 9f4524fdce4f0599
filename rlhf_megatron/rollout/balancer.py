"""Who spreads requests over the engines that serve: one interface, and the run's own way to do it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_megatron.rollout.chunks import CHUNKS_IN_FLIGHT, Chunk, cut
from rlhf_megatron.rollout.engine import Engine, EngineError, GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.supervisor import Member

Groups = list[list[GeneratedSample]]


@dataclass(frozen=True, eq=False)
class Sent:
    """A piece of work on its way, and to whom."""

    chunk: Chunk
    name: str  # of the engine or router, in messages
    generate: Callable[[Sequence[GenerateRequest], float], Groups]
    member: Member | None  # None: any of those that serve, as a router picks
    engine: Engine | None  # of `member` then: a restart changes it

    @property
    def is_current(self) -> bool:
        """The engine that it was sent to is still the one of its name, or is not known."""
        return self.member is None or self.member.engine is self.engine


class Balancer(Protocol):
    """One thread calls it, the fleet's."""

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        """The pieces that travel, by the configuration alone. `is_closed`: see `chunks.cut`."""

    def place(
        self, chunk: Chunk, serving: Sequence[Member], running: Collection[Sent], version: int | None
    ) -> Sent | None:
        """Where that piece goes. None: nowhere yet; it is asked again in a moment. Returns at once.

        `serving`: at least one. `version`: of the weights that they serve. Raises EngineError where it will never go.
        """

    def blames_itself(self, error: EngineError) -> bool:
        """That a piece failed says nothing about the engines."""

    def close(self) -> None:
        """Stop what was started for it. Safe to call twice."""


class LeastOutstanding:
    """Each piece to the engine with the fewest outstanding samples, two pieces an engine at once, and a piece that
    failed to another engine where there is one."""

    def cut(self, requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool) -> list[Chunk]:
        return cut(requests, num_engines, is_closed)

    def place(
        self, chunk: Chunk, serving: Sequence[Member], running: Collection[Sent], version: int | None
    ) -> Sent | None:
        load = {member: [0, 0] for member in serving}  # chunks, samples
        for sent in running:
            if sent.member in load:
                load[sent.member][0] += 1
                load[sent.member][1] += sent.chunk.num_samples
        fresh = [member for member in load if member.name not in chunk.failures] or list(load)
        member = min(fresh, key=lambda candidate: load[candidate][1])
        if load[member][0] >= CHUNKS_IN_FLIGHT:
            return None
        return Sent(chunk, member.name, member.engine.generate, member, member.engine)

    def blames_itself(self, error: EngineError) -> bool:
        return False

    def close(self) -> None:
        pass
