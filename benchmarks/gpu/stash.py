"""G4: forward and backward where the forward pass keeps what its byte budget allows, so that
nothing is made again.
"""

from __future__ import annotations

from benchmarks.gpu.arithmetic import HeadShape
from benchmarks.gpu.gemm import measure_gemms
from benchmarks.gpu.head import FULL, QUICK, QUICK_SHARD, SHARD, HeadInputs, MainGrad, OurHead
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.sweep import Bars, Timed, sweep
from benchmarks.gpu.timing import peak_bytes
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.ranks.workers.head_backend import MIB, STASH_MEGABYTES_16

STASH_BYTES = int(2.5e9)
DEFAULT_STASH_BYTES = STASH_MEGABYTES_16 * MIB


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    whole, shard = (QUICK, QUICK_SHARD) if is_quick else (FULL, SHARD)
    for label, shape, bar_ms in (("tp 1", whole, 48.0), ("a rank of tp 8", shard, 6.2)):
        _shape(recorder, label, shape, bar_ms)
        recorder.free()
    return recorder.result()


def _shape(recorder: Recorder, label: str, shape: HeadShape, bar_ms: float) -> None:
    inputs = HeadInputs.make(shape, recorder.device)
    gemms = measure_gemms(inputs, recorder)
    recorder.free()
    main_grad = MainGrad(inputs.weight_VH)
    recorder.add(f"{label}, bare GEMMs, time", gemms.all_three * 1e3, "ms")
    best = sweep(
        recorder,
        f"forward + backward with stash, {label}",
        inputs,
        lambda head: head.time_both(recorder.device, recorder.limit_s),
        3 * shape.gemm_flop,
        gemms.all_three,
        Bars(milliseconds=bar_ms),
        main_grad,
        STASH_BYTES,
    )
    if best is not None:
        recorder.attempt(
            f"{label}, parts", lambda: _parts(recorder, label, inputs, best, main_grad)
        )


def _parts(
    recorder: Recorder, label: str, inputs: HeadInputs, best: Timed, main_grad: MainGrad
) -> None:
    """The best pair's two passes apart, its memory, and the same with the default budget
    and with none.
    """
    for name, stash_bytes in (
        ("with stash", STASH_BYTES),
        ("default stash", DEFAULT_STASH_BYTES),
        ("recompute", 0),
    ):
        head = OurHead(inputs, best.backend, best.chunk_size, main_grad, stash_bytes)
        forward, backward = head.time_parts(recorder.device, recorder.limit_s)
        recorder.add_times(f"{label}, {name}, forward", forward)
        recorder.add_times(f"{label}, {name}, backward", backward)
        recorder.add_times(
            f"{label}, {name}, both", head.time_both(recorder.device, recorder.limit_s)
        )
        extra = peak_bytes(head.both, recorder.device)
        recorder.add(
            f"{label}, {name}, memory beyond main_grad", extra / 2**30, "GiB", f"of {best}"
        )
        recorder.free()


CASE = Case("G4", "forward and backward with the stash", run)
