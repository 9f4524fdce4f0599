"""G7: other hidden sizes and vocabularies, as per cent of the same shape's bare products."""

from __future__ import annotations

from benchmarks.gpu.arithmetic import HeadShape, percent
from benchmarks.gpu.gemm import measure_gemms
from benchmarks.gpu.head import (
    DEFAULT_CHUNK_SIZE,
    QUICK_CHUNK_SIZES,
    HeadInputs,
    MainGrad,
    OurHead,
    backends,
)
from benchmarks.gpu.recorder import Recorder
from benchmarks.kernels.case import Case, CaseResult

SHAPES = (
    HeadShape(8192, 7168, 129280),
    HeadShape(8192, 2048, 151936),
    HeadShape(8192, 4096, 248320),
    HeadShape(8192, 7168, 16160),  # one of eight tp ranks of the first
    HeadShape(32768, 2048, 37984),  # one of four of the second, with more tokens
)
QUICK_SHAPES = (HeadShape(32, 48, 200), HeadShape(40, 16, 130))
BAR_PERCENT = 80


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    for shape in QUICK_SHAPES if is_quick else SHAPES:
        recorder.attempt(str(shape), lambda shape=shape: _one(recorder, shape))
    return recorder.result()


def _one(recorder: Recorder, shape: HeadShape) -> None:
    """With the default backend and chunk size."""
    inputs = HeadInputs.make(shape, recorder.device)
    gemms = measure_gemms(inputs, recorder)
    recorder.free()
    chunk_size = QUICK_CHUNK_SIZES[0] if recorder.is_quick else DEFAULT_CHUNK_SIZE
    head = OurHead(inputs, backends(recorder.device)[-1], chunk_size, MainGrad(inputs.weight_VH))
    forward, backward = head.time_parts(recorder.device, recorder.limit_s)
    recorder.add_times(f"{shape}, forward", forward)
    recorder.add_times(f"{shape}, backward, recompute", backward)
    for name, bare_s, times in (
        ("forward", gemms.forward, forward),
        ("backward, recompute", gemms.all_three, backward),
    ):
        share = percent(bare_s, times.median)
        recorder.add(
            f"{shape}, {name}, of bare GEMM",
            share,
            "%",
            "its own",
            BAR_PERCENT,
            is_more_better=True,
        )


CASE = Case("G7", "other shapes", run)
