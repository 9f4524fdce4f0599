"""The engines of a simulation, and how work is spread over them, as rollout/ does it in a run.

A clock counts the tokens that each running response of an engine got since the beginning; a
response of L tokens that starts at clock c ends at c + L, so a heap of those ends is all that is
kept, and an event costs O(log n).

A piece of work goes to the engine with the fewest samples of pieces that are not whole yet; where
that one is full, this piece and those behind it wait.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlhf_megatron.planning.simulator.simulation_plan import SimulationPlan
from rlhf_megatron.rollout.chunk_sizes import OVERFILL_FACTOR, divide_groups_into_chunks


@dataclass(eq=False)
class SimulatedPiece:
    """Groups that travel together and come back together."""

    groups: tuple[RunningGroup, ...]
    num_samples: int
    num_unfinished_groups: int  # groups that are not whole
    engine: SimulatedEngine | None = None  # None: it waits


class SimulatedFleet:
    """`later(when, happens)` has something happen, which tells whether schedules are to be asked;
    `came` gets pieces that are whole and tells the same. `max_pieces` None: those of a session.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        schedule_event: Callable[[float, Callable[[], bool]], None],
        on_piece_done: Callable[[SimulatedPiece], bool],
        max_pieces: int | None,
        has_history: bool,
    ) -> None:
        """Make the engines of a plan. `schedule_event(time, handler)` adds an event to the
        simulation. `on_piece_done(piece)` is called when all groups of a piece are finished; like
        an event handler it returns whether to ask the schedule. `max_pieces`: pieces that an engine
        has at once; None: as many as a generation session gives it.
        """
        self.engines = [
            SimulatedEngine(number, plan.seconds_per_token, plan.prefill_tokens_per_s, has_history)
            for number in range(plan.num_engines)
        ]
        self._schedule_event = schedule_event
        self._on_piece_done = on_piece_done
        self._waiting_pieces: deque[SimulatedPiece] = deque()
        self._num_samples_by_engine = [0] * plan.num_engines  # of the pieces that an engine has
        self._num_pieces_by_engine = [0] * plan.num_engines
        self._max_pieces = math.inf if max_pieces is None else max_pieces
        self._max_samples = (
            OVERFILL_FACTOR * self.engines[0].num_slots if max_pieces is None else math.inf
        )
        self._piece_by_group: dict[RunningGroup, SimulatedPiece] = {}

    def submit_piece(self, now: float, groups: Sequence[RunningGroup]) -> None:
        """Submit groups as one piece. The piece goes to an engine at once where an engine has room,
        else it waits.
        """
        piece = SimulatedPiece(
            tuple(groups), sum(len(group.response_lengths) for group in groups), len(groups)
        )
        for group in groups:
            self._piece_by_group[group] = piece
        self._waiting_pieces.append(piece)
        self._dispatch_waiting_pieces(now)

    def abandon_group(self, now: float, group: RunningGroup) -> None:
        """End a group that is a piece of its own, without a result; its place is free at once. Do
        nothing where the group is finished.
        """
        piece = self._piece_by_group.pop(group, None)
        group.is_abandoned = True
        if piece is None:
            return  # it has come
        if piece.engine is None:
            self._waiting_pieces.remove(piece)
            return
        piece.engine.abandon_group(now, group)
        self._schedule_next_end(now, piece.engine)
        self._release_piece(now, piece)

    def pause_engines(self, now: float) -> None:
        """Stop decoding in all engines, for a weight sync."""
        for engine in self.engines:
            engine.pause_decoding(now)

    def resume_engines(self, now: float, policy_version: int, recomputes_cache: bool) -> None:
        """Go on decoding in all engines, with the weights of this version."""
        for engine in self.engines:
            engine.resume_decoding(now, policy_version, recomputes_cache)
            self._schedule_next_end(now, engine)

    def sum_busy_seconds(self, now: float) -> float:
        """Return the seconds in which engines decoded until now, all engines together."""
        return sum(engine.measure_busy_seconds(now) for engine in self.engines)

    def _dispatch_waiting_pieces(self, now: float) -> None:
        """Give waiting pieces, in order, to the engine with the fewest samples, until that engine
        is full.
        """
        while self._waiting_pieces:
            number = self._num_samples_by_engine.index(min(self._num_samples_by_engine))
            if (
                self._num_pieces_by_engine[number] >= self._max_pieces
                or self._num_samples_by_engine[number] >= self._max_samples
            ):
                return
            piece = self._waiting_pieces.popleft()
            piece.engine = self.engines[number]
            self._num_samples_by_engine[number] += piece.num_samples
            self._num_pieces_by_engine[number] += 1
            for group in piece.groups:
                piece.engine.submit_group(now, group)
            self._schedule_next_end(now, piece.engine)

    def _schedule_next_end(self, now: float, engine: SimulatedEngine) -> None:
        """Schedule an event for the next response that ends in the engine, if any will."""
        when = engine.find_next_end()
        if when < math.inf:
            self._schedule_event(
                max(when, now),
                partial(self._finish_responses, engine, engine.change_count, max(when, now)),
            )

    def _finish_responses(self, engine: SimulatedEngine, change_count: int, now: float) -> bool:
        """Finish the responses that end now, and schedule an event for each piece that is complete.
        Do nothing where the engine has changed since the event was scheduled. Return False: the
        schedule is not asked.
        """
        if change_count != engine.change_count:
            return False  # something else has happened to that engine since
        done = engine.finish_ended_responses(now)
        self._schedule_next_end(now, engine)
        for group in done:
            piece = self._piece_by_group[group]
            piece.num_unfinished_groups -= 1
            if not piece.num_unfinished_groups:
                self._schedule_event(now, partial(self._finish_piece, piece, now))
        return False

    def _finish_piece(self, piece: SimulatedPiece, now: float) -> bool:
        """Free the place of a complete piece and report it; ignore a piece that was abandoned.
        Return whether to ask the schedule.
        """
        if any(group.is_abandoned for group in piece.groups):
            return False
        for group in piece.groups:
            del self._piece_by_group[group]
        self._release_piece(now, piece)
        return self._on_piece_done(piece)

    def _release_piece(self, now: float, piece: SimulatedPiece) -> None:
        """Free the place that a piece has in its engine, and dispatch waiting pieces."""
        assert piece.engine is not None
        self._num_samples_by_engine[piece.engine.number] -= piece.num_samples
        self._num_pieces_by_engine[piece.engine.number] -= 1
        self._dispatch_waiting_pieces(now)


