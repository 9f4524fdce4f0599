"""How long a process has been at a sample, where time that the machine kept it waiting
does not count.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_megatron.rewards.process_tree import iterate_descendants, read_stat_fields

POLL_S = 0.05  # between two looks
# of the time since the last look: the one who looks was kept waiting himself
MAX_COUNTED_S = 2 * POLL_S
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# states in /proc/<pid>/stat: runs or would run; waits for a disk
RUNS = b"R"
DISK = b"D"


@dataclass
class ProcessStopwatch:
    """Count the seconds of one process that are not spent waiting for a CPU. The first look starts
    the count.
    """

    pid: int
    counted_s: float = 0.0
    _updated_at: float | None = None
    _last_cpu_s: float = 0.0

    def reset(self) -> None:
        """Set the counted time to 0; the next look starts the count."""
        self.counted_s = 0.0
        self._updated_at = None

    def update_counted_s(self) -> float:
        """Look at the process and return the seconds counted so far: its CPU time and its sleep,
        without the time in which it waited for a CPU, or itself for a disk. Call it every POLL_S.

        A wait of its descendants for a disk counts: among them are programs that strangers wrote,
        and a program that waits for a child (vfork) seems to wait for a disk.
        """
        now = time.monotonic()
        seen = list(_iterate_thread_times(self.pid))
        cpu_s = sum(seconds for _, seconds in seen)
        if self._updated_at is not None:
            # a child that nobody waited for takes its time with it
            used = max(0.0, cpu_s - self._last_cpu_s)
            asleep = (
                0.0
                if any(state in (RUNS, DISK) for state, _ in seen)
                else min(now - self._updated_at, MAX_COUNTED_S)
            )
            self.counted_s += max(used, asleep)
        self._updated_at = now
        self._last_cpu_s = cpu_s
        return self.counted_s


def _iterate_thread_times(root_pid: int) -> Iterator[tuple[bytes, float]]:
    """Yield (state, CPU seconds) of each thread of a process and its descendants, and (b"", CPU
    seconds) of their children that have ended and were waited for. Yield nothing where there is no
    /proc.

    The state of a thread of a descendant that waits for a disk is b"".
    """
    for pid in (root_pid, *iterate_descendants(root_pid)):
        if whole := read_stat_fields(pid):
            yield b"", _ticks_to_seconds(whole[13:15])
        counted_state = b"" if pid == root_pid else DISK
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                if fields := read_stat_fields(f"{pid}/task/{thread}"):
                    state = b"" if fields[0] == counted_state else fields[0]
                    yield state, _ticks_to_seconds(fields[11:13])


def _ticks_to_seconds(ticks: Sequence[bytes]) -> float:
    """Return the sum of the clock ticks in seconds."""
    return sum(map(int, ticks)) / TICKS_PER_S
