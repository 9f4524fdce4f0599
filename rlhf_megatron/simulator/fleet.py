"""The engines of a simulation, and how work is spread over them, as rollout/ does it in a run.

A clock counts the tokens that each running response of an engine got since the beginning; a response of L tokens that
starts at clock c ends at c + L, so a heap of those ends is all that is kept, and an event costs O(log n).

A piece of work goes to the engine with the fewest samples of pieces that are not whole yet; where that one is full,
this piece and those behind it wait."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlhf_megatron.rollout.sizes import OVERFILL, cut_sizes
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
        """Return the busy seconds of all engines together."""
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
    """The pieces of a generate call."""
    return [[groups[i] for i in run] for run in cut_sizes([len(group.lengths) for group in groups], num_engines)]


@dataclass(eq=False)
class RunningGroup:
    """A prompt with its responses, as engines have it."""

    number: int
    attempt: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    num_left: int = 0  # responses that are not done
    is_given_up: bool = False
    first_versions: list[int] = field(default_factory=list)  # of each response that got in, in that order


class Engine:
    """Told by the simulation what happens, at times that never decrease. `seconds_a_token[n]`: while n run."""

    def __init__(
        self, number: int, seconds_a_token: Sequence[float], prefill_tokens_per_s: float, has_history: bool = False
    ) -> None:
        """Make an engine with one slot for each entry of `seconds_a_token` after the first, which is for none."""
        self.number = number
        self.version = 0  # of its weights
        self.num_running = 0
        self.num_outstanding = 0  # running and waiting
        self.running: list[tuple[float, int, int, RunningGroup]] = []  # (end on the clock, order, tokens, group)
        self.history: list[tuple[float, int]] | None = [] if has_history else None  # (time, how many run from then on)
        self.stamp = 0  # changes with whatever changes the time of the next end
        self._waiting: deque[tuple[int, RunningGroup]] = deque()  # (tokens, group)
        self._clock = 0.0  # tokens
        self._when = 0.0  # the time at which the clock stood so
        self._held_until = 0.0  # nothing is decoded before
        self._paused_at: float | None = None
        self._seconds_a_token = seconds_a_token
        self._seconds_a_prompt_token = 1.0 / prefill_tokens_per_s
        self.slots = len(seconds_a_token) - 1
        self._count = 0
        self._cached: set[int] = set()  # groups whose prompt it has computed
        self._busy_s = 0.0

    def submit(self, now: float, group: RunningGroup) -> None:
        """All responses of a group."""
        self._advance(now)
        group.num_left = len(group.lengths)
        for length in group.lengths:
            self._waiting.append((length, group))
        self.num_outstanding += len(group.lengths)
        self._fill(now)

    def next_end(self) -> float:
        """Return when the next response ends if nothing else happens; infinity when none will."""
        self._drop_given_up()
        if not self.running or self._paused_at is not None:
            return math.inf
        start = self._held_until if self._held_until > self._when else self._when
        return start + max(0.0, self.running[0][0] - self._clock) * self._seconds_a_token[self.num_running]

    def take_ended(self, now: float) -> list[RunningGroup]:
        """Return the groups whose last response ends at the time that `next_end` gave."""
        self._advance(now)
        running = self.running
        self._clock = max(self._clock, running[0][0])  # the time was made from it, with rounding
        done = []
        while running and running[0][0] <= self._clock:
            group = heapq.heappop(running)[3]
            if not group.is_given_up:
                self.num_running -= 1
                self.num_outstanding -= 1
                group.num_left -= 1
                if not group.num_left:
                    done.append(group)
        self._fill(now)
        return done

    def give_up(self, now: float, group: RunningGroup) -> None:
        """End what is left of the group, without a result."""
        self._advance(now)
        num_waiting = sum(waiting is group for _, waiting in self._waiting)
        self._waiting = deque(item for item in self._waiting if item[1] is not group)
        self.num_running -= group.num_left - num_waiting
        self.num_outstanding -= group.num_left
        group.is_given_up = True
        self._drop_given_up()
        self._fill(now)

    def pause(self, now: float) -> None:
        """Stop decoding for a weight sync, until `resume`."""
        self._advance(now)
        self._paused_at = now
        self._changed(now)

    def resume(self, now: float, version: int, recomputes: bool) -> None:
        """Go on with new weights. `recomputes`: the keys and values of running responses are computed again."""
        self._advance(now)
        self._paused_at = None
        self.version = version
        self._cached = set()
        if recomputes:
            tokens = 0.0
            for end, _, length, group in self.running:
                if not group.is_given_up:
                    tokens += length - (end - self._clock)
                    if group.number not in self._cached:
                        self._cached.add(group.number)
                        tokens += group.prompt_tokens
            self._hold(now, tokens * self._seconds_a_prompt_token)
        self._fill(now)

    def busy_s(self, now: float) -> float:
        """Return the seconds until now in which it decoded."""
        self._advance(now)
        return self._busy_s

    def _advance(self, now: float) -> None:
        if self.num_running and self._paused_at is None:
            self._busy_s += now - self._when
            start = self._held_until if self._held_until > self._when else self._when
            if now > start:
                self._clock += (now - start) / self._seconds_a_token[self.num_running]
        self._when = now

    def _hold(self, now: float, seconds: float) -> None:
        self._held_until = max(self._held_until, now) + seconds

    def _fill(self, now: float) -> None:
        """Give free slots to waiting groups. A prompt is computed once a group; meanwhile nothing is decoded."""
        if self._paused_at is None:
            waiting, slots = self._waiting, self.slots
            while waiting and self.num_running < slots:
                length, group = waiting.popleft()
                self._count += 1
                if group.number not in self._cached:
                    self._cached.add(group.number)
                    self._hold(now, group.prompt_tokens * self._seconds_a_prompt_token)
                heapq.heappush(self.running, (self._clock + length, self._count, length, group))
                group.first_versions.append(self.version)
                self.num_running += 1
        self._changed(now)

    def _drop_given_up(self) -> None:
        while self.running and self.running[0][3].is_given_up:
            heapq.heappop(self.running)

    def _changed(self, now: float) -> None:
        self.stamp += 1
        if self.history is not None:
            self.history.append((now, 0 if self._paused_at is not None else self.num_running))
