"""C1: time of the LM head, forward and backward, against the naive one, two published schemes and published packages.

Ours takes turns with the naive head until the ratio is steady; the schemes and packages run once. Before anything is
timed, all do the same small problem and must agree. The loss without entropy is compared with naive log-probs only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.baselines import gradients_first, naive, token_chunks
from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import Head, Problem, Shape, check_same_work, fused, make_problem, run_head
from benchmarks.kernels.measure import Parts, Turns, take_turns
from benchmarks.kernels.published import Published, find_published

OURS, OURS_LOG_PROB = "ours", "ours, log-prob only"
NAIVE, NAIVE_LOG_PROB = "naive", "naive, log-prob only"
TOKEN_CHUNKS, GRADIENTS_FIRST = "verl's torch scheme", "Liger's FLCE scheme, log-prob only"
AGREEMENT = Shape(67, 48, 1003)


@dataclass(frozen=True)
class Size:
    """`bar`: of the ratio with entropy; `log_prob_bar`: without."""

    shape: Shape
    bar: float | None
    log_prob_bar: float | None


SIZES = {"A": Size(Shape(2048, 576, 49152), 0.85, 0.85), "B": Size(Shape(1024, 1024, 151936), 1.0, 1.02)}
QUICK = {"quick": Size(Shape(256, 64, 8192), None, None)}


def heads(published: Published) -> dict[str, Head]:
    return {
        OURS: fused(),
        NAIVE: naive(True),
        OURS_LOG_PROB: fused(with_entropy=False),
        NAIVE_LOG_PROB: naive(False),
        TOKEN_CHUNKS: token_chunks,
        GRADIENTS_FIRST: gradients_first,
        **published.heads,
    }


def check(all_heads: dict[str, Head]) -> None:
    """Raises where a head does not what its baseline does."""
    problem = make_problem(AGREEMENT)
    with_entropy = {name: all_heads[name] for name in (OURS, TOKEN_CHUNKS)}
    check_same_work(with_entropy, naive(True), problem)
    others = {name: head for name, head in all_heads.items() if name not in (*with_entropy, NAIVE)}
    check_same_work(others, naive(False), problem)


def measure(problem: Problem, all_heads: dict[str, Head]) -> Turns:
    def parts_of(head: Head) -> Callable[[], Parts]:
        return lambda: run_head(head, problem).seconds

    pairs = [(OURS, NAIVE), (OURS_LOG_PROB, NAIVE_LOG_PROB)]
    once = [name for name in all_heads if not any(name in pair for pair in pairs)]
    return take_turns({name: parts_of(head) for name, head in all_heads.items()}, pairs, once=once)


def figures_of(label: str, size: Size, turns: Turns) -> list[Figure]:
    figures = []
    for ours, baseline, bar in ((OURS, NAIVE, size.bar), (OURS_LOG_PROB, NAIVE_LOG_PROB, size.log_prob_bar)):
        what = "log-prob + entropy" if ours == OURS else "log-prob only"
        ratio = turns.ratio(ours, baseline)
        spread = f"spread {100 * ratio.spread:.1f} % of {len(ratio.values)} rounds"
        figures.append(Figure(f"{label}: {what}, time", ratio.value, "x", f"{baseline}; {spread}", bar))
    for name in turns.rounds:
        if name in (OURS, NAIVE, OURS_LOG_PROB, NAIVE_LOG_PROB):
            continue
        ours, what = (OURS, "log-prob + entropy") if name == TOKEN_CHUNKS else (OURS_LOG_PROB, "log-prob only")
        figures.append(Figure(f"{label}: {what}, time", turns.ratio(ours, name).value, "x", name))
    return figures


def run(is_quick: bool) -> CaseResult:
    """Packages compile for most of a minute: not part of a quick run."""
    torch.manual_seed(0)
    published = Published({}, {}) if is_quick else find_published()
    all_heads = heads(published)
    check(all_heads)
    figures: list[Figure] = []
    details: dict[str, Any] = {"absent": published.absent, "dtype": "float32"}
    for label, size in (QUICK if is_quick else SIZES).items():
        turns = measure(make_problem(size.shape), all_heads)
        figures += figures_of(label, size, turns)
        details[label] = {"shape": str(size.shape), "cpu_s": turns.summary()}
    return CaseResult(tuple(figures), details)


CASE = Case("C1", "LM head: time of forward and backward", run)
