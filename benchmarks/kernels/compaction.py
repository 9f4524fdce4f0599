"""C6: the head on response tokens only: its time against the share f of tokens that are
response tokens.

Rows are chosen at random, as prompts and tool output leave them; the baseline is the head on all
tokens. What the rows give must be what they give in the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import (
    Problem,
    Shape,
    fused,
    fused_outputs,
    make_problem,
    run_head,
)
from benchmarks.kernels.measure import Parts, take_turns

SHAPE = Shape(2048, 576, 16384)
QUICK_SHAPE = Shape(256, 64, 4096)
SHARES = (0.25, 0.5, 0.75)
SLACK = 0.05
AGREEMENT = 1e-5


def rows_of(share: float, num_tokens: int) -> Tensor:
    """[R] sorted indices."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randperm(num_tokens, generator=generator)[: round(share * num_tokens)].sort().values
    )


def on_rows(problem: Problem, rows_R: Tensor) -> Callable[[], Parts]:
    chosen = Problem(
        problem.hidden_TH, problem.weight_VH, problem.targets_T[rows_R], problem.temperature
    )
    return lambda: run_head(fused(rows_R=rows_R), chosen).seconds


def difference(problem: Problem, rows_R: Tensor) -> float:
    """Largest, of the log-probs of the rows alone and in the whole."""
    with torch.no_grad():
        whole = fused_outputs(problem).log_probs_R[rows_R]
        chosen = Problem(problem.hidden_TH, problem.weight_VH, problem.targets_T[rows_R])
        return (fused_outputs(chosen, rows_R=rows_R).log_probs_R - whole).abs().max().item()


def run(is_quick: bool) -> CaseResult:
    problem = make_problem(QUICK_SHAPE if is_quick else SHAPE)
    num_tokens = problem.targets_T.numel()
    variants: dict[str, Callable[[], Parts]] = {"all": lambda: run_head(fused(), problem).seconds}
    variants |= {f"{share:g}": on_rows(problem, rows_of(share, num_tokens)) for share in SHARES}
    turns = take_turns(variants, [(f"{share:g}", "all") for share in SHARES])
    figures = []
    for share in SHARES:
        ratio = turns.ratio(f"{share:g}", "all")
        spread = f"all tokens; spread {100 * ratio.spread:.1f} % of {len(ratio.values)} rounds"
        bar = None if is_quick else share + SLACK
        figures.append(Figure(f"response tokens {share:.0%}, time", ratio.value, "x", spread, bar))
    wrong = max(difference(problem, rows_of(share, num_tokens)) for share in SHARES)
    figures.append(Figure("log-probs against those of the whole", wrong, "nat", "", AGREEMENT))
    details: dict[str, Any] = {
        "shape": str(QUICK_SHAPE if is_quick else SHAPE),
        "cpu_s": turns.summary(),
    }
    return CaseResult(tuple(figures), details)


CASE = Case("C6", "LM head on response tokens only", run)
