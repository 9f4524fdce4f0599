"""How cases measure: variants in turns, CPU seconds of this process, ratios round by round; memory
in a forked child.

A ratio is the median over the rounds of ours over the baseline in the same round. Its spread is the
middle half of those ratios over their median; rounds go on until it is below `SPREAD`, or
`most_rounds` are done. Odd rounds run the variants in the opposite order.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import significant
from rlhf_megatron.parent_process import end_with_parent

SPREAD = 0.05
LEAST_ROUNDS = 3
REPEATS_VARIABLE = "BENCH_KERNELS_REPEATS"  # set by the runner's --repeats
CHILD_TIMEOUT_S = 300.0

# CPU seconds of each part of one run: {"forward": 1.2, "backward": 2.5}
Parts = Mapping[str, float]


def most_rounds() -> int:
    """The largest number of rounds, 5 unless the runner was told otherwise."""
    return int(os.environ.get(REPEATS_VARIABLE, "5"))


@dataclass(frozen=True)
class Ratio:
    """`value`: the median of `values`, one a round. `spread`: the middle half of them
    over the median.
    """

    value: float
    spread: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        median = statistics.median(values)
        if len(values) < 2:
            return Ratio(median, float("inf"), tuple(values))
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return Ratio(median, (high - low) / median, tuple(values))


@dataclass
class Turns:
    """CPU seconds of each part of each round, by variant."""

    rounds: dict[str, list[Parts]] = field(default_factory=dict)

    def seconds(self, name: str, part: str = "total") -> list[float]:
        return [
            sum(parts.values()) if part == "total" else parts[part] for parts in self.rounds[name]
        ]

    def ratio(self, ours: str, baseline: str, part: str = "total") -> Ratio:
        """Of the rounds that both took part in."""
        pairs = zip(self.seconds(ours, part), self.seconds(baseline, part), strict=False)
        return Ratio.of([ours_s / baseline_s for ours_s, baseline_s in pairs])

    def summary(self) -> dict[str, Any]:
        """For the result file: CPU seconds of each part and round, by variant."""
        return {
            name: {part: [significant(parts[part]) for parts in rounds] for part in rounds[0]}
            for name, rounds in self.rounds.items()
        }


def take_turns(
    variants: Mapping[str, Callable[[], Parts]],
    pairs: Sequence[tuple[str, str]],
    part: str = "total",
    once: Collection[str] = (),
    least: int = LEAST_ROUNDS,
    most: int | None = None,
) -> Turns:
    """Rounds of all variants until the ratio of each pair (ours, baseline) is steady.

    once: variants that take part in the first round only, since nothing hangs on their exact
    figure. most: None: what the runner was told.
    """
    turns = Turns({name: [] for name in variants})
    most = max(most_rounds() if most is None else most, 1)
    for index in range(most):
        names = [name for name in variants if index == 0 or name not in once]
        for name in names if index % 2 == 0 else names[::-1]:
            turns.rounds[name].append(dict(variants[name]()))
        is_steady = all(turns.ratio(*pair, part).spread < SPREAD for pair in pairs)
        if index + 1 >= min(least, most) and is_steady:
            break
    return turns


def compile_problem() -> str:
    """Why torch.compile does not run on this CPU; "" where it does."""
    return "" if shutil.which("g++") or shutil.which("clang++") else "no C++ compiler is found"


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def in_children(
    run: Callable[..., Any], jobs: Sequence[Mapping[str, Any]], timeout_s: float = CHILD_TIMEOUT_S
) -> Any:
    """`run(**job)` of each job in a process of its own, all at once: their results in order.

    Forked, so that libraries need no second loading; the caller must not have started threads.
    Raises RuntimeError with the child's traceback when one fails, dies, or takes longer than
    `timeout_s`; none is left running.
    """
    context = multiprocessing.get_context("fork")
    children = []
    for job in jobs:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, os.getpid(), run, job), daemon=False)
        process.start()
        sender.close()
        children.append((process, receiver))
    deadline = time.monotonic() + timeout_s
    try:
        return [_result(receiver, deadline, timeout_s) for _, receiver in children]
    finally:
        for process, _ in children:
            if process.is_alive():
                process.join(1.0)
            if process.is_alive():
                process.kill()
            process.join()


def in_child(run: Callable[..., Any], timeout_s: float = CHILD_TIMEOUT_S, **job: Any) -> Any:
    """`run(**job)` in a forked process: what its peak of memory needs."""
    return in_children(run, [job], timeout_s)[0]


def _child(sender: Any, parent: int, run: Callable[..., Any], job: Mapping[str, Any]) -> None:
    end_with_parent(signal.SIGKILL, parent)
    try:
        sender.send((True, run(**job)))
    except BaseException:  # whatever ends the child is the parent's to report
        sender.send((False, traceback.format_exc()))
    sender.close()


def _result(receiver: Any, deadline: float, timeout_s: float) -> Any:
    if not receiver.poll(max(deadline - time.monotonic(), 0)):
        raise RuntimeError(f"a measuring process did not answer within {timeout_s:.0f} s")
    try:
        is_good, value = receiver.recv()
    except EOFError:
        raise RuntimeError(
            "a measuring process died without a word; was it killed for its memory?"
        ) from None
    if not is_good:
        raise RuntimeError(f"a measuring process failed:\n{value}")
    return value


def reset_peak_memory() -> float:
    """Resident memory now, bytes; the high-water mark starts from it. Linux.

    What the allocator keeps of freed memory goes back first: what is made of it would not be seen.
    """
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> float:
    """Largest resident memory since the last reset, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line; these benchmarks need Linux.")
