"""C1: time of the LM head, forward and backward, against the naive one, two published schemes and
published packages.

Ours takes turns with the naive head until the ratio is steady; the schemes run once, packages too
at the long shape. Before anything is timed, all do the same small problem and must agree. The loss
without entropy is compared with naive log-probs only. What no head that computes its logits again
can be faster than is told too: four products of this shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.baselines import gradients_first, naive, token_chunks
from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import (
    CHUNK_SIZE,
    Head,
    Problem,
    Shape,
    check_same_work,
    fused,
    make_problem,
    run_head,
)
from benchmarks.kernels.measure import Parts, Turns, cpu_seconds, take_turns
from benchmarks.kernels.published import Published, find_published

OURS = "ours"
OURS_LOG_PROB = "ours, log-prob only"
OURS_STASH = "ours, stash"
NAIVE = "naive"
NAIVE_LOG_PROB = "naive, log-prob only"
TOKEN_CHUNKS = "verl's torch scheme"
GRADIENTS_FIRST = "Liger's FLCE scheme, log-prob only"
BARE = "four bare products"
AGREEMENT = Shape(67, 48, 1003)


@dataclass(frozen=True)
class Size:
    """`bar`: of the ratio with entropy. `is_long`: all but ours and naive with entropy run once."""

    shape: Shape
    bar: float | None
    is_long: bool = False


SIZES = {
    "A": Size(Shape(2048, 576, 49152), 0.85),
    "B": Size(Shape(1024, 1024, 151936), 1.0, is_long=True),
}
QUICK = {"quick": Size(Shape(256, 64, 8192), None)}


def heads(published: Published) -> dict[str, Head]:
    return {
        OURS: fused(),
        NAIVE: naive(True),
        OURS_LOG_PROB: fused(with_entropy=False),
        NAIVE_LOG_PROB: naive(False),
        OURS_STASH: with_stash,
        TOKEN_CHUNKS: token_chunks,
        GRADIENTS_FIRST: gradients_first,
        **published.heads,
    }


def with_stash(problem: Problem) -> Tensor:
    """All of the logits kept, two bytes each, and what is beside them."""
    return fused(stash_bytes=3 * problem.targets_T.numel() * problem.weight_VH.shape[0])(problem)


def bare_products(problem: Problem) -> Parts:
    """Four times the time of the logits, in tiles of our head's width, into memory that stands."""
    hidden_TH = problem.hidden_TH.detach()
    weight_VH = problem.weight_VH.detach()
    tile_TC = torch.empty(hidden_TH.shape[0], CHUNK_SIZE)

    def products() -> None:
        for weight_CH in weight_VH.split(CHUNK_SIZE):
            torch.mm(hidden_TH, weight_CH.T, out=tile_TC[:, : weight_CH.shape[0]])

    return {"products": 4 * cpu_seconds(products)}


def check(all_heads: dict[str, Head]) -> None:
    """Raises where a head does not what its baseline does."""
    problem = make_problem(AGREEMENT)
    with_entropy = {name: all_heads[name] for name in (OURS, OURS_STASH, TOKEN_CHUNKS)}
    check_same_work(with_entropy, naive(True), problem)
    others = {name: head for name, head in all_heads.items() if name not in (*with_entropy, NAIVE)}
    check_same_work(others, naive(False), problem)


def measure(problem: Problem, all_heads: dict[str, Head], is_long: bool = False) -> Turns:
    def parts_of(head: Head) -> Callable[[], Parts]:
        return lambda: run_head(head, problem).seconds

    pairs = [(OURS, NAIVE)] if is_long else [(OURS, NAIVE), (OURS_LOG_PROB, NAIVE_LOG_PROB)]
    variants = {name: parts_of(head) for name, head in all_heads.items()} | {
        BARE: lambda: bare_products(problem)
    }
    written_here = (OURS_STASH, TOKEN_CHUNKS, GRADIENTS_FIRST, BARE)
    once = [
        name
        for name in variants
        if not any(name in pair for pair in pairs) and (is_long or name in written_here)
    ]  # what compiles has done so after the first round
    return take_turns(variants, pairs, once=once)


def figures_of(label: str, size: Size, turns: Turns) -> list[Figure]:
    both = f"{label}: log-prob + entropy, time"
    log_prob = f"{label}: log-prob only, time"

    def ratio(what: str, ours: str, baseline: str, bar: float | None = None) -> Figure:
        found = turns.ratio(ours, baseline)
        rounds = (
            f"; spread {100 * found.spread:.1f} % of {len(found.values)} rounds"
            if len(found.values) > 1
            else ""
        )
        return Figure(what, found.value, "x", baseline + rounds, bar)

    figures = [ratio(both, OURS, NAIVE, size.bar), ratio(log_prob, OURS_LOG_PROB, NAIVE_LOG_PROB)]
    if OURS_STASH in turns.rounds:
        figures.append(ratio(f"{both}, with a stash", OURS_STASH, NAIVE))
    figures += [ratio(both, OURS, name) for name in (TOKEN_CHUNKS, BARE) if name in turns.rounds]
    others = (OURS, NAIVE, OURS_LOG_PROB, NAIVE_LOG_PROB, OURS_STASH, TOKEN_CHUNKS, BARE)
    return figures + [
        ratio(log_prob, OURS_LOG_PROB, name) for name in turns.rounds if name not in others
    ]


def run(is_quick: bool) -> CaseResult:
    """Packages compile for most of a minute: not part of a quick run."""
    torch.manual_seed(0)
    published = Published({}, {}) if is_quick else find_published()
    all_heads = heads(published)
    check(all_heads)
    figures: list[Figure] = []
    details: dict[str, Any] = {"absent": published.absent, "dtype": "float32"}
    for label, size in (QUICK if is_quick else SIZES).items():
        turns = measure(make_problem(size.shape), all_heads, size.is_long)
        figures += figures_of(label, size, turns)
        details[label] = {"shape": str(size.shape), "cpu_s": turns.summary()}
    return CaseResult(tuple(figures), details)


CASE = Case("C1", "LM head: time of forward and backward", run)
