"""C2: peak memory of the LM head beyond its inputs and gradients, against the naive head; how it
grows with T and V.

Each measurement is a process of its own: the resident high-water mark over one forward and backward
pass, less what stood before it and the two gradients that any head must return. Growth is a line
fitted through several T (and V) at a small hidden size, over what the naive head's five [T, V]
float32 tensors grow by: 20 V bytes a token, 20 T a column.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.kernels.baselines import gradients_first, naive, token_chunks
from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import Head, Shape, fused, make_problem, run_head
from benchmarks.kernels.measure import in_child, peak_memory, reset_peak_memory

MEGABYTE = 1e6
BAR = 1 / 30
SLOPE_BAR = 1 / 100
NAIVE_BYTES = 20  # of each element of [T, V]
WARM_UP = Shape(16, 32, 128)
SIZES = {"A": Shape(2048, 576, 49152), "B": Shape(1024, 1024, 151936)}
GROWTH = Shape(1024, 64, 16384)
QUICK = {"quick": Shape(512, 64, 16384)}
QUICK_GROWTH = Shape(1024, 16, 16384)  # more than the 48 MB of logits that a CPU keeps
FACTORS = (1, 2, 4)
HEADS: dict[str, Head] = {
    "ours": fused(),
    "naive": naive(True),
    "verl's torch scheme": token_chunks,
    "Liger's FLCE scheme": gradients_first,
}


def extra_bytes(name: str, shape: Shape) -> float:
    """In this process, which must be a fresh one."""
    # loads and initialises what is loaded on first use
    run_head(HEADS[name], make_problem(WARM_UP))
    problem = make_problem(shape)
    before = reset_peak_memory()
    run_head(HEADS[name], problem)
    return peak_memory() - before - problem.gradient_bytes


def measure(name: str, shape: Shape) -> float:
    found: float = in_child(extra_bytes, name=name, shape=shape)
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.linear_regression(x, y).slope


def growth(base: Shape) -> tuple[dict[str, float], dict[str, Any]]:
    """Of ours: slope in T and in V as a fraction of naive's, and what was measured, in MB."""
    tokens = [Shape(base.num_tokens * factor, base.hidden, base.vocab) for factor in FACTORS]
    vocabs = [Shape(base.num_tokens, base.hidden, base.vocab * factor) for factor in FACTORS]
    sizes = {shape: measure("ours", shape) for shape in dict.fromkeys([*tokens, *vocabs])}
    in_tokens = slope([shape.num_tokens for shape in tokens], [sizes[shape] for shape in tokens])
    in_vocab = slope([shape.vocab for shape in vocabs], [sizes[shape] for shape in vocabs])
    return (
        {
            "T": in_tokens / (NAIVE_BYTES * base.vocab),
            "V": in_vocab / (NAIVE_BYTES * base.num_tokens),
        },
        {
            "extra_mb": {str(shape): round(size / MEGABYTE, 2) for shape, size in sizes.items()},
            "bytes_per_token": round(in_tokens, 1),
            "bytes_per_column": round(in_vocab, 1),
        },
    )


def run(is_quick: bool) -> CaseResult:
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for label, shape in (QUICK if is_quick else SIZES).items():
        names = HEADS if label == "A" else ("ours", "naive")
        found = {name: measure(name, shape) for name in names}
        bar = None if is_quick else BAR
        size = f"naive {found['naive'] / MEGABYTE:.0f} MB, ours {found['ours'] / MEGABYTE:.0f} MB"
        figures.append(
            Figure(f"{label}: extra memory", found["ours"] / found["naive"], "x", size, bar)
        )
        figures += [
            Figure(f"{label}: extra memory", found["ours"] / found[name], "x", name)
            for name in found
            if name not in ("ours", "naive")
        ]
        details[label] = {
            "shape": str(shape),
            "extra_mb": {name: round(size / MEGABYTE, 2) for name, size in found.items()},
        }
    slopes, details["growth"] = growth(QUICK_GROWTH if is_quick else GROWTH)
    figures += [
        Figure(f"growth with {symbol}", value, "x", "naive's, 20 T V bytes", SLOPE_BAR)
        for symbol, value in slopes.items()
    ]
    return CaseResult(tuple(figures), details)


CASE = Case("C2", "LM head: peak memory beyond inputs and gradients", run)
