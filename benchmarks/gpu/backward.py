"""G3: the backward pass that computes the logits again, its weight gradient added into a
float32 main_grad.

Counted as the three products that it makes; memory is what the two passes take beyond main_grad.
"""

from __future__ import annotations

from benchmarks.gpu.arithmetic import HeadShape
from benchmarks.gpu.baselines import add_baselines
from benchmarks.gpu.gemm import measure_gemms
from benchmarks.gpu.head import FULL, QUICK, QUICK_SHARD, SHARD, HeadInputs, MainGrad, OurHead
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.sweep import Bars, Timed, sweep
from benchmarks.gpu.timing import peak_bytes
from benchmarks.kernels.case import Case, CaseResult

MEMORY_BAR_GIB = 0.6


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    whole, shard = (QUICK, QUICK_SHARD) if is_quick else (FULL, SHARD)
    for label, shape, bars in (
        ("backward, tp 1", whole, Bars(tflops=640, milliseconds=48)),
        ("backward, a rank of tp 8", shard, Bars(tflops=640)),
    ):
        _shape(recorder, label, shape, bars)
        recorder.free()
    add_baselines(
        recorder, "backward, tp 1", HeadInputs.make(whole, recorder.device), with_backward=True
    )
    return recorder.result()


def _shape(recorder: Recorder, label: str, shape: HeadShape, bars: Bars) -> None:
    inputs = HeadInputs.make(shape, recorder.device)
    gemms = measure_gemms(inputs, recorder)
    recorder.free()
    main_grad = MainGrad(inputs.weight_VH)
    recorder.add(f"{label}, bare GEMMs, time", gemms.all_three * 1e3, "ms")
    best = sweep(
        recorder,
        label,
        inputs,
        lambda head: head.time_parts(recorder.device, recorder.limit_s)[1],
        3 * shape.gemm_flop,
        gemms.all_three,
        bars,
        main_grad,
    )
    if best is not None:
        recorder.attempt(
            f"{label}, memory", lambda: _memory(recorder, label, inputs, best, main_grad)
        )


def _memory(
    recorder: Recorder, label: str, inputs: HeadInputs, best: Timed, main_grad: MainGrad
) -> None:
    head = OurHead(inputs, best.backend, best.chunk_size, main_grad)
    head.both()
    extra = peak_bytes(head.both, recorder.device)
    recorder.add(
        f"{label}, memory beyond main_grad", extra / 2**30, "GiB", f"of {best}", MEMORY_BAR_GIB
    )


CASE = Case("G3", "backward with logits computed again", run)
