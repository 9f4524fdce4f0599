"""Whose turn it is: one thread at a time changes what a fleet knows of its engines.

Not a lock around calls: who only waits for an answer has no turn, unless nothing may change meanwhile (a weight sync).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_S = 7200.0  # that a turn is waited for: two syncs at their deadlines


class Turn:
    """Thread-safe; in the order in which it was asked for. Whoever has it gets it again."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: threading.Thread | None = None
        self._depth = 0
        self._since = 0.0  # when it was taken
        self._taken_s = 0.0  # altogether, before

    @property
    def is_mine(self) -> bool:
        return self._owner is threading.current_thread()

    def clock(self) -> float:
        """Seconds that stand still while somebody has the turn: what engines have had to work."""
        with self._condition:
            now = time.monotonic()
            return now - self._taken_s - (now - self._since if self._owner is not None else 0.0)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises RuntimeError naming the thread that keeps it."""
        with self.tried(_LONGEST_S) as is_mine:
            if not is_mine:
                owner = self._owner.name if self._owner is not None else "nobody"
                raise RuntimeError(f"the engines of this run were kept by {owner} for {_LONGEST_S:g} s.")
            yield

    @contextmanager
    def tried(self, timeout_s: float) -> Iterator[bool]:
        """False: another thread had it all that time."""
        is_mine = self._take(timeout_s)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._give_back()

    def _take(self, timeout_s: float) -> bool:
        with self._condition:
            if self.is_mine:
                self._depth += 1
                return True
            ticket = object()
            self._waiting.append(ticket)
            is_next = False
            try:
                is_next = self._condition.wait_for(
                    lambda: self._owner is None and self._waiting[0] is ticket, max(0.0, timeout_s)
                )
            finally:
                self._waiting.remove(ticket)
                if is_next:
                    self._owner, self._depth, self._since = threading.current_thread(), 1, time.monotonic()
                self._condition.notify_all()  # another ticket may be the first now
            return is_next

    def _give_back(self) -> None:
        with self._condition:
            assert self.is_mine, "it was given back by another thread"
            self._depth -= 1
            if self._depth == 0:
                self._taken_s += time.monotonic() - self._since
                self._owner = None
                self._condition.notify_all()
