"""G2: log-probs and entropies without gradient, as the passes over old and reference policy make them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.baselines import add_baselines
from benchmarks.gpu.gemm import measure_gemms
from benchmarks.gpu.head import (
    DEFAULT_CHUNK_SIZE,
    FULL,
    QUICK,
    QUICK_SHARD,
    SHARD,
    HeadInputs,
    OurHead,
    why_no_triton,
)
from benchmarks.gpu.recorder import MissingError, Recorder
from benchmarks.gpu.sweep import Bars, sweep
from benchmarks.gpu.timing import time_run
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.kernels.tile_ops import RowStatistics

BLOCKS = ((128, 256, 64), (128, 128, 64))  # rows, columns, hidden at a time
QUICK_BLOCKS = ((16, 32, 16),)


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
        recorder.attempt(
            f"{label}, experimental fused kernel",
            lambda label=label, inputs=inputs, gemms=gemms: _fused(recorder, label, inputs, gemms.forward),  # type: ignore[misc]
        )
        del inputs
        recorder.free()
    inputs = HeadInputs.make(whole, recorder.device)
    add_baselines(recorder, "forward, tp 1", inputs, with_backward=False)
    return recorder.result()


def _fused(recorder: Recorder, label: str, inputs: HeadInputs, bare_s: float) -> None:
    """The statistics without a tile in memory, over sizes of its blocks: it becomes a backend only if it is faster."""
    if reason := why_no_triton(recorder.device):
        raise MissingError(f"Triton: {reason}")
    from rlhf_megatron.kernels.log_prob_fused_triton import fused_forward

    hidden_TH, weight_VH, columns_T = inputs.hidden_TH.detach(), inputs.weight_VH.detach(), inputs.targets_T
    head = OurHead(inputs, "chunked", DEFAULT_CHUNK_SIZE)
    head.forward()
    assert head.outputs is not None
    for blocks in QUICK_BLOCKS if recorder.is_quick else BLOCKS:
        name = f"{label}, experimental, blocks of {'x'.join(map(str, blocks))}"

        def run(blocks: tuple[int, int, int] = blocks) -> RowStatistics:
            return fused_forward(hidden_TH, weight_VH, columns_T, None, weight_VH.shape[0], blocks)

        def measure(name: str = name, run: Callable[[], RowStatistics] = run) -> None:
            found = run()
            log_probs_T = found.target_R - found.max_R - found.sum_R.log()
            assert head.outputs is not None
            error = float((log_probs_T - head.outputs.log_probs_R).abs().max())
            recorder.add(f"{name}, largest difference", error, "nats", "log-probs of the chunked backend", 1e-4)
            times = time_run(run, recorder.device, recorder.limit_s / 2)
            recorder.add_rate(name, times, inputs.shape.gemm_flop, bare_s)

        recorder.attempt(name, measure)


CASE = Case("G2", "fused log-probs and entropies, forward", run)
