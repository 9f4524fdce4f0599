"""What a case of the kernel benchmarks is: figures of one run, each beside its named
baseline and its bar.

    CASE = Case("C8", "policy loss, forward and backward", run)

`run(is_quick)` measures; quick is a small size that shows that everything runs. Cases stand in
benchmarks/kernels (CPU:
ratios in one run) and benchmarks/gpu (a GPU: absolute figures too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number. `bar`: what it must not pass (be above, or below where
    `is_more_better`); None: reported.
    """

    what: str  # "shape A, time"
    value: float
    unit: str  # "x" of a ratio: ours over the baseline
    baseline: str = ""  # what it is a ratio to, or what it may be compared with
    bar: float | None = None
    is_more_better: bool = False

    @property
    def is_met(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.is_more_better else self.value <= self.bar


@dataclass(frozen=True)
class CaseResult:
    figures: tuple[Figure, ...]
    # shapes, seconds of each repetition, versions of baselines: what the result file keeps
    details: dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str  # "C1"
    what: str
    run: Callable[[bool], CaseResult]
