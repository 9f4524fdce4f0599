"""The engines of a simulation, and how work is spread over them: as rollout/balancer.py and rollout/session.py do it.

A piece of work goes to the engine with the fewest samples of pieces that are not whole yet, the first of several; where
that one is full, this piece and those behind it wait. An engine is full with `most_pieces` (of a generate call), or
with so many samples that its slots stay in use while groups wait for their last ones (of a session).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rlhf_megatron.rollout.sizes import CHUNK_SAMPLES, CHUNKS_IN_FLIGHT, OVERFILL
from rlhf_megatron.simulator.engine import Engine, RunningGroup
from rlhf_megatron.simulator.plan import Plan


@dataclass(eq=False)
class Piece:
    """Groups that travel together and come back together."""

    groups: tuple[RunningGroup, ...]
    num_samples: int
    num_left: int  # groups that are not whole
    engine: Engine | None = None  # None: it waits


class Fleet:
    """`later(when, happens)` has something happen, which tells whether schedules are to be asked; `came` gets pieces
    that are whole and tells the same. `most_pieces` None: those of a session."""

    def __init__(
        self,
        plan: Plan,
        later: Callable[[float, Callable[[], bool]], None],
        came: Callable[[Piece], bool],
        most_pieces: int | None,
        has_history: bool,
    ) -> None:
        self.engines = [
            Engine(number, plan.seconds_a_token, plan.prefill_tokens_per_s, has_history)
            for number in range(plan.num_engines)
        ]
        self._later = later
        self._came = came
        self._waiting: deque[Piece] = deque()
        self._samples = [0] * plan.num_engines  # of the pieces that an engine has
        self._pieces = [0] * plan.num_engines
        self._most_pieces = math.inf if most_pieces is None else most_pieces
        self._most_samples = OVERFILL * self.engines[0].slots if most_pieces is None else math.inf
        self._piece_of: dict[RunningGroup, Piece] = {}

    def submit(self, now: float, groups: Sequence[RunningGroup]) -> None:
        """Groups of one piece. To an engine at once where one has room: `dispatch` is not needed behind it."""
        piece = Piece(tuple(groups), sum(len(group.lengths) for group in groups), len(groups))
        for group in groups:
            self._piece_of[group] = piece
        self._waiting.append(piece)
        self._dispatch(now)

    def give_up(self, now: float, group: RunningGroup) -> None:
        """A group that is a piece of its own. It frees its place at once."""
        piece = self._piece_of.pop(group, None)
        group.is_given_up = True
        if piece is None:
            return  # it has come
        if piece.engine is None:
            self._waiting.remove(piece)
            return
        piece.engine.give_up(now, group)
        self._watch(now, piece.engine)
        self._leaves(now, piece)

    def pause(self, now: float) -> None:
        for engine in self.engines:
            engine.pause(now)

    def resume(self, now: float, version: int, recomputes: bool) -> None:
        for engine in self.engines:
            engine.resume(now, version, recomputes)
            self._watch(now, engine)

    def busy_s(self, now: float) -> float:
        """Of all engines together."""
        return sum(engine.busy_s(now) for engine in self.engines)

    def _dispatch(self, now: float) -> None:
        while self._waiting:
            number = self._samples.index(min(self._samples))
            if self._pieces[number] >= self._most_pieces or self._samples[number] >= self._most_samples:
                return
            piece = self._waiting.popleft()
            piece.engine = self.engines[number]
            self._samples[number] += piece.num_samples
            self._pieces[number] += 1
            for group in piece.groups:
                piece.engine.submit(now, group)
            self._watch(now, piece.engine)

    def _watch(self, now: float, engine: Engine) -> None:
        when = engine.next_end()
        if when < math.inf:
            self._later(max(when, now), partial(self._ends, engine, engine.stamp, max(when, now)))

    def _ends(self, engine: Engine, stamp: int, now: float) -> bool:
        if stamp != engine.stamp:
            return False  # something else has happened to that engine since
        done = engine.take_ended(now)
        self._watch(now, engine)
        for group in done:
            piece = self._piece_of[group]
            piece.num_left -= 1
            if not piece.num_left:
                self._later(now, partial(self._is_whole, piece, now))
        return False

    def _is_whole(self, piece: Piece, now: float) -> bool:
        if any(group.is_given_up for group in piece.groups):
            return False
        for group in piece.groups:
            del self._piece_of[group]
        self._leaves(now, piece)
        return self._came(piece)

    def _leaves(self, now: float, piece: Piece) -> None:
        assert piece.engine is not None
        self._samples[piece.engine.number] -= piece.num_samples
        self._pieces[piece.engine.number] -= 1
        self._dispatch(now)


def cut(groups: Sequence[RunningGroup], num_engines: int) -> list[list[RunningGroup]]:
    """The pieces of a generate call, as `rollout.chunks.cut` makes them."""
    total = sum(len(group.lengths) for group in groups)
    num_pieces = 1 if num_engines == 1 else CHUNKS_IN_FLIGHT * num_engines
    target = min(CHUNK_SAMPLES, -(-total // num_pieces))
    pieces: list[list[RunningGroup]] = []
    size = 0
    for group in groups:
        if not pieces or size + len(group.lengths) > target:
            pieces.append([])
            size = 0
        pieces[-1].append(group)
        size += len(group.lengths)
    return pieces
