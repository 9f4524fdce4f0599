"""Seconds of work on a device: events between the parts of a run, warm-ups first,
median and spread.

On a CPU the clock is read instead: the same lines run, for tests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.device import read_own_resident_bytes, synchronize_device

NUM_WARMUPS = 20
NUM_RUNS = 50
MIN_WARMUPS = 3
MIN_RUNS = 7
LIMIT_S = 2.0  # of one measurement; what takes longer is run less often


@dataclass(frozen=True)
class Spread:
    """Seconds of the runs of one part."""

    median: float
    fastest: float
    slowest: float
    num_runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def time_run(run: Callable[[], object], device: torch.device, limit_s: float = LIMIT_S) -> Spread:
    return time_parts([run], device, limit_s)[0]


def time_parts(
    parts: Sequence[Callable[[], object]],
    device: torch.device,
    limit_s: float = LIMIT_S,
    before: Callable[[], object] | None = None,
) -> list[Spread]:
    """The parts in order, again and again; `before` comes before each turn and does not count.

    20 warm-ups and 50 timed turns; fewer, but 3 and 7 at least, where these would take more than
    `limit_s`. The host runs ahead of the device, so that what it does in between counts only where
    the device waits for it.
    """

    def turn() -> list[Any]:
        if before is not None:
            before()
        marks = [_mark(device)]
        for part in parts:
            part()
            marks.append(_mark(device))
        return marks

    turn()  # compiles, and is no measure of the others
    synchronize_device(device)
    start = time.perf_counter()
    turn()
    synchronize_device(device)
    a_turn = max(time.perf_counter() - start, 1e-9)
    for _ in range(_count(0.3 * limit_s / a_turn, MIN_WARMUPS, NUM_WARMUPS) - 2):
        turn()
    synchronize_device(device)
    turns = [turn() for _ in range(_count(0.7 * limit_s / a_turn, MIN_RUNS, NUM_RUNS))]
    synchronize_device(device)
    return [
        Spread.of([_seconds(marks[index], marks[index + 1]) for marks in turns])
        for index in range(len(parts))
    ]


def time_captured(run: Callable[[], object], device: torch.device, num_calls: int = 20) -> Spread:
    """Seconds of one call on the device alone: `num_calls` of them in a CUDA graph, which the host
    starts at once.

    On a CPU there is no difference to `time_run`. Raises RuntimeError where `run`
    cannot be captured.
    """
    if device.type != "cuda":
        return time_run(run, device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            run()
    calls = time_run(graph.replay, device)
    return Spread(
        calls.median / num_calls,
        calls.fastest / num_calls,
        calls.slowest / num_calls,
        calls.num_runs,
    )


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that torch held at once during `run`, beyond what it held before. On a CPU: of
    resident memory.

    Libraries keep workspaces from their first call on: call `run` once before, where these
    are not to count.
    """
    if device.type != "cuda":
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = read_own_resident_bytes()
        run()
        return max(0, _high_water_mark() - before)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _count(wished: float, least: int, most: int) -> int:
    return max(least, min(most, int(wished)))


def _mark(device: torch.device) -> Any:
    """A point in the device's work. On a CPU: now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, stop: Any) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3


def _high_water_mark() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0
