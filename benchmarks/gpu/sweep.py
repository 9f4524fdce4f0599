"""The head over backends and chunk sizes on one shape: every pair, the best one, and what a run
takes by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.arithmetic import tflops
from benchmarks.gpu.head import (
    CHUNK_SIZES,
    DEFAULT_CHUNK_SIZE,
    QUICK_CHUNK_SIZES,
    HeadInputs,
    MainGrad,
    OurHead,
    backends,
    name_of,
    why_no_triton,
)
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.timing import Spread
from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend


@dataclass(frozen=True)
class Bars:
    """On the best pair. None: reported."""

    tflops: float | None = None
    milliseconds: float | None = None


@dataclass(frozen=True)
class Timed:
    """One pair's time, and the part of it that counts."""

    backend: LogProbBackend
    chunk_size: int
    times: Spread

    def __str__(self) -> str:
        return name_of(self.backend, self.chunk_size)


Measure = Callable[[OurHead], Spread]


def sweep(
    recorder: Recorder,
    label: str,
    inputs: HeadInputs,
    measure: Measure,
    num_flop: float,
    bare_s: float,
    bars: Bars,
    main_grad: MainGrad | None = None,
    stash_bytes: int = 0,
) -> Timed | None:
    """Returns the best pair; None where nothing ran. `label`: "forward, tp 1". A pair that fails
    loses itself only.
    """
    sizes = QUICK_CHUNK_SIZES if recorder.is_quick else CHUNK_SIZES
    default_size = sizes[0] if recorder.is_quick else DEFAULT_CHUNK_SIZE
    recorder.note("no triton", why_no_triton(recorder.device))
    kinds = backends(recorder.device)
    found: list[Timed] = []
    for backend in reversed(kinds):
        for chunk_size in sorted(sizes, key=lambda size: size != default_size):  # the default first
            head = OurHead(inputs, backend, chunk_size, main_grad, stash_bytes)
            name = f"{label}, {name_of(backend, chunk_size)}"
            times = recorder.attempt(name, lambda head=head: measure(head))
            if times is None:
                continue
            found.append(Timed(backend, chunk_size, times))
            recorder.add_times(name, times)
            recorder.add(f"{name}, rate", tflops(num_flop, times.median), "TFLOP/s")
            if (backend, chunk_size) == (kinds[-1], default_size):
                recorder.add_rate(f"{label}, default", times, num_flop, bare_s)
    if not found:
        return None
    best = min(found, key=lambda timed: timed.times.median)
    recorder.note(f"{label}, best", str(best))
    recorder.add_rate(
        f"{label}, best", best.times, num_flop, bare_s, bars.tflops, bars.milliseconds
    )
    return best
