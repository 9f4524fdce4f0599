"""C5: the weight's gradient straight into float32 main_grad: memory beyond it, against
autograd's own tensor.

In sizes of the gradient (dW), above a run whose weight wants none: through the sink nothing of that
size may appear; autograd's tensor is one, and a trainer that keeps main_grad adds it there.
Resident high-water marks, a process each; main_grad stands before. Two passes through the sink must
leave twice autograd's gradient.
"""

# V vocabulary, H hidden

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import (
    Problem,
    Shape,
    fused,
    make_problem,
    relative_error,
    run_head,
)
from benchmarks.kernels.measure import in_child, peak_memory, reset_peak_memory

SHAPE = Shape(512, 256, 65536)
QUICK_SHAPE = Shape(64, 256, 16384)
BAR = 0.1
WAYS = ("no gradient", "autograd", "sink")


@dataclass
class MainGrad:
    """As a trainer's sink: adds into `main_grad_VH`; autograd gets the weight's own memory,
    which nobody reads.
    """

    weight_VH: Tensor
    main_grad_VH: Tensor

    def get_buffer_VH(self) -> Tensor:
        return self.main_grad_VH

    def make_autograd_gradient(self) -> Tensor:
        return self.weight_VH.detach()


def peak_of(way: str, shape: Shape) -> float:
    """Bytes of one forward and backward pass beyond what stood before, in this process, which must
    be a fresh one.
    """
    warm_up = make_problem(Shape(16, 32, 128))
    run_head(fused(), warm_up)
    problem = make_problem(shape)
    sink = None
    if way == "no gradient":
        problem = Problem(problem.hidden_TH, problem.weight_VH.detach(), problem.targets_T)
    if way == "sink":
        sink = MainGrad(problem.weight_VH, torch.ones_like(problem.weight_VH, requires_grad=False))
    before = reset_peak_memory()
    run_head(fused(weight_grad_sink=sink), problem)
    return peak_memory() - before


def error_of_two_passes(shape: Shape) -> float:
    """Relative, of main_grad after two passes against twice autograd's gradient."""
    problem = make_problem(shape)
    expected = run_head(fused(), problem).grad_weight_VH
    assert expected is not None
    sink = MainGrad(problem.weight_VH, torch.zeros_like(problem.weight_VH, requires_grad=False))
    for _ in range(2):
        run_head(fused(weight_grad_sink=sink), problem)
    return relative_error(sink.main_grad_VH, 2 * expected)


def run(is_quick: bool) -> CaseResult:
    shape = QUICK_SHAPE if is_quick else SHAPE
    size = shape.vocab * shape.hidden * 4
    peaks = {way: in_child(peak_of, way=way, shape=shape) for way in WAYS}
    beyond = {way: (peaks[way] - peaks["no gradient"]) / size for way in WAYS}
    figures = (
        Figure(
            "memory for the weight's gradient, sink",
            beyond["sink"],
            "dW",
            f"dW is {size / 1e6:.0f} MB",
            BAR,
        ),
        Figure(
            "memory for the weight's gradient, autograd",
            beyond["autograd"],
            "dW",
            "beside main_grad",
        ),
        Figure(
            "two passes against twice autograd's",
            error_of_two_passes(QUICK_SHAPE),
            "relative",
            "",
            1e-5,
        ),
    )
    return CaseResult(
        figures, {"shape": str(shape), "peak_mb": {way: round(peaks[way] / 1e6, 2) for way in WAYS}}
    )


CASE = Case("C5", "weight gradient into main_grad", run)
