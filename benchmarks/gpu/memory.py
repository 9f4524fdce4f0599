"""G5: the most memory of forward + backward beyond main_grad, over the number of tokens."""

from __future__ import annotations

from benchmarks.gpu.arithmetic import HeadShape
from benchmarks.gpu.baselines import BASELINES, MAX_NAIVE_TOKENS
from benchmarks.gpu.head import (
    DEFAULT_CHUNK_SIZE,
    FULL,
    QUICK,
    QUICK_CHUNK_SIZES,
    HeadInputs,
    MainGrad,
    OurHead,
    backends,
)
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.timing import peak_bytes
from benchmarks.kernels.case import Case, CaseResult

NUM_TOKENS = (8192, 32768, 131072)
BAR_GIB = 0.6


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    shape = QUICK if is_quick else FULL
    for num_tokens in (48, 96) if is_quick else NUM_TOKENS:
        tall = HeadShape(num_tokens, shape.hidden, shape.vocab)
        recorder.attempt(f"T={num_tokens}", lambda tall=tall: _ours(recorder, tall))
    for num_tokens in (48,) if is_quick else NUM_TOKENS:
        tall = HeadShape(num_tokens, shape.hidden, shape.vocab)
        for name in BASELINES:
            recorder.attempt(
                f"T={num_tokens}, {name}",
                lambda name=name, tall=tall: _baseline(recorder, tall, name),
            )
    return recorder.result()


def _ours(recorder: Recorder, shape: HeadShape) -> None:
    chunk_size = QUICK_CHUNK_SIZES[0] if recorder.is_quick else DEFAULT_CHUNK_SIZE
    inputs = HeadInputs.make(shape, recorder.device)
    head = OurHead(inputs, backends(recorder.device)[-1], chunk_size, MainGrad(inputs.weight_VH))
    head.both()  # the workspaces of libraries stay
    extra = peak_bytes(head.both, recorder.device)
    # Its gradient of the hidden states grows with T whatever one does: float32 sums, and the result
    # in their type.
    grad_hidden = shape.num_tokens * shape.hidden * (4 + recorder.dtype.itemsize)
    recorder.add(f"T={shape.num_tokens}, beyond main_grad", extra / 2**30, "GiB", "", _bar(shape))
    rest = (extra - grad_hidden) / 2**30
    recorder.add(
        f"T={shape.num_tokens}, the same without the hidden states' gradient",
        rest,
        "GiB",
        "",
        BAR_GIB,
    )


def _bar(shape: HeadShape) -> float | None:
    return BAR_GIB if shape.num_tokens == FULL.num_tokens else None


def _baseline(recorder: Recorder, shape: HeadShape, name: str) -> None:
    """Its weight's gradient counts: it has no main_grad to add it to."""
    if name.startswith("naive") and shape.num_tokens > MAX_NAIVE_TOKENS:
        return
    inputs = HeadInputs.make(shape, recorder.device)
    baseline = BASELINES[name](inputs)
    baseline.both()
    extra = peak_bytes(baseline.both, recorder.device)
    recorder.add(
        f"T={shape.num_tokens}, {name}, weight gradient included",
        extra / 2**30,
        "GiB",
        baseline.note,
    )


CASE = Case("G5", "peak memory over the number of tokens", run)
