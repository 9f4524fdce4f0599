"""How the requests of a generate call are cut into pieces: by the configuration alone, whatever fails or is known."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.rollout.engine import GenerateRequest
from rlhf_megatron.rollout.sizes import CHUNK_SAMPLES, CHUNKS_IN_FLIGHT


@dataclass(eq=False)
class Chunk:
    """Neighbouring groups that travel together."""

    start: int  # index of the first request
    requests: Sequence[GenerateRequest]
    failures: dict[str, str] = field(default_factory=dict)  # engine name -> what it said last
    num_failures: int = 0
    is_open: bool = False  # of a session

    @property
    def num_samples(self) -> int:
        return sum(len(request.seeds) for request in self.requests)


def cut(requests: Sequence[GenerateRequest], num_engines: int, is_closed: bool = False) -> list[Chunk]:
    """One piece for one engine, two for each of several, none over `CHUNK_SAMPLES` unless a group alone is.

    `num_engines`: of the configuration, also when fewer live. `is_closed`: an engine decodes a piece by itself; then
    there are two for one engine too, so that a failure does not lose everything.
    """
    total = sum(len(request.seeds) for request in requests)
    pieces = 1 if num_engines == 1 and not is_closed else CHUNKS_IN_FLIGHT * num_engines
    target = min(CHUNK_SAMPLES, -(-total // pieces))
    chunks: list[Chunk] = []
    start = size = 0
    for index, request in enumerate(requests):
        if size and size + len(request.seeds) > target:
            chunks.append(Chunk(start, requests[start:index]))
            start, size = index, 0
        size += len(request.seeds)
    return [*chunks, Chunk(start, requests[start:])] if requests else chunks


def without_known(chunks: Sequence[Chunk], known: Container[int], is_closed: bool) -> list[Chunk]:
    """What is left to ask for. `is_closed`: a piece of which something is missing is asked for whole, since what an
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
