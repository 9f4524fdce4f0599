"""Which failures of a server may pass, and how long to wait before a request is sent again. Pure.

A pause is twice the one before, up to a longest one, and varies at random, so that clients which
failed together do not come back together. A server that says how long to wait is given that time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# request timeout, too early, too many requests
_PASSING_CLIENT_STATUSES = (408, 425, 429)
# not implemented, HTTP version not supported: the server would answer the same again
_LASTING_SERVER_STATUSES = (501, 505)
LONGEST_RETRY_AFTER_S = 60.0
_MOST_DOUBLINGS = 30  # beyond that a power of two would only overflow


def may_pass(status: int | None) -> bool:
    """Return whether a request that was answered with this HTTP status (None: not at all) may be
    answered otherwise later.
    """
    if status is None or status in _PASSING_CLIENT_STATUSES:
        return True
    return status >= 500 and status not in _LASTING_SERVER_STATUSES


def parse_retry_after(header: str | None) -> float:
    """Return the seconds that a Retry-After header asks to wait, at most LONGEST_RETRY_AFTER_S; 0
    where there is no such header, or one that names a date.
    """
    digits = (header or "").strip()
    if not (digits.isascii() and digits.isdecimal()):
        return 0.0
    return min(float(digits), LONGEST_RETRY_AFTER_S)


@dataclass
class RetryPauses:
    """The pauses between the tries of one request."""

    patience_s: float  # from the first try on; a try that would begin later is not made
    first_pause_s: float = 0.25
    longest_pause_s: float = 15.0
    draw: Callable[[], float] = random.random  # a number in [0, 1), by which a pause varies
    num_retries: int = field(default=0, init=False)
    _first_try_at: float | None = field(default=None, init=False)

    def start_try(self) -> None:
        """Note that a try begins; the time of the first one counts."""
        if self._first_try_at is None:
            self._first_try_at = time.monotonic()

    def choose_pause(self, retry_after_s: float = 0.0) -> float | None:
        """Return the seconds to wait before the next try, at least `retry_after_s`, and count that
        try; None where it would begin after the patience is over.
        """
        assert self._first_try_at is not None, "a try was made"
        doublings = min(self.num_retries, _MOST_DOUBLINGS)
        pause_s = min(self.first_pause_s * 2.0**doublings, self.longest_pause_s)
        pause_s = max(retry_after_s, pause_s * (0.5 + self.draw()))
        if time.monotonic() + pause_s > self._first_try_at + self.patience_s:
            return None
        self.num_retries += 1
        return pause_s
