"""How long a process has been at a sample, where time that the machine kept it waiting does not count.

What counts is CPU time, and time in which all threads of it and of its children were seen asleep. Waiting for a CPU or
a disk does not, nor a pause of the whole machine: on an overloaded one they make seconds out of milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

POLL_S = 0.05  # between two looks
MAX_COUNTED_S = 2 * POLL_S  # of the time since the last look: the one who looks was kept waiting himself
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
AWAKE = b"RD"  # states in /proc/<pid>/stat: runs or would run; waits for a disk


@dataclass
class Stopwatch:
    """Of one process. The first look starts it."""

    pid: int
    counted_s: float = 0.0
    _looked_at: float | None = None
    _cpu_s: float = 0.0

    def reset(self) -> None:
        self.counted_s, self._looked_at = 0.0, None

    def look(self) -> float:
        """Seconds that count so far. To be called every POLL_S."""
        now = time.monotonic()
        seen = list(_tree(self.pid))
        cpu_s = sum(seconds for _, seconds in seen)
        if self._looked_at is not None:
            used = max(0.0, cpu_s - self._cpu_s)  # a child that ended takes its time with it
            asleep = 0.0 if any(state in AWAKE for state, _ in seen) else min(now - self._looked_at, MAX_COUNTED_S)
            self.counted_s += max(used, asleep)
        self._looked_at, self._cpu_s = now, cpu_s
        return self.counted_s


def _tree(pid: int) -> Iterator[tuple[bytes, float]]:
    """(state, CPU seconds) of each thread of a process and of its children. Nothing where there is no /proc."""
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"{folder}/{thread}/stat", "rb") as file:
                values = file.read().rpartition(b")")[2].split()
            with open(f"{folder}/{thread}/children", "rb") as file:
                children = file.read().split()
        except OSError:
            continue  # it has ended meanwhile
        yield values[0], (int(values[11]) + int(values[12])) / TICKS_PER_S
        for child in children:
            yield from _tree(int(child))
