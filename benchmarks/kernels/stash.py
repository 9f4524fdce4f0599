"""C7: the backward pass from a 16-bit stash of the logits against computing them again: time, and
the error it brings.

The stash holds all of the logits, 2 T V bytes. Its error is that of the hidden states' gradient
against the one without a stash, by L2 norm.
"""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import Shape, fused, make_problem, relative_error, run_head
from benchmarks.kernels.measure import take_turns

SHAPE = Shape(2048, 576, 49152)
QUICK_SHAPE = Shape(256, 64, 4096)
TIME_BAR = 0.8
ERROR_BAR = 1e-4
STASH = "stash"
AGAIN = "recompute"


def run(is_quick: bool) -> CaseResult:
    shape = QUICK_SHAPE if is_quick else SHAPE
    problem = make_problem(shape)
    # more than the logits need: what is beside them fits too
    stash_bytes = 2 * 2 * shape.num_tokens * shape.vocab
    heads = {STASH: fused(stash_bytes=stash_bytes), AGAIN: fused()}
    with_stash, without = (run_head(head, problem) for head in heads.values())
    turns = take_turns(
        {name: lambda head=head: run_head(head, problem).seconds for name, head in heads.items()},
        [(STASH, AGAIN)],
        "backward",
    )
    backward = turns.ratio(STASH, AGAIN, "backward")
    total = turns.ratio(STASH, AGAIN)
    spread = f"recompute; spread {100 * backward.spread:.1f} % of {len(backward.values)} rounds"
    error = relative_error(with_stash.grad_hidden_TH, without.grad_hidden_TH)
    figures = (
        Figure("backward, time", backward.value, "x", spread, None if is_quick else TIME_BAR),
        Figure("forward and backward, time", total.value, "x", "recompute"),
        Figure("gradient of hidden states", error, "relative", "recompute", ERROR_BAR),
    )
    details: dict[str, Any] = {
        "shape": str(shape),
        "stash_bytes": stash_bytes,
        "cpu_s": turns.summary(),
    }
    return CaseResult(figures, details)


CASE = Case("C7", "backward pass from a stash", run)
