"""One engine: all responses that it decodes advance together, as fast as their number allows.

A clock counts the tokens that each running response has got since the beginning; a response of L tokens that starts
at clock c ends at c + L. So a heap of those ends is all that must be kept: an event costs O(log n), however many
tokens lie between two events.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


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

    __slots__ = (
        "_busy_s",
        "_cached",
        "_clock",
        "_count",
        "_held_until",
        "_paused_at",
        "_seconds_a_prompt_token",
        "_seconds_a_token",
        "_slots",
        "_waiting",
        "_when",
        "history",
        "num_outstanding",
        "num_running",
        "number",
        "running",
        "stamp",
        "version",
    )

    def __init__(
        self, number: int, seconds_a_token: Sequence[float], prefill_tokens_per_s: float, has_history: bool = False
    ) -> None:
        """As many slots as there are entries of `seconds_a_token` behind the first, which counts nothing."""
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
        self._slots = len(seconds_a_token) - 1
        self._count = 0
        self._cached: set[int] = set()  # groups whose prompt it has computed
        self._busy_s = 0.0

    @property
    def slots(self) -> int:
        return self._slots

    def submit(self, now: float, group: RunningGroup) -> None:
        """All responses of a group."""
        self._advance(now)
        group.num_left = len(group.lengths)
        for length in group.lengths:
            self._waiting.append((length, group))
        self.num_outstanding += len(group.lengths)
        self._fill(now)

    def next_end(self) -> float:
        """When the next response ends if nothing else happens; infinite: none will."""
        self._drop_given_up()
        if not self.running or self._paused_at is not None:
            return math.inf
        start = self._held_until if self._held_until > self._when else self._when
        return start + max(0.0, self.running[0][0] - self._clock) * self._seconds_a_token[self.num_running]

    def take_ended(self, now: float) -> list[RunningGroup]:
        """At the time that `next_end` gave: the groups whose last response ends now."""
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
        """What it still has of that group ends without a result."""
        self._advance(now)
        num_waiting = sum(waiting is group for _, waiting in self._waiting)
        self._waiting = deque(item for item in self._waiting if item[1] is not group)
        self.num_running -= group.num_left - num_waiting
        self.num_outstanding -= group.num_left
        group.is_given_up = True
        self._drop_given_up()
        self._fill(now)

    def pause(self, now: float) -> None:
        """For a weight sync: nothing is decoded until `resume`."""
        self._advance(now)
        self._paused_at = now
        self._changed(now)

    def resume(self, now: float, version: int, recomputes: bool) -> None:
        """With new weights. `recomputes`: the keys and values of what runs are computed anew."""
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
        """How long it had something to decode and was not paused, until now."""
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
        """Those that wait get free slots. A prompt is computed once for a group; others' decoding waits for it."""
        if self._paused_at is None:
            waiting, slots = self._waiting, self._slots
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
