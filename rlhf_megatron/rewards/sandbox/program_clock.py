"""The clock of one run of a program: what the guardian of a sandbox counts against the limit.

A run takes its wall time, less the time that the machine kept it waiting for a processor, or its
CPU time where that is more. The kernel counts the waiting for each task (`run_delay` of
/proc/PID/task/TID/schedstat). The clock takes the wait of that single task which waited longest:
the sum over all tasks would let a program that sleeps buy time with a hundred threads. Nothing
else that a process waits for is taken off, so that no state in which a program can put itself
(stopped, traced, waiting for a child of vfork, a futex or a disk) stops the clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlhf_megatron.rewards.process_tree import read_stat_fields

MAX_WALL_LIMITS = 10  # times its limit that a run may take in all, whatever it waited for
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NS_PER_S = 1e9
# fields of /proc/PID/stat after the state: CPU time of the process, and of its reaped children
FIRST_TIME = 11
END_OF_TIMES = 15


@dataclass(frozen=True)
class TreeTimes:
    """What the kernel says of processes at one moment."""

    cpu_s: float  # of all of them, and of their children that have ended and were reaped
    wait_s_by_task: dict[int, float]  # task id -> seconds that it waited for a processor


def read_tree_times(pids: Iterable[int]) -> TreeTimes:
    """Return the times of these processes. Parents must come before their children: a child that
    ends meanwhile is missed at this look then, and never counted twice.
    """
    ticks = 0
    wait_s_by_task: dict[int, float] = {}
    for pid in pids:
        ticks += sum(map(int, read_stat_fields(pid)[FIRST_TIME:END_OF_TIMES]))
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue  # the process has ended meanwhile
        for task in tasks:
            wait_s = read_wait_s(f"/proc/{pid}/task/{task}")
            if wait_s is not None:
                wait_s_by_task[int(task)] = wait_s
    return TreeTimes(ticks / TICKS_PER_S, wait_s_by_task)


def read_wait_s(folder: str) -> float | None:
    """Return the seconds that the task of this folder of /proc has waited for a processor while it
    could run; None where the task has ended, or the kernel does not say.
    """
    try:
        with open(f"{folder}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / NS_PER_S
    except (OSError, IndexError):
        return None


def can_read_waits() -> bool:
    """Return whether this kernel says how long tasks wait for a processor. One that does not count
    has no such file, or writes only zeros there, also as the time that this process has run.
    """
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[0]) > 0
    except (OSError, IndexError):
        return False


@dataclass
class ProgramClock:
    """The clock of one run. `times_at_start`: of the processes that stood around before it."""

    limit_s: float
    started_at: float  # as time.monotonic says
    times_at_start: TreeTimes
    cpu_s: float = 0.0  # the most that was seen
    longest_wait_s: float = 0.0  # of one task
    _wait_s_before: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        """Note how long each task had waited before the run."""
        self._wait_s_before = dict(self.times_at_start.wait_s_by_task)

    def add_times(self, times: TreeTimes) -> None:
        """Take in a look at the processes of the run."""
        self.cpu_s = max(self.cpu_s, times.cpu_s - self.times_at_start.cpu_s)
        for task, wait_s in times.wait_s_by_task.items():
            before_s = self._wait_s_before.get(task, 0.0)
            if wait_s < before_s:
                # the kernel gave the number of a task that has ended to a new task
                before_s = self._wait_s_before[task] = 0.0
            self.longest_wait_s = max(self.longest_wait_s, wait_s - before_s)

    def count_s(self, wall_s: float, cpu_s: float = 0.0) -> float:
        """Return the seconds that count after `wall_s` seconds of wall time. `cpu_s`: the CPU time
        as somebody else has measured it; the larger measurement counts.
        """
        return max(wall_s - self.longest_wait_s, self.cpu_s, cpu_s)

    def is_over(self, wall_s: float, cpu_s: float = 0.0) -> bool:
        """Return whether the run is over its limit, or over MAX_WALL_LIMITS times its limit in wall
        time. See `count_s` for the arguments.
        """
        has_waited_too_long = wall_s > MAX_WALL_LIMITS * self.limit_s
        return has_waited_too_long or self.count_s(wall_s, cpu_s) > self.limit_s
