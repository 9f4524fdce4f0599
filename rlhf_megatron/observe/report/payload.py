"""The data that a page's scripts draw: timeline, mismatch histograms, samples and charts, gathered as JSON.

The JSON may stand inside a script element. Steps that charts share are written once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlhf_megatron.observe.report.charts import STAGE_ORDER, Chart, Series, significant, spread_evenly
from rlhf_megatron.observe.report.files import MismatchStep, Sample, Span, WorstToken

MAX_STEPS = 400  # of which bars are embedded; of a longer run the slowest, and an even choice of the rest
NUM_SLOWEST = 100


@dataclass(frozen=True)
class Timeline:
    stages: tuple[str, ...]  # in the order of a step; calls to hosts behind them
    num_calls: int  # of the stages: the last so many are calls
    steps: tuple[Span, ...]
    bars: tuple[tuple[int, Span], ...]  # index into stages
    num_steps: int  # of the run; more than len(steps) where some were left out


def timeline(spans: Sequence[Span]) -> Timeline | None:
    """Make the timeline; None where no span belongs to a step. A step that was cut off has the extent of its stages.

    Of a step that a resumed run did again, the last time counts.
    """
    spans = _last_times(spans)
    stages = [span for span in spans if not span.is_step and span.step is not None]
    steps: dict[int | None, Span] = {}
    for span in stages:
        so_far = steps.get(span.step, span)
        start = min(so_far.start_s, span.start_s)
        end = max(so_far.start_s + so_far.seconds, span.start_s + span.seconds)
        steps[span.step] = Span(f"step {span.step}", start, end - start, span.step, True, False)
    steps |= {span.step: span for span in spans if span.is_step and span.step is not None}
    if not steps:
        return None
    kept = _chosen([steps[step] for step in sorted(steps, key=lambda step: step or 0)])
    calls = sorted({span.name for span in stages if span.is_call})
    names = sorted({span.name for span in stages} - set(calls), key=_place) + calls
    numbers = {step.step for step in kept}
    bars = tuple((names.index(span.name), span) for span in stages if span.step in numbers)
    return Timeline(tuple(names), len(calls), tuple(kept), bars, len(steps))


def _last_times(spans: Sequence[Span]) -> list[Span]:
    begins: dict[int, float] = {}
    for span in spans:
        if span.is_step and span.step is not None:
            begins[span.step] = max(span.start_s, begins.get(span.step, span.start_s))
    return [span for span in spans if span.step is None or span.start_s >= begins.get(span.step, span.start_s)]


def _place(name: str) -> tuple[int, str]:
    return (STAGE_ORDER.index(name) if name in STAGE_ORDER else len(STAGE_ORDER), name)


def _chosen(steps: Sequence[Span]) -> list[Span]:
    if len(steps) <= MAX_STEPS:
        return list(steps)
    even = spread_evenly(len(steps), MAX_STEPS - NUM_SLOWEST)
    slowest = sorted(range(len(steps)), key=lambda i: steps[i].seconds)[-NUM_SLOWEST:]
    return [steps[i] for i in sorted({*even, *slowest})]


MAX_COLUMNS = 120  # of the map over steps; longer runs add neighbouring steps up
MAX_VERSIONS = 60  # choices of policy versions; more are added up to ranges
NUM_WORST, NUM_WORST_OF_STEPS = 100, 60  # tokens over all; and the worst of so many steps


@dataclass(frozen=True)
class Cell:
    """Tokens of some steps, one range of versions and one finish reason."""

    column: int  # index into Mismatch.columns
    version: int  # index into Mismatch.versions
    reason: int  # index into Mismatch.reasons
    num_tokens: int
    mean: float
    max: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    edges: tuple[float, ...]
    columns: tuple[tuple[int, int], ...]  # first and last step of each
    versions: tuple[tuple[int, int], ...]  # first and last of each
    reasons: tuple[str, ...]
    cells: tuple[Cell, ...]
    worst: tuple[tuple[int, WorstToken], ...]  # step and token, the largest difference first
    notes: tuple[str, ...]


def mismatch(steps: Sequence[MismatchStep]) -> Mismatch | None:
    """Collect the histograms of engine against trainer; None where there are no tokens."""
    edges = Counter(step.edges for step in steps).most_common(1)[0][0] if steps else ()
    used = sorted((step for step in steps if step.edges == edges), key=lambda step: step.step)
    if not any(group.num_tokens for step in used for group in step.groups):
        return None
    notes = []
    if len(used) < len(steps):
        notes.append(f"{len(steps) - len(used)} steps with other bins are left out.")
    found = sorted({group.policy_version for step in used for group in step.groups})
    version_ranges = _ranges(found, MAX_VERSIONS)
    column_ranges = _ranges(sorted({step.step for step in used}), MAX_COLUMNS)
    reasons = sorted({group.finish_reason for step in used for group in step.groups})
    sums: dict[tuple[int, int, int], Cell] = {}
    for step in used:
        column = _index(column_ranges, step.step)
        for group in step.groups:
            place = (column, _index(version_ranges, group.policy_version), reasons.index(group.finish_reason))
            cell = Cell(*place, group.num_tokens, group.mean, group.max, group.counts)
            sums[place] = _sum(sums[place], cell) if place in sums else cell
    return Mismatch(
        edges=edges,
        columns=tuple(column_ranges),
        versions=tuple(version_ranges),
        reasons=tuple(reasons),
        cells=tuple(sums[place] for place in sorted(sums)),
        worst=_worst_of(used),
        notes=tuple(notes),
    )


def _ranges(values: Sequence[int], max_count: int) -> list[tuple[int, int]]:
    """Neighbouring values put together to at most `max_count` ranges of about the same number of values."""
    count = min(len(values), max_count)
    cuts = [i * len(values) // count for i in range(count)] + [len(values)] if count else []
    return [(values[begin], values[end - 1]) for begin, end in pairwise(cuts)]


def _index(ranges: Sequence[tuple[int, int]], value: int) -> int:
    return next(i for i, (first, last) in enumerate(ranges) if first <= value <= last)


def _sum(one: Cell, other: Cell) -> Cell:
    tokens = one.num_tokens + other.num_tokens
    mean = (one.mean * one.num_tokens + other.mean * other.num_tokens) / max(1, tokens)
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Cell(one.column, one.version, one.reason, tokens, mean, max(one.max, other.max), counts)


def _worst_of(steps: Sequence[MismatchStep]) -> tuple[tuple[int, WorstToken], ...]:
    every = [(step.step, token) for step in steps for token in step.worst]
    every.sort(key=lambda entry: -entry[1].difference)
    with_tokens = [step for step in steps if step.worst]
    of_steps = [with_tokens[i] for i in spread_evenly(len(with_tokens), NUM_WORST_OF_STEPS)]
    chosen = every[:NUM_WORST] + [(s.step, max(s.worst, key=lambda token: token.difference)) for s in of_steps]
    return tuple(sorted(dict.fromkeys(chosen), key=lambda entry: -entry[1].difference))


# What could end the script element, or a line of a script, in any parser.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Payload:
    """Gathers what the page's scripts read, while the page is written. The names are those of assets/*.js."""

    def __init__(self) -> None:
        self._axes: dict[tuple[int, ...], int] = {}
        self._charts: dict[str, dict[str, Any]] = {}
        self._views: dict[str, Any] = {}

    def add_chart(self, chart: Chart) -> None:
        self._charts[chart.name] = {
            "title": chart.title,
            "unit": chart.unit,
            "kind": chart.kind,
            "axis": chart.axis,
            "log": chart.is_log,
            "wide": chart.is_wide,
            "zero": chart.from_zero,
            "rules": [list(rule) for rule in chart.rules],
            "series": [self._series(series) for series in chart.series],
        }

    def _series(self, series: Series) -> dict[str, Any]:
        found: dict[str, Any] = {"label": series.label, "key": series.key, "meaning": series.meaning}
        found |= {"x": self._axes.setdefault(series.steps, len(self._axes)), "y": series.values}
        if series.low is not None and series.high is not None:
            found |= {"lo": series.low, "hi": series.high}
        if series.group is not None:
            found["group"] = series.group
        return found | ({"faint": True} if series.is_faint else {})

    def add_timeline(self, timeline: Timeline) -> None:
        by_time = sorted(range(len(timeline.steps)), key=lambda i: timeline.steps[i].seconds)
        self._views["timeline"] = {
            "open": by_time[len(by_time) // 2],
            "stages": timeline.stages,
            "num_calls": timeline.num_calls,
            "steps": [[s.step, round(s.start_s, 4), round(s.seconds, 4)] for s in timeline.steps],
            "bars": [[stage, s.step, round(s.start_s, 4), round(s.seconds, 5)] for stage, s in timeline.bars],
        }

    def add_samples(self, samples: Sequence[Sample]) -> None:
        self._views["samples"] = [_finite(vars(sample)) for sample in samples]

    def add_mismatch(self, mismatch: Mismatch) -> None:
        self._views["mismatch"] = {
            "edges": [significant(edge) for edge in mismatch.edges],
            "columns": mismatch.columns,
            "versions": [str(low) if low == high else f"{low} to {high}" for low, high in mismatch.versions],
            "version_ranges": mismatch.versions,
            "reasons": mismatch.reasons,
            "cells": [_cell(cell) for cell in mismatch.cells],
            "worst": [{"step": step, **_finite(vars(token))} for step, token in mismatch.worst],
        }

    def as_json(self) -> str:
        """ASCII; safe inside of <script type="application/json">."""
        data = {"axes": list(self._axes), "charts": self._charts, **self._views}
        return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same with null in place of what JSON has no number for."""
    found = dict(record)
    for key, value in record.items():
        if isinstance(value, float):
            found[key] = significant(value)
        elif isinstance(value, Mapping):
            found[key] = _finite(value)
    return found


def _cell(cell: Cell) -> dict[str, Any]:
    """Counts without the empty bins at both ends."""
    used = [i for i, count in enumerate(cell.counts) if count]
    first, last = (used[0], used[-1]) if used else (0, -1)
    return {
        "column": cell.column,
        "version": cell.version,
        "reason": cell.reason,
        "tokens": cell.num_tokens,
        "mean": significant(cell.mean),
        "max": significant(cell.max),
        "offset": first,
        "counts": cell.counts[first : last + 1],
    }
