"""G1: the three bare products of a head, each alone: the denominator of all other cases, and
measured again in each.

Also what the kernels build on: the logits with float32 results, and the weight's gradient added
into a slice of a float32 main_grad with no copy of the slice.
"""

# T tokens, V vocabulary rows, H hidden, C rows of a slice

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.arithmetic import GemmSeconds, HeadShape, percent, tflops
from benchmarks.gpu.head import FULL, QUICK, HeadInputs
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.timing import peak_bytes, time_run
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.ranks.kernels import matrix_products

SLICE_ROWS = 8192
COPY_BYTES = 1 << 20  # what adding into a slice may take beside it


def float32_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b as the kernels make it."""
    dtype = matrix_products.choose_operand_dtype(a, b)
    return matrix_products.multiply_matrices(a.to(dtype), b.to(dtype), out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total += a @ b as the kernels make it."""
    dtype = matrix_products.choose_operand_dtype(a, b)
    return matrix_products.add_matrix_product(total, a.to(dtype), b.to(dtype))


def measure_gemms(inputs: HeadInputs, recorder: Recorder) -> GemmSeconds:
    """The three products with 16-bit results, on these inputs, now. Holds 4 T V bytes meanwhile."""
    hidden_TH = inputs.hidden_TH.detach()
    weight_VH = inputs.weight_VH.detach()
    logits_TV = hidden_TH @ weight_VH.T
    grad_TV = torch.randn_like(logits_TV)
    grad_hidden_TH = torch.empty_like(hidden_TH)
    grad_weight_VH = torch.empty_like(weight_VH)
    runs = (
        lambda: torch.mm(hidden_TH, weight_VH.T, out=logits_TV),
        lambda: torch.mm(grad_TV, weight_VH, out=grad_hidden_TH),
        lambda: torch.mm(grad_TV.T, hidden_TH, out=grad_weight_VH),
    )
    return GemmSeconds(
        *(time_run(run, recorder.device, recorder.limit_s / 3).median for run in runs)
    )


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    shape = QUICK if is_quick else FULL
    inputs = HeadInputs.make(shape, recorder.device)
    flop = shape.gemm_flop
    recorder.note("shape", str(shape))
    gemms = measure_gemms(inputs, recorder)
    for name, seconds in vars(gemms).items():
        recorder.add(f"{name}, 16-bit result, time", seconds * 1e3, "ms")
        recorder.add(f"{name}, 16-bit result, rate", tflops(flop, seconds), "TFLOP/s")
    recorder.add("all three, rate", tflops(3 * flop, gemms.all_three), "TFLOP/s")
    recorder.free()
    recorder.attempt("float32 logits", lambda: _float32_logits(recorder, inputs, shape, gemms))
    recorder.attempt("main_grad", lambda: _main_grad(recorder, inputs, shape, gemms))
    return recorder.result()


def _float32_logits(
    recorder: Recorder, inputs: HeadInputs, shape: HeadShape, gemms: GemmSeconds
) -> None:
    hidden_TH = inputs.hidden_TH.detach()
    weight_VH = inputs.weight_VH.detach()
    logits_TV = torch.empty(shape.num_tokens, shape.vocab, device=recorder.device)
    times = time_run(
        lambda: float32_product(hidden_TH, weight_VH.T, logits_TV),
        recorder.device,
        recorder.limit_s,
    )
    recorder.add_rate("forward, float32 result", times, shape.gemm_flop, gemms.forward)


def _main_grad(
    recorder: Recorder, inputs: HeadInputs, shape: HeadShape, gemms: GemmSeconds
) -> None:
    """One slice of main_grad, as a chunk of the backward pass does it."""
    num_rows = min(SLICE_ROWS, shape.vocab // 2)
    hidden_TH = inputs.hidden_TH.detach()
    grad_TC = torch.randn(shape.num_tokens, num_rows, device=recorder.device, dtype=recorder.dtype)
    main_grad_VH = torch.zeros(shape.vocab, shape.hidden, device=recorder.device)
    slice_CH = main_grad_VH[num_rows : 2 * num_rows]

    add_product(slice_CH, grad_TC.T, hidden_TH)
    product_CH = torch.empty_like(slice_CH)
    expected_CH = float32_product(grad_TC.T, hidden_TH, product_CH)
    error = float((slice_CH - expected_CH).norm() / expected_CH.norm())
    untouched = float(
        main_grad_VH[:num_rows].abs().max() + main_grad_VH[2 * num_rows :].abs().sum()
    )
    recorder.add("main_grad slice, relative error", error, "", "the same product alone", bar=1e-6)
    recorder.add("main_grad outside of the slice", untouched, "", "zero", bar=0.0)
    extra = peak_bytes(lambda: add_product(slice_CH, grad_TC.T, hidden_TH), recorder.device)
    recorder.add(
        "main_grad slice, extra memory",
        extra / 2**20,
        "MiB",
        "a copy of the slice",
        COPY_BYTES / 2**20,
    )
    times = time_run(
        lambda: add_product(slice_CH, grad_TC.T, hidden_TH), recorder.device, recorder.limit_s
    )
    part = HeadShape(shape.num_tokens, shape.hidden, num_rows)
    share = gemms.grad_weight * num_rows / shape.vocab
    recorder.add_rate("main_grad slice", times, part.gemm_flop, share)
    alone = time_run(
        lambda: float32_product(grad_TC.T, hidden_TH, product_CH), recorder.device, recorder.limit_s
    )
    recorder.add(
        "main_grad slice, over the product alone",
        percent(times.median, alone.median),
        "%",
        "float32 result",
    )


CASE = Case("G1", "bare products of a head: the denominator", run)