def cut_into_pieces(groups: Sequence[RunningGroup], num_engines: int) -> list[list[RunningGroup]]:
    """Divide the groups of a generate call into the pieces that it sends to engines."""
    return [
        [groups[i] for i in run]
        for run in divide_groups_into_chunks(
            [len(group.response_lengths) for group in groups], num_engines
        )
    ]


@dataclass(eq=False)
class RunningGroup:
    """A prompt with its responses, as engines have it."""

    number: int
    attempt: int
    num_prompt_tokens: int
    response_lengths: tuple[int, ...]
    num_unfinished_responses: int = 0  # responses that are not done
    is_abandoned: bool = False
    # of each response that got in, in that order
    first_versions: list[int] = field(default_factory=list)


class SimulatedEngine:
    """Told by the simulation what happens, at times that never decrease.
    `seconds_per_token[n]`: while n run.
    """

    def __init__(
        self,
        number: int,
        seconds_per_token: Sequence[float],
        prefill_tokens_per_s: float,
        has_history: bool = False,
    ) -> None:
        """Make an engine. `seconds_per_token[n]` are the seconds of a token while n responses run;
        the engine has len(seconds_per_token) - 1 slots, because entry 0 is for none.
        """
        self.number = number
        self.policy_version = 0  # of its weights
        self.num_running = 0
        self.num_outstanding = 0  # running and waiting
        # (end on the clock, order, tokens, group)
        self.running_responses: list[tuple[float, int, int, RunningGroup]] = []
        # (time, how many run from then on)
        self.load_history: list[tuple[float, int]] | None = [] if has_history else None
        self.change_count = 0  # changes with whatever changes the time of the next end
        self._waiting_responses: deque[tuple[int, RunningGroup]] = deque()  # (tokens, group)
        self._token_clock = 0.0  # tokens
        self._clock_time_s = 0.0  # the time at which the clock stood so
        self._blocked_until_s = 0.0  # nothing is decoded before
        self._paused_at_s: float | None = None
        self._seconds_per_token = seconds_per_token
        self._seconds_per_prompt_token = 1.0 / prefill_tokens_per_s
        self.num_slots = len(seconds_per_token) - 1
        self._num_started = 0
        self._cached_group_numbers: set[int] = set()  # groups whose prompt it has computed
        self._busy_s = 0.0

    def submit_group(self, now: float, group: RunningGroup) -> None:
        """Queue all responses of a group, and start as many as free slots allow."""
        self._advance_clock(now)
        group.num_unfinished_responses = len(group.response_lengths)
        for length in group.response_lengths:
            self._waiting_responses.append((length, group))
        self.num_outstanding += len(group.response_lengths)
        self._fill_slots(now)

    def find_next_end(self) -> float:
        """Return the time at which the next response ends if nothing else happens; infinity when
        none will.
        """
        self._drop_abandoned_responses()
        if not self.running_responses or self._paused_at_s is not None:
            return math.inf
        start = (
            self._blocked_until_s
            if self._blocked_until_s > self._clock_time_s
            else self._clock_time_s
        )
        return (
            start
            + max(0.0, self.running_responses[0][0] - self._token_clock)
            * self._seconds_per_token[self.num_running]
        )

    def finish_ended_responses(self, now: float) -> list[RunningGroup]:
        """Finish the responses that end at the time that `find_next_end` returned, and return the
        groups whose last response is among them.
        """
        self._advance_clock(now)
        running = self.running_responses
        # the time was made from it, with rounding
        self._token_clock = max(self._token_clock, running[0][0])
        done = []
        while running and running[0][0] <= self._token_clock:
            group = heapq.heappop(running)[3]
            if not group.is_abandoned:
                self.num_running -= 1
                self.num_outstanding -= 1
                group.num_unfinished_responses -= 1
                if not group.num_unfinished_responses:
                    done.append(group)
        self._fill_slots(now)
        return done

    def abandon_group(self, now: float, group: RunningGroup) -> None:
        """End what is left of the group, without a result."""
        self._advance_clock(now)
        num_waiting = sum(waiting is group for _, waiting in self._waiting_responses)
        self._waiting_responses = deque(
            item for item in self._waiting_responses if item[1] is not group
        )
        self.num_running -= group.num_unfinished_responses - num_waiting
        self.num_outstanding -= group.num_unfinished_responses
        group.is_abandoned = True
        self._drop_abandoned_responses()
        self._fill_slots(now)

    def pause_decoding(self, now: float) -> None:
        """Stop decoding for a weight sync, until `resume_decoding`."""
        self._advance_clock(now)
        self._paused_at_s = now
        self._record_change(now)

    def resume_decoding(self, now: float, policy_version: int, recomputes_cache: bool) -> None:
        """Go on decoding with new weights. With `recomputes_cache`, first compute the keys and
        values of running responses again, which takes time.
        """
        self._advance_clock(now)
        self._paused_at_s = None
        self.policy_version = policy_version
        self._cached_group_numbers = set()
        if recomputes_cache:
            tokens = 0.0
            for end, _, length, group in self.running_responses:
                if not group.is_abandoned:
                    tokens += length - (end - self._token_clock)
                    if group.number not in self._cached_group_numbers:
                        self._cached_group_numbers.add(group.number)
                        tokens += group.num_prompt_tokens
            self._block_decoding(now, tokens * self._seconds_per_prompt_token)
        self._fill_slots(now)

    def measure_busy_seconds(self, now: float) -> float:
        """Return the seconds until now in which the engine had running responses and was not
        paused.
        """
        self._advance_clock(now)
        return self._busy_s

    def _advance_clock(self, now: float) -> None:
        """Bring the token clock and the busy seconds up to now."""
        if self.num_running and self._paused_at_s is None:
            self._busy_s += now - self._clock_time_s
            start = (
                self._blocked_until_s
                if self._blocked_until_s > self._clock_time_s
                else self._clock_time_s
            )
            if now > start:
                self._token_clock += (now - start) / self._seconds_per_token[self.num_running]
        self._clock_time_s = now

    def _block_decoding(self, now: float, seconds: float) -> None:
        """Let nothing be decoded for so many seconds from now, or from the end of an earlier
        block.
        """
        self._blocked_until_s = max(self._blocked_until_s, now) + seconds

    def _fill_slots(self, now: float) -> None:
        """Start waiting responses in free slots. The prompt of a group is computed once; meanwhile
        nothing is decoded.
        """
        if self._paused_at_s is None:
            waiting = self._waiting_responses
            slots = self.num_slots
            while waiting and self.num_running < slots:
                length, group = waiting.popleft()
                self._num_started += 1
                if group.number not in self._cached_group_numbers:
                    self._cached_group_numbers.add(group.number)
                    self._block_decoding(
                        now, group.num_prompt_tokens * self._seconds_per_prompt_token
                    )
                heapq.heappush(
                    self.running_responses,
                    (self._token_clock + length, self._num_started, length, group),
                )
                group.first_versions.append(self.policy_version)
                self.num_running += 1
        self._record_change(now)

    def _drop_abandoned_responses(self) -> None:
        """Remove abandoned responses from the top of the heap."""
        while self.running_responses and self.running_responses[0][3].is_abandoned:
            heapq.heappop(self.running_responses)

    def _record_change(self, now: float) -> None:
        """Note that the time of the next end may have changed, and append the load to the history
        where it is kept.
        """
        self.change_count += 1
        if self.load_history is not None:
            self.load_history.append(
                (now, 0 if self._paused_at_s is not None else self.num_running)
            )
