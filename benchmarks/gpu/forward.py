"""G2: log-probs and entropies without gradient, as the passes over old and reference
policy make them.
"""

from __future__ import annotations

from benchmarks.gpu.baselines import add_baselines
from benchmarks.gpu.gemm import measure_gemms
from benchmarks.gpu.head import (
    FULL,
    QUICK,
    QUICK_SHARD,
    SHARD,
    HeadInputs,
)
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.sweep import Bars, sweep
from benchmarks.kernels.case import Case, CaseResult


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    whole, shard = (QUICK, QUICK_SHARD) if is_quick else (FULL, SHARD)
    for label, shape, bars in (
        ("forward, tp 1", whole, Bars(tflops=650, milliseconds=15.7)),
        ("forward, a rank of tp 8", shard, Bars(milliseconds=2.0)),
    ):
        inputs = HeadInputs.make(shape, recorder.device)
        gemms = measure_gemms(inputs, recorder)
        recorder.note(f"{label}, shape", str(shape))
        recorder.add(f"{label}, bare GEMM, time", gemms.forward * 1e3, "ms")
        sweep(
            recorder,
            label,
            inputs,
            lambda head: head.time_forward(recorder.device, recorder.limit_s),
            shape.gemm_flop,
            gemms.forward,
            bars,
        )
        del inputs
        recorder.free()
    inputs = HeadInputs.make(whole, recorder.device)
    add_baselines(recorder, "forward, tp 1", inputs, with_backward=False)
    return recorder.result()


CASE = Case("G2", "fused log-probs and entropies, forward", run)
