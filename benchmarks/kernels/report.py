"""Results of cases: one table with bars, and what a result file keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import significant
from benchmarks.kernels.case import CaseResult, Figure

HEAD = f"{'case':5}{'what':58}{'value':>10}  {'unit':12}{'bar':>9}  {'':8}baseline"


@dataclass(frozen=True)
class Outcome:
    """Of one case. `error`: why there is no result."""

    name: str
    what: str
    seconds: float
    result: CaseResult | None
    error: str = ""

    @property
    def is_good(self) -> bool:
        return self.result is not None and all(figure.is_met for figure in self.result.figures)


def lines_of(outcome: Outcome) -> list[str]:
    """Of the table: the case, then one line a figure."""
    lines = [f"{outcome.name:5}{outcome.what} ({outcome.seconds:.0f} s)"]
    if outcome.result is None:
        return [*lines, f"     FAILED: {outcome.error.strip().splitlines()[-1]}"]
    lines += ["     " + line_of(figure) for figure in outcome.result.figures]
    absent: Mapping[str, str] = outcome.result.details.get("absent", {})
    return [*lines, *(f"     not compared: {name}: {why}" for name, why in absent.items())]


def line_of(figure: Figure) -> str:
    bar = bar_of(figure)
    verdict = verdict_of(figure)
    return (
        f"{figure.what:58}{figure.value:10.4g}  {figure.unit:12}{bar:>9}"
        f"  {verdict:8}{figure.baseline}"
    ).rstrip()


def bar_of(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    return f"{'>=' if figure.is_more_better else '<='} {figure.bar:.3g}"


def verdict_of(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    return "OK" if figure.is_met else "MISSED"


def as_json(outcomes: list[Outcome]) -> dict[str, Any]:
    """By case name; `figures_of` reads it back."""
    return {
        outcome.name: {
            "what": outcome.what,
            "seconds": round(outcome.seconds, 1),
            "error": outcome.error,
            "figures": []
            if outcome.result is None
            else [_figure(figure) for figure in outcome.result.figures],
            "details": {} if outcome.result is None else outcome.result.details,
        }
        for outcome in outcomes
    }


def figures_of(case: Mapping[str, Any]) -> list[Figure]:
    """The figures of one case of a result file."""
    return [
        Figure(**{key: value for key, value in row.items() if key != "is_met"})
        for row in case["figures"]
    ]


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "what": figure.what,
        "value": significant(figure.value),
        "unit": figure.unit,
        "baseline": figure.baseline,
        "bar": figure.bar,
        "is_more_better": figure.is_more_better,
        "is_met": figure.is_met,
    }
